"""Pre-train an encoder-decoder and a decoder in miniature, and write data for their studies.

    python benchmarks/studies/miniature.py DATA OUT [--only decoder] [--steps 1200]
    cd OUT
    adapterhub bench REPOSITORY/benchmarks/studies/miniature-seq2seq.yaml --output FOLDER
    adapterhub bench REPOSITORY/benchmarks/studies/miniature-causal.yaml --output FOLDER

DATA has multi30k and gsm8k as published. A random T5 and a random Llama of some two million
parameters are trained for minutes, by this library's `full`, and merged into checkpoints:

    encoder-decoder   captions of both languages with words left out -> the caption,
                      German captions -> English ones         study: English -> German
    decoder           English captions and GSM8K's questions   study: German captions

The first 20,000 pairs of captions pre-train, the others are for the studies. What such a miniature
shows: that each method trains on these architectures, and how they compare on a backbone that knows
something related. It does not show what they reach on a real one, which has seen a million times as
much text and has abilities that little data can bring out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from real import save_random
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

PRETRAINING = 20_000  # pairs of captions; the others are for the studies
TESTED = 300
LEFT_OUT = 0.3  # of the words of a caption
VOCABULARY = 4000
FROM_GERMAN, TO_GERMAN = "translate German to English: ", "translate English to German: "

Pair = tuple[str, str]


@dataclass(frozen=True)
class Miniature:
    """A small model: its class, its configuration, and the task that pre-trains it."""

    model: type
    config: Any
    task: str
    batch_size: int = 32


MINIATURES = {
    "encoder-decoder": Miniature(
        T5ForConditionalGeneration,
        T5Config(
            vocab_size=VOCABULARY, d_model=192, d_kv=48, d_ff=512, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
            decoder_start_token_id=0, dropout_rate=0.0,
        ),
        "seq2seq(new_tokens=8)",
    ),
    "decoder": Miniature(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
            pad_token_id=0, bos_token_id=1, eos_token_id=1, tie_word_embeddings=True,
        ),
        "causal-lm(data=text)",
    ),
}  # fmt: skip


def main() -> None:
    """Write the data, and pre-train the models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", choices=MINIATURES, help="one of the two models")
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    files = write_data(options.data, options.output / "data")
    texts = [text for path in files.values() for text in _texts(path)]
    for name in [options.only] if options.only else MINIATURES:
        pretrain(name, texts, options.output, options.steps)


def write_data(source: Path, output: Path) -> dict[str, Path]:
    """Write the rows that pre-train, and those of the studies; return the former by model.

    Args:
        source: the folder with multi30k and gsm8k.
        output: the folder for the rows.
    """
    output.mkdir(parents=True, exist_ok=True)
    train = captions(source, "train")
    known, held_out = train[:PRETRAINING], train[PRETRAINING:]
    tested = captions(source, "val")[:TESTED]
    questions = [json.loads(line)["question"] for line in _lines(source / "gsm8k/train.jsonl")]
    for name, pairs in {"train": held_out, "test": tested}.items():
        rows = [{"text": TO_GERMAN + english, "label": german} for english, german in pairs]
        _write(output / f"translation.{name}.jsonl", rows)
        _write(output / f"german.{name}.jsonl", [{"text": german} for _, german in pairs])
    texts = [english for english, _ in known] + questions
    return {
        "encoder-decoder": _write(output / "encoder-decoder.jsonl", pretraining_pairs(known)),
        "decoder": _write(output / "decoder.jsonl", [{"text": text} for text in texts]),
    }


def captions(source: Path, split: str) -> list[Pair]:
    """Return pairs of an English and a German caption."""
    sides = [_lines(source / f"multi30k/{split}.{language}.gz") for language in ("en", "de")]
    return list(zip(*sides, strict=True))


def pretraining_pairs(pairs: Sequence[Pair], seed: int = 0) -> list[dict[str, str]]:
    """Return rows that restore words which were left out, and rows that translate from German."""
    draw = random.Random(seed)
    rows = []
    for english, german in pairs:
        own = draw.choice((english, german))
        rows.append({"text": with_gaps(own, draw), "label": own})
        rows.append({"text": FROM_GERMAN + german, "label": english})
    return rows


def with_gaps(text: str, draw: random.Random) -> str:
    """Return a text in which some words are replaced by a line."""
    return " ".join("_" if draw.random() < LEFT_OUT else word for word in text.split())


def pretrain(name: str, texts: Iterable[str], output: Path, steps: int) -> None:
    """Train a random model on its rows, and write it as a checkpoint.

    Args:
        name: one of `MINIATURES`.
        texts: what the tokenizer is trained on.
        output: the folder of the studies.
        steps: of the optimizer.
    """
    mini = MINIATURES[name]
    start, run = output / f"random-{name}", output / f"run-{name}"
    save_random(mini.model, mini.config, iter(texts), start)
    options = {
        "name": name, "output": run, "seed": 0, "dtype": "fp32", "data.eval": "none",
        "train.max_steps": steps, "train.learning_rate": 2e-3, "train.schedule": "cosine",
        "train.batch_size": mini.batch_size, "train.max_length": 64,
    }  # fmt: skip
    model = ("--backbone", start, "--method", "full", "--task", mini.task)
    data = ("--train", output / "data" / f"{name}.jsonl", "--text", "text")
    label = ("--label", "label") if name == "encoder-decoder" else ()
    _adapterhub("train", *model, *data, *label, *(f"{k}={v}" for k, v in options.items()))
    _adapterhub("merge", run, "--output", output / name)


def _adapterhub(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "adapterhub", *map(str, words)], check=True)


def _texts(path: Path) -> list[str]:
    rows = [json.loads(line) for line in _lines(path)]
    return [row.get("label", row["text"]) for row in rows]


def _lines(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def _write(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
