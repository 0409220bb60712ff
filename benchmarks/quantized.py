"""What a quantized backbone costs in quality: two GLUE tasks, three methods, four precisions.

    python benchmarks/quantized.py DATA [--out runs/quantized] [--only sst2] [--methods lora,mam]
                                   [--precisions fp32,nf4]
    python benchmarks/quantized.py --table

DATA is a folder with GLUE's own files, as in glue.py. Each run is the command that a user would
type: SST-2 on 2,000 training rows for one epoch, MRPC on 1,500 for three. Its record goes to
benchmarks/results/, and the table is made from the records.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import records
from glue import BACKBONE, SCORES, TASKS

SIZES = {"sst2": ("data.rows=2000", "train.epochs=1"), "mrpc": ("data.rows=1500", "train.epochs=3")}
METHODS = ("lora", "pfeiffer", "mam")
PRECISIONS = {
    "fp32": "dtype=fp32",
    "bf16": "dtype=bf16",
    "int8": "quantize=int8",
    "nf4": "quantize=nf4",
}
COLUMNS = ("task", "method", "backbone", "score on dev", "trained", "adapter", "time", "memory")


def name(task: str, method: str, precision: str) -> str:
    """What a record is called."""
    return f"quantized-{task}-{method}-{precision}"


def command(task: str, method: str, precision: str, data: str, out: Path) -> list[str]:
    """What the user types."""
    columns = [word for word in TASKS[task] if not word.startswith("data.rows")]
    return [
        *("adapterhub", "train", "--backbone", BACKBONE, "--method", method, *columns),
        *("--train", f"{data}/{task}/train.tsv", "--eval", f"{data}/{task}/dev.tsv"),
        *("--output", str(out / name(task, method, precision))),
        *(PRECISIONS[precision], *SIZES[task]),
    ]


def run(task: str, method: str, precision: str, data: str, out: Path) -> None:
    """One run and its record."""
    cell = (task, method, precision)
    shown = command(*cell, "GLUE", Path("runs"))
    records.run(name(*cell), command(*cell, data, out), shown, out / name(*cell))


def table() -> str:
    """The Markdown table of all records."""
    rows = [
        (task, method, precision, records.scores(record, SCORES[task]), *records.cost(record))
        for task, method, precision in itertools.product(SIZES, METHODS, PRECISIONS)
        if (record := records.read(name(task, method, precision)))
    ]
    return records.markdown(COLUMNS, rows)


def main() -> None:
    """Run what is asked for, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", type=Path, default=Path("runs/quantized"))
    parser.add_argument("--only", default="sst2,mrpc")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    cells = (words.only.split(","), words.methods.split(","), words.precisions.split(","))
    for cell in itertools.product(*cells) if words.data else ():
        run(*cell, words.data, words.out)
    print(table())


if __name__ == "__main__":
    main()
