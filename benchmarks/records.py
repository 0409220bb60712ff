"""Benchmark records: one JSON file per run, with its command and results."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def run(name: str, command: list[str], shown: list[str], folder: Path) -> None:
    """Run a training command and write its record.

    Args:
        name: the record's name.
        command: the command to run.
        shown: the command to record, with generic paths instead of local ones.
        folder: the output folder of the command.
    """
    subprocess.run([sys.executable, "-m", *command, "--quiet"], check=True)
    manifest = json.loads((folder / "adapter/adapter.json").read_text(encoding="utf-8"))
    timing = json.loads((folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    record = {
        "command": shown,
        "metrics": manifest["metrics"],
        "adapter_bytes": sum(f.stat().st_size for f in (folder / "adapter").iterdir()),
        "parameters": parameters(manifest),
        "seconds": timing["seconds"],
        "peak_memory": timing["peak_memory"],
        "data_sha256": manifest["training"]["data"]["sha256"],
        "backbone": manifest["backbone"],
        "versions": manifest["versions"] | {"python": platform.python_version()},
        "device": f"CPU ({platform.machine()}), {threads} thread(s)",
    }
    write(name, record)


def run_words(name: str, command: list[str], shown: list[str], folder: Path) -> None:
    """Score a bag of words on the rows of a training command, and write its record.

    The arguments are those of `run`. The baseline is a linear model on words and pairs of words,
    weighted by TF-IDF, as in the reports of runs.
    """
    from scipy.stats import pearsonr, spearmanr

    from adapterhub.pages.row_scores import row_scores
    from adapterhub.recipe.recipe import read as read_recipe
    from adapterhub.training.run_data import read_data
    from adapterhub.training.word_baseline import predict_by_words

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.yaml"
    file.unlink(missing_ok=True)
    words = [word for word in command[2:] if not word.startswith("output=")]
    subprocess.run([sys.executable, "-m", "adapterhub", "recipe", *words, "--save", str(file)],
                   check=True)  # fmt: skip
    start = time.perf_counter()
    data = read_data(read_recipe(file))
    kind = data.task.outcomes
    columns = predict_by_words(kind, data.train, data.evaluation)
    assert columns is not None
    if kind == "numbers":
        both = [float(example.label) for example in data.evaluation], columns["prediction"]
        scores = {"pearson": pearsonr(*both)[0], "spearman": spearmanr(*both)[0]}
    else:
        rows = [
            {"label": example.label, **{key: values[n] for key, values in columns.items()}}
            for n, example in enumerate(data.evaluation)
        ]
        scores = {
            metric: float(score.summarize(score.columns(rows).sum(0)))
            for metric, score in row_scores(kind).items()
        }
    write(name, {"command": [*shown[:2], "(a bag of words on the same rows)", *shown[2:]],
                 "metrics": scores, "seconds": time.perf_counter() - start})  # fmt: skip


def write(name: str, record: dict[str, Any]) -> None:
    """Write a record."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=2, sort_keys=True)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def read(name: str) -> dict[str, Any] | None:
    """Return a record, or None if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def scores(record: dict[str, Any], names: Iterable[str]) -> str:
    """Format some metrics of a record for one table cell."""
    return ", ".join(f"{name} {record['metrics'][name]:.3f}" for name in names)


def parameters(manifest: dict[str, Any]) -> dict[str, int]:
    """Count the trained parameters of the head and of the method."""
    sizes = {"head": 0, "method": 0}
    for name, tensor in manifest["tensors"].items():
        sizes["head" if name.startswith("head.") else "method"] += math.prod(tensor["shape"])
    return sizes


def cost(record: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the last cells of every table: trained, adapter, time, peak memory."""
    if "parameters" not in record:  # a baseline without an adapter
        return ("", "", f"{record['seconds'] / 60:.1f} min", "")
    return (
        f"{sum(record['parameters'].values()):,}",
        f"{record['adapter_bytes'] / 1e6:.2f} MB",
        f"{record['seconds'] / 60:.1f} min",
        f"{record['peak_memory'] / 1e9:.1f} GB",
    )


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])
