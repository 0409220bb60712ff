"""Two adapters of one backbone with different labels, and Parquet files whose rows name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adapterhub.inference.open import AdapterSource
from adapterhub.inference.table_job import TableJob
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.training.run import run
from tests.kit.fixtures import sentences, write_tsv

ROWS = 46
LABELS: dict[str, Callable[[str, str], str]] = {
    "mood": lambda text, label: label,
    "thing": lambda text, label: text.split()[1],
}


def train_two(backbone: Path, folder: Path) -> dict[str, AdapterSource]:
    """Train an adapter for the class of a sentence and one for its second word; return both."""
    found = {}
    for name, label_of in LABELS.items():
        rows = [(text, label_of(text, label)) for text, label in sentences(48)]
        file = write_tsv(folder / f"{name}.tsv", rows)
        words = ["method=lora(rank=2)", "train.max_steps=12", "train.report=false"]
        words += ["train.learning_rate=5e-3", "train.tensorboard=false"]
        flags: dict[str, Any] = {"backbone": str(backbone), "output": str(folder / name)}
        flags["data"] = {"train": str(file), "eval": "none"}
        run(read(None, words, flags), Reporter())
        found[name] = AdapterSource(str(folder / name))
    return found


def write_table(folder: Path, group: int = 5) -> str:
    """Write two files of sentences with the adapter of each row; return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for text, _ in sentences(ROWS)]
    names = [("mood", "thing", "thing")[number % 3] for number in range(ROWS)]
    table = pa.table({"id": list(range(ROWS)), "text": texts, "adapter": names})
    pq.write_table(table.slice(0, 20), folder / "a.parquet", row_group_size=group)
    pq.write_table(table.slice(20), folder / "b.parquet", row_group_size=group)
    return str(folder / "*.parquet")


def routed(sources: dict[str, AdapterSource], source: str) -> TableJob:
    """Return a job in which a column names the adapters."""
    return TableJob(source, sources, route="adapter")
