"""The first table of docs/results.md: three GLUE tasks, five methods, default options.

    python benchmarks/glue.py DATA [--out runs/glue] [--only sst2,mrpc] [--methods lora,full]
    python benchmarks/glue.py --table

DATA is a folder with GLUE's original files: sst2/train.tsv, sst2/dev.tsv, and so on. Each run uses
the command line. Its record is written to benchmarks/results/: command, scores, time, sizes,
versions, device. The table is generated from the records.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import records

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
WORDS = "bag of words"
METHODS = (WORDS, "head", "lora", "pfeiffer", "mam", "full")
PAIR = ["--text", "sentence1", "--pair", "sentence2"]
TASKS = {
    "sst2": [
        *("--text", "sentence", "--label", "label", "--labels", "0=negative,1=positive"),
        "data.rows=8000",
    ],
    "mrpc": [
        *("--text", "#1 String", "--pair", "#2 String", "--label", "Quality"),
        *("--labels", "0=not_equivalent,1=equivalent"),
    ],
    "stsb": ["--task", "regression", *PAIR, "--label", "score"],
}
COLUMNS = ("task", "method", "score on dev", "trained", "adapter", "time", "peak memory")
SCORES = {"sst2": ("accuracy",), "mrpc": ("accuracy", "macro_f1"), "stsb": ("pearson", "spearman")}


def command(task: str, method: str, data: str, out: str) -> list[str]:
    """Return the command line of one run."""
    files = ["--train", f"{data}/{task}/train.tsv", "--eval", f"{data}/{task}/dev.tsv"]
    model = ["--backbone", BACKBONE, "--method", method]
    output = ["--output", f"{out}/{task}-{method}"]
    return ["adapterhub", "train", *model, *files, *TASKS[task], *output]


def run(task: str, method: str, data: str, out: str) -> None:
    """Train one adapter and write its record."""
    name = name_of(task, method)
    start, method = (records.run_words, "head") if method == WORDS else (records.run, method)
    shown = command(task, method, "GLUE", "runs")
    start(name, command(task, method, data, out), shown, Path(out) / name)


def name_of(task: str, method: str) -> str:
    """Return the name of a record."""
    return f"{task}-{method.replace(' ', '-')}"


def table() -> str:
    """Return the Markdown table of all records."""
    rows = [
        row(task, method, record)
        for task in TASKS
        for method in METHODS
        if (record := records.read(name_of(task, method)))
    ]
    return records.markdown(COLUMNS, rows)


def row(task: str, method: str, record: dict) -> tuple[str, ...]:
    """Return one row of the table."""
    return (task, method, records.scores(record, SCORES[task]), *records.cost(record))


def main() -> None:
    """Run the selected tasks and methods, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", default="runs/glue")
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.data:
        for task in options.only.split(","):
            for method in options.methods.split(","):
                run(task, method, options.data, options.out)
    print(table())


if __name__ == "__main__":
    main()
