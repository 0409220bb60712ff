"""A run with three tasks on a tiny backbone: two classifications and a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterhub.recipe.recipe import Recipe, read
from tests.kit.fixtures import sentences, write_tsv

HEADS = {"mood": ("neg", "pos"), "thing-2": ("actor", "end", "film"), "length": ()}


def write_tasks(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the data of three tasks of 24, 20 and 9 rows, and return them for a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sentences(96)
    things = [(text, word) for text, _ in rows if (word := text.split()[1]) in HEADS["thing-2"]]
    lengths = [(text, str(len(text.split()) / 2)) for text, _ in rows[5:]]
    data = {"mood": rows[:24], "thing-2": things[:20], "length": lengths[:9]}
    tasks = {}
    for name, own in data.items():
        train = write_tsv(folder / f"{name}.tsv", own)
        dev = write_tsv(folder / f"{name}-dev.tsv", own[::2])
        tasks[name] = {"data": {"train": str(train), "eval": str(dev)}}
    tasks["length"] |= {"task": "regression", "weight": 0.5}
    return tasks


def mixed_recipe(
    backbone: Path, folder: Path, *words: str, tasks: dict[str, Any] | None = None
) -> Recipe:
    """Return a recipe with three tasks, in a new folder; words are KEY=VALUE."""
    flags = {
        "backbone": str(backbone),
        "output": str(folder / "run"),
        "tasks": tasks or write_tasks(folder / "data"),
    }
    usual = ["method=lora(rank=2)", "train.batch_size=4", "train.epochs=2", "train.log_every=1"]
    usual += ["train.tensorboard=false", "train.report=false"]
    return read(None, [*usual, *words], flags)
