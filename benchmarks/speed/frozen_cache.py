"""Measure epochs with and without the cache of frozen layers (`train.frozen_cache`).

    python benchmarks/speed/frozen_cache.py [--data FOLDER] [--output frozen_cache.json]
    python benchmarks/speed/frozen_cache.py --table

Each method trains on the built-in docstrings, or on the files train.tsv and dev.tsv of a folder
(GLUE), with the recipe's defaults and without evaluations. Runs without the cache, with it in
memory, and with it on disk after an earlier run alternate in one process, so that drift affects all
of them equally. Figures are processor time on the given number of threads:

    epoch          the median of all epochs but the first, in seconds
    first epoch    the first, with what is computed once
    run            all epochs

`loss` has the mean training loss of the last epoch of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from adapterhub.loop.report import Reporter, TrainingLine
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training.run import run

METHODS = ("head", "scalar-mix", "freeze(top=1)", "freeze(top=2)", "lora(layers=top 1)")
WAYS = {"computed": "off", "memory": "memory"}
RECORD = Path(__file__).parents[1] / "results/speed/frozen_cache.json"
BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass
class StepTimes(Reporter):
    """Keeps the time after each step, and the losses."""

    ticks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def start(self, total: int, done: int) -> None:
        """Note the time at which training begins: before anything is recorded."""
        self.ticks.append(time.process_time())

    def advance(self, step: int) -> None:
        """Note the time after a step."""
        self.ticks.append(time.process_time())

    def trained(self, line: TrainingLine, timing: Any) -> None:
        """Keep the loss of a step."""
        self.losses.append(line.loss)

    def note(self, text: str) -> None:
        """Keep what was said about the cache."""
        if "frozen" in text:
            self.notes.append(text)

    def epochs(self, count: int) -> list[float]:
        """Return the seconds of each epoch."""
        steps = (len(self.ticks) - 1) // count
        ends = self.ticks[::steps]
        return [end - start for start, end in itertools.pairwise(ends)]


def main() -> None:
    """Measure and print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backbone", default=BACKBONE)
    parser.add_argument("--data", type=Path, help="a folder with train.tsv")
    parser.add_argument("--columns", default="sentence,label", help="of train.tsv: text,label")
    parser.add_argument("--rows", type=int, help="train on so many rows")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", action="store_true", help="print the table of the record")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    torch.set_num_threads(options.threads)
    measured = record(options)
    print(as_table(measured))
    if options.output:
        options.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        results = {method: measure(method, options, Path(folder)) for method in options.methods}
    settings = {k: str(v) for k, v in vars(options).items() if k not in ("output", "table")}
    return {
        "config": settings,
        "results": results,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def measure(method: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all ways of one method, on the same rows in each round."""
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    losses, notes = {}, {}
    for number in range(options.rounds + 1):
        for way, where in WAYS.items():
            reporter = StepTimes()
            run(recipe(method, where, options, folder), reporter)
            if number:
                epochs = reporter.epochs(options.epochs)
                times[way].append(epochs)
                last = reporter.losses[-(len(reporter.losses) // options.epochs) :]
                losses.setdefault(way, round(statistics.fmean(last), 5))
                notes[way] = reporter.notes[-1] if reporter.notes else ""
    return {"seconds": {way: summary(runs) for way, runs in times.items()},
            "loss": losses, "notes": notes}  # fmt: skip


def summary(runs: list[list[float]]) -> dict[str, float]:
    """Return the medians of the epochs of several runs."""
    later = [seconds for epochs in runs for seconds in epochs[1:]]
    figures = {
        "epoch": statistics.median(later),
        "epoch_min": min(later),
        "epoch_max": max(later),
        "first epoch": statistics.median(epochs[0] for epochs in runs),
        "run": statistics.median(map(sum, runs)),
    }
    return {name: round(seconds, 4) for name, seconds in figures.items()}


def recipe(method: str, where: str, options: argparse.Namespace, folder: Path) -> Recipe:
    """Return the recipe of one run.

    Args:
        method: the method.
        where: the value of `train.frozen_cache`.
        options: the backbone, data and epochs.
        folder: where runs are written.
    """
    output = tempfile.mkdtemp(dir=folder)
    os.rmdir(output)
    words = [f"method={method}", f"train.frozen_cache={where}", "data.eval=none"]
    words += [f"train.epochs={options.epochs}", "train.tensorboard=false", "train.report=false"]
    words += ["train.log_every=1"]
    data: dict[str, Any] = {"train": "builtin:docstrings"}
    if options.data:
        text, label = options.columns.split(",")
        data = {"train": str(options.data / "train.tsv"), "text": text, "label": label}
    if options.rows:
        data["rows"] = options.rows
    return read(None, words, {"backbone": options.backbone, "output": output, "data": data})


def table() -> str:
    """Return the Markdown table of the committed record."""
    return as_table(json.loads(RECORD.read_text(encoding="utf-8")))


def as_table(measured: dict[str, Any]) -> str:
    """Return the Markdown table of a record."""
    columns = (
        "method",
        "epoch",
        "with the cache",
        "first epoch",
        "whole run",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for method, result in measured["results"].items():
        computed, memory = (result["seconds"][way] for way in WAYS)
        cells = [
            f"`{method}`",
            f"{computed['epoch']:.2f} s",
            f"{memory['epoch']:.2f} s: {computed['epoch'] / memory['epoch']:.1f} x",
            f"{computed['first epoch'] / memory['first epoch']:.1f} x",
            f"{computed['run'] / memory['run']:.1f} x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
