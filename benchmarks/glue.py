"""The results table of README: three GLUE tasks, five methods, defaults, by the command line.

    python benchmarks/glue.py DATA [--out runs/glue] [--only sst2,mrpc] [--methods lora,full]
    python benchmarks/glue.py --table

DATA is a folder with GLUE's own files: sst2/train.tsv, sst2/dev.tsv, and so on. Each run is the
command that a user would type. Its record goes to benchmarks/results/: command, scores, time,
sizes, versions, device. The table is made from the records, never typed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import records

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
METHODS = ("head", "lora", "pfeiffer", "mam", "full")
PAIR = ["--text", "sentence1", "--pair", "sentence2"]
TASKS = {
    "sst2": ["--text", "sentence", "--label", "label", "data.rows=8000"],
    "mrpc": ["--text", "#1 String", "--pair", "#2 String", "--label", "Quality"],
    "stsb": ["--task", "regression", *PAIR, "--label", "score"],
}
COLUMNS = ("task", "method", "score on dev", "trained", "adapter", "time", "peak memory")
SCORES = {"sst2": ("accuracy",), "mrpc": ("accuracy", "macro_f1"), "stsb": ("pearson", "spearman")}


def command(task: str, method: str, data: str, out: str) -> list[str]:
    """What the user types."""
    files = ["--train", f"{data}/{task}/train.tsv", "--eval", f"{data}/{task}/dev.tsv"]
    where = ["--output", f"{out}/{task}-{method}"]
    what = ["--backbone", BACKBONE, "--method", method]
    return ["adapterhub", "train", *what, *files, *TASKS[task], *where]


def run(task: str, method: str, data: str, out: str) -> None:
    """One run and its record."""
    name = f"{task}-{method}"
    shown = command(task, method, "GLUE", "runs")
    records.run(name, command(task, method, data, out), shown, Path(out) / name)


def table() -> str:
    """The Markdown table of all records."""
    names = [(task, method) for task in TASKS for method in METHODS]
    found = [(*name, records.read("-".join(name))) for name in names]
    return records.markdown(COLUMNS, [row(t, m, record) for t, m, record in found if record])


def row(task: str, method: str, record: dict) -> tuple[str, ...]:
    """One line of the table."""
    return (task, method, records.scores(record, SCORES[task]), *records.cost(record))


def main() -> None:
    """Run what is asked for, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", default="runs/glue")
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    if words.data:
        for task in words.only.split(","):
            for method in words.methods.split(","):
                run(task, method, words.data, words.out)
    print(table())


if __name__ == "__main__":
    main()
