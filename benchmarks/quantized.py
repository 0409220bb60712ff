"""The quality of quantized backbones: two GLUE tasks, three methods, four precisions.

    python benchmarks/quantized.py DATA [--out runs/quantized] [--only sst2] [--methods lora,mam]
                                   [--precisions fp32,nf4]
    python benchmarks/quantized.py --table

DATA is a folder with GLUE's original files, as in glue.py. Each run uses the command line: SST-2 on
2,000 training rows for one epoch, MRPC on 1,500 for three. Its record is written to
benchmarks/results/, and the table is generated from the records.
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
    """Return the name of a record."""
    return f"quantized-{task}-{method}-{precision}"


def command(task: str, method: str, precision: str, data: str, out: Path) -> list[str]:
    """Return the command line of one run."""
    columns = [part for part in TASKS[task] if not part.startswith("data.rows")]
    return [
        *("adapterhub", "train", "--backbone", BACKBONE, "--method", method, *columns),
        *("--train", f"{data}/{task}/train.tsv", "--eval", f"{data}/{task}/dev.tsv"),
        *("--output", str(out / name(task, method, precision))),
        *(PRECISIONS[precision], *SIZES[task]),
    ]


def run(task: str, method: str, precision: str, data: str, out: Path) -> None:
    """Train one adapter and write its record."""
    cell = (task, method, precision)
    shown = command(*cell, "GLUE", Path("runs"))
    records.run(name(*cell), command(*cell, data, out), shown, out / name(*cell))


def table() -> str:
    """Return the Markdown table of all records."""
    rows = [
        (task, method, precision, records.scores(record, SCORES[task]), *records.cost(record))
        for task, method, precision in itertools.product(SIZES, METHODS, PRECISIONS)
        if (record := records.read(name(task, method, precision)))
    ]
    return records.markdown(COLUMNS, rows)


def main() -> None:
    """Run the selected tasks, methods and precisions, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", type=Path, default=Path("runs/quantized"))
    parser.add_argument("--only", default="sst2,mrpc")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    cells = (options.only.split(","), options.methods.split(","), options.precisions.split(","))
    for cell in itertools.product(*cells) if options.data else ():
        run(*cell, options.data, options.out)
    print(table())


if __name__ == "__main__":
    main()
