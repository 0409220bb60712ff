"""The memory that a training takes by each option, as `adapterhub train --dry-run` estimates it.

    python benchmarks/memory.py --measure
    python benchmarks/memory.py --table

Every line differs from the first in one option. Rows have 128 tokens. Python, torch and the data,
which a run on a CPU has in its process, are left out: they are the same for all.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

import records

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
BASE = ("method=lora", "train.batch_size=32", "train.eval_batch_size=32")
OPTIONS = {
    "lora, 32 rows": (),
    "8 rows": ("train.batch_size=8", "train.eval_batch_size=8"),
    "64 tokens": ("train.max_length=64",),
    "gradient checkpointing": ("train.gradient_checkpointing=true",),
    "bf16 backbone": ("dtype=bf16",),
    "nf4 backbone": ("quantize=nf4",),
    "8-bit optimizer": ("train.optimizer=adamw-8bit",),
    "method full": ("method=full",),
    "full, 8-bit optimizer": ("method=full", "train.optimizer=adamw-8bit"),
}
PARTS = {
    "backbone": ("backbone weights",),
    "trained": ("adapter weights", "gradients", "optimizer"),
    "activations": ("activations",),
    "temporary": ("temporary",),
}


def measure(folder: Path) -> None:
    """Estimate each line and write the record."""
    from adapterhub.recipe.recipe import read
    from adapterhub.training.plan import plan_of
    from adapterhub.training.run import prepare

    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
        rows = [(" ".join(["word"] * 200), str(label)) for label in (0, 1)] * 32
        csv.writer(file).writerows([("text", "label"), *rows])
    data = {"data": {"train": str(folder / "rows.csv"), "eval": str(folder / "rows.csv")}}
    required = {"backbone": BACKBONE, "output": str(folder / "out")}
    record: dict[str, Any] = {"backbone": BACKBONE, "bytes": {}}
    for name, options in OPTIONS.items():
        recipe = read(None, ["train.max_length=128", *BASE, *options], data | required)
        memory = plan_of(prepare(recipe)).memory
        record["bytes"][name] = {part: n for part, n in memory.items() if part != "process"}
        print(name, record["bytes"][name], flush=True)
    records.write("memory", record)


def table() -> str:
    """Return the Markdown table of the record, in MB."""
    record = (records.read("memory") or {"bytes": {}})["bytes"]
    rows = []
    for name in OPTIONS:
        found = record[name]
        parts = [sum(found[part] for part in names) for names in PARTS.values()]
        rows.append((name, *(f"{part / 1e6:,.1f}" for part in (sum(parts), *parts))))
    return records.markdown(("option", "sum, MB", *PARTS), rows)


def main() -> None:
    """Measure on request, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().measure:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder))
    print(table())


if __name__ == "__main__":
    main()
