"""Parquet shards to stream, and recipes that stream them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adapterhub.recipe.recipe import Recipe, read
from tests.kit.fixtures import WORDS, sentences


def write_shards(folder: Path, sizes: tuple[int, ...] = (20, 13, 31), rows: int = 5) -> str:
    """Write sentences with their class into Parquet files of some sizes; return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    made, start = sentences(sum(sizes)), 0
    for number, size in enumerate(sizes):
        texts = [
            f"{text} {own_words(start + i)}" for i, (text, _) in enumerate(made[start:][:size])
        ]
        labels = [label for _, label in made[start : start + size]]
        table = pa.table({"text": texts, "label": labels})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=rows)
        start += size
    return str(folder / "part-*.parquet")


def own_words(number: int) -> str:
    """Return three words without a meaning for the class, other ones for each number to 511."""
    return " ".join(WORDS[number // 8**place % 8] for place in range(3))


def streamed_recipe(backbone: Path, output: Path, source: str, *words: str, **data: Any) -> Recipe:
    """Return a recipe that streams a source without evaluation; words are KEY=VALUE."""
    flags = {
        "backbone": str(backbone),
        "output": str(output),
        "data": {"train": source, "eval": "none", "stream": True} | data,
    }
    usual = ["method=lora(rank=2)", "train.batch_size=4", "train.max_steps=12", "data.buffer=16",
             "train.log_every=1", "train.tensorboard=false", "train.report=false"]  # fmt: skip
    return read(None, [*usual, *words], flags)
