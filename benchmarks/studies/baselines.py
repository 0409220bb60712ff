"""Fit the baselines of a committed study to its rows, and rewrite its report.

    cd FOLDER_WITH_THE_DATA
    PYTHONPATH=CHECKOUT python REPOSITORY/benchmarks/studies/baselines.py rows STUDY ROWS.json
    python REPOSITORY/benchmarks/studies/baselines.py fit STUDY ROWS.json

STUDY is a folder such as REPOSITORY/benchmarks/studies/glue. A study whose records are older than
the bag of words gets that row in its tables; nothing is trained on the backbone. `rows` reads the
rows of the first seed and compares their digests with those of the records. How rows are held out
has changed since: CHECKOUT is a checkout of 099f6d6e, the last commit that divides them as the
records have them. `fit` runs with this checkout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def read_rows(folder: Path) -> dict[str, Any]:
    """Return the kind, the training rows by their number, and the test rows of each task.

    This runs with the modules of an older checkout as well, so it imports them here.
    """
    from adapterhub.bench.records import RecordFolder
    from adapterhub.bench.study import RECORDS, STUDY, read_study

    try:
        from adapterhub.bench.execute import read_task_data
    except ImportError:  # its place in 099f6d6e
        read_task_data = importlib.import_module("adapterhub.bench.task_data").read_task_data

    study = read_study(folder / STUDY)
    records = list(RecordFolder(folder / RECORDS).all())
    tasks = {}
    for name, recipe in study.tasks().items():
        own = [record for record in records if record.cell.task == name]
        test = study.tests().get(name, study.bench.test)
        data = read_task_data(recipe, test, study.bench.select_rows)
        for part in ("train", "test"):
            if {record.origin["data"][part] for record in own} != {data.digests[part]}:
                sys.exit(f"{name}: the {part} rows differ from those of the records")
        numbers = sorted({record.cell.rows for record in own})
        tasks[name] = {
            "kind": data.run.task.outcomes,
            "all": _fields(data.run.train),
            "train": {rows: _fields(data.of(rows, 1).train) for rows in numbers},
            "test": _fields(data.test),
        }
    return tasks


def _fields(examples: list[Any]) -> list[list[Any]]:
    return [[each.text, each.pair, each.label] for each in examples]


def fit_baselines(folder: Path, tasks: dict[str, Any]) -> None:
    """Write `constants.json` and `bag_of_words.json` of a study."""
    from adapterhub.bench.baselines import bag_of_words, constant_of, write_baselines
    from adapterhub.data.examples import Example

    def examples(rows: list[list[Any]]) -> list[Example]:
        return [Example(*row) for row in rows]

    constants, words = {}, {}
    for name, task in tasks.items():
        constants[name] = constant_of(task["kind"], examples(task["all"]))
        train = {int(number): examples(rows) for number, rows in task["train"].items()}
        words[name] = bag_of_words(task["kind"], train, examples(task["test"]))
    write_baselines(folder, constants, words)  # type: ignore[arg-type]  # texts have both


def main() -> None:
    """Read the rows of a study, or fit its baselines and rewrite its report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("step", choices=("rows", "fit"))
    parser.add_argument("study", type=Path)
    parser.add_argument("rows", type=Path)
    options = parser.parse_args()
    folder = options.study.resolve()
    if options.step == "rows":
        options.rows.write_text(json.dumps(read_rows(folder)), encoding="utf-8")
        return
    from adapterhub.cli._study import report_study

    fit_baselines(folder, json.loads(options.rows.read_text(encoding="utf-8")))
    os.chdir(_ROOT)  # the commands of a report name the folder from here
    print(report_study(folder.relative_to(_ROOT)))


if __name__ == "__main__":
    main()
