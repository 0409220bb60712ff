"""Compare what a head reads of a sentence encoder: its untrained pooler, or the mean of the tokens.

    python benchmarks/pooling.py GLUE
    python benchmarks/pooling.py --table

GLUE is a folder with GLUE's original files. Each method trains on 300 rows with the default recipe,
once with the pooler of the model's class and once with the mean; logistic regression on the mean of
the frozen token states is the baseline. Scores are accuracies on the whole dev set, of the last
step. The records are in benchmarks/results/pooling.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import records
import torch
from defaults import BACKBONE, sources
from sklearn.linear_model import LogisticRegression

import adapterhub as ah
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.training.run import run
from adapterhub.training.run_data import read_data

SETS = ("docstrings", "sst2", "mrpc")
METHODS = ("head", "lora", "pfeiffer", "mam")
POOLINGS = ("model", "mean")
ROWS, SEEDS = 300, (0, 1)


def trial(data: str, glue: Path, method: str, pooling: str, seed: int) -> float:
    """Train once and return the accuracy after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "backbone": BACKBONE,
            "method": method,
            "task": {"classification": {"pooling": pooling}},
            "output": f"{folder}/run",
            "seed": seed,
            "data": sources(data, glue) | {"rows": ROWS},
            "train": {"eval_every": 1_000_000, "tensorboard": False},
        }
        return run(read(flags=flags), Reporter()).metrics["accuracy"]


def baseline(data: str, glue: Path, seed: int) -> float:
    """Return the accuracy of logistic regression on the mean of the frozen token states."""
    given = {"train": sources(data, glue) | {"rows": ROWS}}["train"]
    read_options = {"backbone": BACKBONE, "output": "none", "seed": seed, "data": given}
    examples = read_data(read(flags=read_options))
    model, tokenizer = ah.load_backbone(BACKBONE)
    states = {}
    for name, rows in (("train", examples.train), ("eval", examples.evaluation)):
        vectors = []
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            pairs = [e.pair for e in part] if part[0].pair is not None else None
            batch = tokenizer(
                [e.text for e in part], pairs, truncation=True, max_length=128, padding=True,
                return_tensors="pt",
            )  # fmt: skip
            with torch.inference_mode():
                tokens = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            vectors.append((tokens * mask).sum(1) / mask.sum(1))
        states[name] = torch.cat(vectors).numpy()
    classifier = LogisticRegression(max_iter=2_000)
    classifier.fit(states["train"], [e.label for e in examples.train])
    return float(classifier.score(states["eval"], [e.label for e in examples.evaluation]))


def table() -> str:
    """Return the Markdown table of the records."""
    record = records.read("pooling") or {}
    rows = []
    for name in ("logistic regression", *METHODS):
        cells = [
            f"{statistics.mean(scores):.3f}"
            if (scores := record.get(f"{data} {name} {how}"))
            else ""
            for data in SETS
            for how in POOLINGS
        ]
        rows.append((name, *cells))
    return records.markdown(("method", *(f"{d}, {p}" for d in SETS for p in POOLINGS)), rows)


def main() -> None:
    """Run what has no record yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("glue", nargs="?", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.glue:
        record = records.read("pooling") or {}
        for data in SETS:
            todo = [(m, p) for m in METHODS for p in POOLINGS]
            for method, pooling in [("logistic regression", "mean"), *todo]:
                key = f"{data} {method} {pooling}"
                if key not in record:
                    record[key] = [
                        baseline(data, options.glue, seed)
                        if method not in METHODS
                        else trial(data, options.glue, method, pooling, seed)
                        for seed in SEEDS
                    ]
                    records.write("pooling", record)
    print(table())


if __name__ == "__main__":
    main()
