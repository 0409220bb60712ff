"""Measure texts that the serving engine writes, against one text after the other.

    python benchmarks/speed/generation.py [BACKBONE] [--output generation.json]

The backbone is a folder of a causal language model; by default a random Llama of 6 layers. All
texts of a turn are asked for at once, with prompts of 8 to 40 random tokens; they are greedy, with
at most 32 tokens:

    no adapter     the engine, the backbone without an adapter
    8 lora         the engine, 8 LoRA adapters, a random one for each text
    8 mixed        the same with adapters of 8 methods
    one by one     `generate` of transformers for each text of 8 mixed, its adapter activated
    one by one, no adapter    the same without adapters

The variants alternate, in one process. Of each the median over the turns: written tokens per
second, and milliseconds of the processor per token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from in_turns import add_options, write_record
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.adapters.route import activate
from adapterhub.inference.open import AdapterSource, open_several
from adapterhub.serving import Engine, GenerationOptions

METHODS = ("lora", "dora", "ia3", "pfeiffer", "parallel", "prefix", "prompt", "compacter")
VOCABULARY, SPECIAL = 8192, ("<unk>", "<s>", "</s>")
Write = Callable[[Sequence[str]], int]  # texts from prompts; returns their tokens
Variants = dict[str, Write]


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backbone", nargs="?", type=Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--texts", type=int, default=16, help="in a turn")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("--only", help="variants, with commas")
    add_options(parser)
    parser.set_defaults(runs=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        backbone = options.backbone or random_llama(Path(folder) / "llama")
        variants = make_variants(options, backbone, Path(folder), opened)
        write_record(options, measure(options, backbone, variants), "tokens")


def random_llama(folder: Path) -> Path:
    """Save a random Llama and a tokenizer of as many words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = [*SPECIAL, *(f"w{n}" for n in range(VOCABULARY - len(SPECIAL)))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=SPECIAL[2], **names)
    tokenizer.save_pretrained(folder)
    return folder


def make_variants(
    options: argparse.Namespace, backbone: Path, folder: Path, opened: ExitStack
) -> Variants:
    """Save adapters, open engines, and return what writes the texts of a turn."""
    count = options.adapters
    loras = save_adapters(backbone, folder / "lora", count, METHODS[:1])
    mixed = save_adapters(backbone, folder / "mixed", count, METHODS)

    def served(adapters: Sequence[str | None]) -> Write:
        engine = opened.enter_context(Engine(str(backbone)))
        return lambda prompts: ask(engine, adapters, prompts, options.tokens)

    variants: dict[str, Callable[[], Write]] = {
        "no adapter": lambda: served([None]),
        f"{count} lora": lambda: served(loras),
        f"{count} mixed": lambda: served(mixed),
        "one by one": lambda: one_by_one(backbone, mixed, options.tokens, active=True),
        "one by one, no adapter": lambda: one_by_one(
            backbone, mixed[:1], options.tokens, active=False
        ),
    }
    names = options.only.split(",") if options.only else variants
    return {name: make() for name, make in variants.items() if name in names}


def save_adapters(backbone: Path, folder: Path, count: int, methods: Sequence[str]) -> list[str]:
    """Save adapters with random values."""
    model, _ = ah.load_backbone(str(backbone), task="causal-lm")
    for number in range(count):
        adapter = ah.attach(model, methods[number % len(methods)], name="saved")
        adapter.metadata.training = {"recipe": {"task": "causal-lm"}}
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        adapter.save(folder / str(number))
        adapter.detach()
    return [str(folder / str(number)) for number in range(count)]


def ask(engine: Engine, adapters: Sequence[str | None], prompts: Sequence[str], tokens: int) -> int:
    """Ask for all texts, and wait for them; return their tokens."""
    chosen = random.Random(0)
    how = GenerationOptions(max_tokens=tokens, temperature=0)
    running = [engine.generate(chosen.choice(adapters), prompt, how) for prompt in prompts]
    return sum(each.result().completion_tokens for each in running)


def one_by_one(backbone: Path, adapters: Sequence[str], tokens: int, *, active: bool) -> Write:
    """Return one call of `generate` after the other."""
    opened = open_several({each: AdapterSource(each) for each in adapters}, str(backbone))

    def write(prompts: Sequence[str]) -> int:
        chosen, count = random.Random(0), 0
        for prompt in prompts:
            name = chosen.choice(adapters)
            predictor = opened.predictors[name]
            activate(predictor.model, *([opened.attached[name]] if active else []))
            inputs = predictor.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            with torch.inference_mode():
                ids = predictor.model.generate(
                    **inputs, max_new_tokens=tokens, do_sample=False, use_cache=True
                )
            count += ids.shape[1] - inputs["input_ids"].shape[1]
        return count

    return write


def measure(
    options: argparse.Namespace, backbone: Path, variants: Variants
) -> dict[str, dict[str, float]]:
    """Time the variants in turns, each on the same prompts, which are others in each turn."""
    tokenizer = ah.load_backbone(str(backbone), task="causal-lm")[1]
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(options.runs + 1):
        prompts = random_prompts(tokenizer, options.texts, turn)
        for name, write in variants.items():
            start = time.perf_counter(), time.process_time()
            count = write(prompts)
            if turn:  # the first one warms up
                wall[name].append((time.perf_counter() - start[0]) / count)
                processor[name].append((time.process_time() - start[1]) / count)
    return {
        name: {
            "per second": round(1 / statistics.median(wall[name]), 1),
            "processor ms each": round(1000 * statistics.median(processor[name]), 3),
            "fastest turn per second": round(1 / min(wall[name]), 1),
        }
        for name in variants
    }


def random_prompts(tokenizer: Any, count: int, seed: int) -> list[str]:
    """Return prompts of 8 to 40 random tokens that no other turn has."""
    drawn = random.Random(seed)
    known = range(len(SPECIAL) + 20, len(tokenizer) - 20)
    lengths = [drawn.randint(8, 40) for _ in range(count)]
    return [tokenizer.decode(drawn.sample(known, length)) for length in lengths]


if __name__ == "__main__":
    main()
