"""Adapters that write texts, and what each writes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from adapterhub.inference.open import open_adapter
from tests.kit.served import TaskExample, write_adapter

CAUSAL = TaskExample("causal-lm", "causal-lm")
SEQ2SEQ = TaskExample("seq2seq", "seq2seq")
METHODS = (
    "lora(rank=2)",
    "dora(rank=2)",
    "ia3",
    "pfeiffer(size=4)",
    "compacter(size=8, n=2)",
    "prefix(length=3)",
    "prompt(length=4)",
    "p-tuning(length=2)",
)
PROMPTS = (
    "the movie was good",
    "a plot",
    "the film is very very dull and the end was great",
    "the actor was awful",
    "a scene is bad a scene is bad a scene is bad a scene is bad",
)
LONG_PROMPT = "the movie was good and the plot was bad " * 4 + "the end"


def write_writers(
    backbone: Path, folder: Path, methods: tuple[str, ...] = METHODS, example: Any = CAUSAL
) -> list[str]:
    """Save an adapter of each method; return their folders."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            write_adapter(backbone, folder / f"writer-{n}", method, example, seed=n + 1)
            for n, method in enumerate(methods)
        ]


def written_alone(folder: str, prompt: Any, tokens: int) -> list[int]:
    """Return the tokens that `generate` writes for one prompt, with the adapter active."""
    known = (folder, str(prompt), tokens)
    if known not in _WRITTEN:
        opened = _OPENED.setdefault(folder, open_adapter(folder))
        _WRITTEN[known] = tokens_alone(opened.model, opened.tokenizer, prompt, tokens)
    return _WRITTEN[known]


@torch.no_grad()
def tokens_alone(model: Any, tokenizer: Any, prompt: Any, tokens: int) -> list[int]:
    """Return the tokens that `generate` writes for one prompt with what is active."""
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=True)
    first = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return list(ids[0, first:].tolist())


_OPENED: dict[str, Any] = {}
_WRITTEN: dict[Any, list[int]] = {}
