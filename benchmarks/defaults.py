"""Measure how many steps, which batch size and which rate suit how many rows.

    python benchmarks/defaults.py GLUE [--only lora] [--rows 400] [--data sst2]
    python benchmarks/defaults.py --table

GLUE is a folder with GLUE's original files. Each run trains on a sample of SST-2 (2 classes, single
sentences), MRPC (pairs) or docstrings (8 classes, built in), and is scored on the whole dev set
after its last step, so that no best epoch is chosen. Each record is one line of
benchmarks/results/defaults.jsonl. The table shows, for each number of rows, the mean over data sets
and seeds by steps, batch size and rate; adapterhub/recipe/recipe.py was chosen from it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from records import RESULTS

from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.training.run import run

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
OUT = RESULTS / "defaults.jsonl"
DATA = {
    "sst2": {"text": "sentence", "label": "label"},
    "mrpc": {"text": "#1 String", "pair": "#2 String", "label": "Quality"},
    "docstrings": {},
}
# rows: (batch sizes, steps, factors on the method's rate, seeds)
GRID = {
    50: ((8, 16), (50, 150, 400), (1.0,), 2),
    400: ((16, 32), (75, 250, 750), (0.5, 1.0, 2.0), 1),
    4000: ((32,), (250, 500, 1000), (0.5, 1.0), 1),
}
METHODS = {"lora": 1e-3, "head": 5e-3, "pfeiffer": 3e-4}


def sources(data: str, glue: Path) -> dict[str, str]:
    """Return the files and columns of a data set as options of a recipe."""
    if data == "docstrings":
        return {"train": "builtin:docstrings"}
    files = {"train": str(glue / data / "train.tsv"), "eval": str(glue / data / "dev.tsv")}
    return files | DATA[data]


def trial(data: str, glue: Path, **options: object) -> dict:
    """Train once and return the record."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "backbone": BACKBONE,
            "method": options["method"],
            "output": f"{folder}/run",
            "seed": options["seed"],
            "data": sources(data, glue) | {"rows": options["rows"]},
            "train": {
                "max_steps": options["steps"],
                "batch_size": options["batch"],
                "learning_rate": options["rate"],
                "head_learning_rate": options.get("head_rate"),
                "eval_every": 1_000_000,
                "tensorboard": False,
            },
        }
        outcome = run(read(flags=flags), Reporter())
    seconds = time.perf_counter() - start
    metrics = {name: round(value, 4) for name, value in outcome.metrics.items()}
    return {"data": data, **options, "metrics": metrics, "seconds": round(seconds, 1)}


def trials(methods: list[str], rows: list[int], data: list[str]) -> list[dict]:
    """List the runs, those of few rows first."""
    listed = []
    for count, method in itertools.product(rows, methods):
        batches, steps, factors, seeds = GRID[count]
        for seed, name, batch, n, factor in itertools.product(
            range(seeds), data, batches, steps, factors
        ):
            if factor == 1 or (batch == batches[0] and n == steps[1]):
                listed.append(
                    {
                        "data": name, "method": method, "rows": count, "batch": batch,
                        "steps": n, "rate": METHODS[method] * factor, "seed": seed,
                    }
                )  # fmt: skip
    return listed


def records() -> list[dict]:
    """Read the records that were written so far."""
    lines = OUT.read_text(encoding="utf-8").splitlines() if OUT.exists() else []
    return [json.loads(line) for line in lines]


def table() -> str:
    """Return the mean accuracy by method, rows, steps, batch size and rate as Markdown."""
    groups = collections.defaultdict(list)
    for r in records():
        groups[r["method"], r["rows"], r["steps"], r["batch"], r["rate"]].append(r)
    lines = [
        "| method | rows | steps | batch | rate | sst2 | mrpc | docstrings | runs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, group in sorted(groups.items()):
        cells = []
        for data in DATA:
            scores = [r["metrics"]["accuracy"] for r in group if r["data"] == data]
            cells.append(f"{statistics.mean(scores):.3f}" if scores else "")
        lines.append("| " + " | ".join([*map(str, key), *cells, str(len(group))]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what has no record yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("glue", nargs="?", type=Path)
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--rows", default=",".join(map(str, GRID)))
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.glue:
        done = [{k: v for k, v in r.items() if k not in ("metrics", "seconds")} for r in records()]
        rows = [int(n) for n in options.rows.split(",")]
        for each in trials(options.only.split(","), rows, options.data.split(",")):
            if each not in done:
                data = each.pop("data")
                record = trial(data, options.glue, **each)
                with open(OUT, "a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(record)}\n")
    print(table())


if __name__ == "__main__":
    main()
