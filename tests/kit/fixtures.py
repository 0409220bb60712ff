"""Small data sets, a word-level tokenizer and a short training loop for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.options import RunOptions
from tests.kit import tiny_models

WORDS = [
    "the",
    "a",
    "movie",
    "film",
    "was",
    "is",
    "very",
    "good",
    "great",
    "fine",
    "bad",
    "poor",
    "awful",
    "dull",
    "plot",
    "actor",
    "scene",
    "end",
]
GOOD, BAD = ("good", "great", "fine"), ("bad", "poor", "awful", "dull")


SENTINELS = [f"<extra_id_{i}>" for i in range(8)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def word_tokenizer(start: str = "", end: str = "") -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer with the special ids of `tiny_models`.

    It puts the tokens `start` and `end` around each text.
    """
    special = ["<unk>", "<pad>", "</s>", "<s>", "<mask>"]
    words = [*special, *SENTINELS, *WORDS, "user", "assistant", ":", "0", "1", "2", "3"]
    assert len(words) <= tiny_models.VOCAB
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(w, words.index(w)) for w in (start, end) if w]
    if around:
        single = " ".join(part for part in (start, "$A", end) if part)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>",
        bos_token="<s>", mask_token="<mask>", additional_special_tokens=SENTINELS,
        model_max_length=64, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def write_json_lines(path: Path, rows: list[dict]) -> Path:
    """Write rows to a JSON Lines file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sentences(count: int) -> list[tuple[str, str]]:
    """Generate (sentence, label) pairs; one word of the sentence determines its label."""
    rows = []
    for i in range(count):
        label, words = ("pos", GOOD) if i % 2 else ("neg", BAD)
        thing = ("movie", "film", "plot", "actor", "scene", "end")[i // 2 % 6]
        rows.append(
            (f"the {thing} was {'very ' * (i // 5 % 2)}{words[i // 3 % len(words)]}", label)
        )
    return rows


def write_tsv(path: Path, rows: list[tuple[str, ...]], header: str = "text\tlabel") -> Path:
    """Write rows to a tab-separated file and return its path."""
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


def json_lines(text: str) -> list[dict]:
    """Parse JSON Lines."""
    return [json.loads(line) for line in text.splitlines()]


def train(adapter, steps, learning_rate=None):
    """Train with AdamW, by default at the method's own learning rate; return the losses."""
    options = RunOptions(learning_rate=learning_rate, head_learning_rate=learning_rate or 1e-3)
    groups = AdapterTrainee(adapter).param_groups(options)
    optimizer = torch.optim.AdamW(groups)
    losses = []
    for _ in range(steps):
        loss = adapter.model(**tiny_models.labelled_batch(adapter.model)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
