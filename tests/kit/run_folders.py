"""Run folders without a training: metrics, timings, predictions, and an adapter on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapterhub.pages.row_scores import PREDICTIONS, PredictionFile

TEXT = "a good movie"
# One grey pixel.
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81yt"
    "gAAAABJRU5ErkJggg=="
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "classes": [
        {"label": "pos", "prediction": "pos", "score": 0.9},
        {"label": "pos", "prediction": "neg", "score": 0.8},
        {"label": "neg", "prediction": "neg", "score": 0.6},
        {"label": "neg", "prediction": "neg", "score": 1.0},
    ],
    "choices": [
        {"label": "one", "prediction": "one", "score": 0.9, "right": True},
        {"label": "two", "prediction": "one", "score": 0.7, "right": False},
    ],
    "numbers": [{"label": float(i), "prediction": i + 0.5 * (i % 2)} for i in range(5)],
    "spans": [
        {"label": [["per", 0, 1], ["loc", 2, 6]], "prediction": [["loc", 2, 6]]},
        {"label": [["per", 2, 6]], "prediction": [["loc", 2, 6]]},
        {"label": [], "prediction": []},
    ],
    "sets": [
        {"label": ["a", "b"], "prediction": ["a"], "scores": {"a": 0.9, "b": 0.4}},
        {"label": ["b"], "prediction": ["b"], "scores": {"a": 0.1, "b": 0.8}},
        {"label": [], "prediction": [], "scores": {"a": 0.2, "b": 0.3}},
    ],
    "texts": [
        {"label": "good", "prediction": "good", "score": 1.0},
        {"label": "good", "prediction": "", "score": 0.0},
    ],
    "pictures": [{"loss": 0.5 + i, "picture": PNG if i else ""} for i in range(3)],
    "losses": [{"loss": 0.5 + i, "tokens": i} for i in range(3)],
}


def predictions(
    kind: str, rows: list[dict[str, Any]] | None = None, data: str = "d"
) -> PredictionFile:
    """Make a predictions file of a kind."""
    full = [{"id": i, "texts": [TEXT], **row} for i, row in enumerate(rows or ROWS[kind])]
    metric = "accuracy" if kind in ("classes", "choices") else "loss"
    labels = ("neg", "pos") if kind == "classes" else ()
    return PredictionFile(kind, "classification", 4, data, metric, labels, full)


def run_folder(folder: Path, file: PredictionFile | None = None, **lines: str) -> Path:
    """Write the files of a run of four steps; `lines` replaces the metrics' and rates' names."""
    folder.mkdir(parents=True, exist_ok=True)
    metric, rate = lines.get("metric", "accuracy"), lines.get("rate", "lora")
    metrics: list[dict[str, Any]] = []
    timings = []
    for step in (2, 4):
        rates = {rate: 1e-3 / step, "head": 5e-3}
        base = {"step": step, "epoch": step / 2}
        scores = {metric: 0.1 * step, "loss": 1 / step}
        metrics.append({"event": "train", **base, "loss": 1 / step, "learning_rate": rates})
        metrics.append({"event": "eval", **base, "metrics": scores, "best": True})
        clock = {"seconds": 1.5 * step, "examples_per_second": 10.0, "peak_memory": 10**9}
        timings += [{"event": event, "step": step, **clock} for event in ("train", "eval")]
    for name, records in (("metrics", metrics), ("timings", timings)):
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    if file:
        (folder / PREDICTIONS).write_bytes(file.to_bytes())
    return folder
