"""One adapter with three heads beside three adapters: scores, bytes, time.

    python benchmarks/studies/several_heads.py train GLUE --output FOLDER [--seeds 3] [--steps 150]
    python benchmarks/studies/several_heads.py table benchmarks/studies/several-heads

GLUE has GLUE's files. For each seed, `adapterhub train` trains LoRA on MRPC, RTE and STS-B by
itself, and once on all three, with as many steps in sum; each task's minibatches are drawn equally
often. Learning rates are the defaults. A seed is a line of FOLDER/records.jsonl, with what each run
predicts on the development sets; a seed that is there is not run again. The differences are tested
on the same rows and corrected for the three tasks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from run_records import RunRecords, study_parser

from adapterhub.bench.advice import p_text
from adapterhub.bench.paired import PairedComparison, compare_with, holm
from adapterhub.bench.statistics import RepeatedRuns, estimate_all, repeated_runs
from adapterhub.inference.open import open_adapter
from adapterhub.pages.row_scores import PredictionFile, row_score
from adapterhub.recipe.recipe import read_draft
from adapterhub.training.run_data import read_data

BACKBONE = "sentence-transformers/all-MiniLM-L6-v2"
PAIR = {"text": "sentence1", "pair": "sentence2"}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "mrpc": {"data": {"text": "#1 String", "pair": "#2 String", "label": "Quality"}},
    "rte": {"data": {**PAIR, "label": "label"}},
    "stsb": {"task": "regression", "data": {**PAIR, "label": "score"}},
}
KINDS = {"mrpc": "classes", "rte": "classes", "stsb": "numbers"}
SHARED = {"backbone": BACKBONE, "method": "lora", "dtype": "bf16", "attention": "eager"}
JOINT, ALONE = "one adapter", "three adapters"


def recipe_of(glue: Path, tasks: Sequence[str], seed: int, steps: int) -> dict[str, Any]:
    """Return the recipe of a run on one task, or on several with a head each.

    Args:
        glue: the folder with the data.
        tasks: their names.
        seed: of initial values and of the order of rows.
        steps: for each task.
    """
    entries = {name: _entry(name, glue / name / "train.tsv", "none") for name in tasks}
    train = {"max_steps": steps * len(tasks), "batch_size": 16, "max_length": 128}
    recipe = {**SHARED, "seed": seed, "train": {**train, "tensorboard": False, "report": False}}
    if len(entries) == 1:
        return recipe | entries[tasks[0]]
    return recipe | {"tasks": entries, "mixing": "equal"}


def _entry(name: str, train: Path, evaluation: str) -> dict[str, Any]:
    files = {"train": str(train), "eval": evaluation}
    return {**TASKS[name], "data": {**TASKS[name]["data"], **files}}


def train(recipe: Mapping[str, Any], folder: Path) -> float:
    """Train by the command, and return the seconds that it took.

    Args:
        recipe: what to train.
        folder: the run's output.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a seed that was interrupted
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**recipe, "output": str(folder)}, sort_keys=False))
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "adapterhub", "train", str(file)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def outcomes(folder: Path, glue: Path, name: str, head: str | None) -> list[dict[str, Any]]:
    """Return the label and the prediction of each row of a development set.

    Args:
        folder: the run.
        glue: the folder with the data.
        name: the task.
        head: the head of an adapter with several.
    """
    file = glue / name / "dev.tsv"
    examples = read_data(read_draft(None, (), _entry(name, file, str(file)))).evaluation
    opened = open_adapter(folder, head=head)
    predicted = opened.predict(examples)
    pairs = zip(examples, predicted, strict=True)
    kept = ("label", "prediction")
    return [{k: v for k, v in opened.task.outcome(*each).items() if k in kept} for each in pairs]


def file_bytes(folder: Path) -> int:
    """Return the size of a run's adapter."""
    return sum(file.stat().st_size for file in (folder / "adapter").iterdir())


def run_seed(glue: Path, work: Path, seed: int, steps: int) -> dict[str, Any]:
    """Run all of one seed, and return its record.

    Args:
        glue: the folder with the data.
        work: where the runs go.
        seed: the seed.
        steps: for each task.
    """
    record: dict[str, Any] = {"seed": seed, "steps": steps}
    for kind, groups in ((JOINT, [list(TASKS)]), (ALONE, [[name] for name in TASKS])):
        seconds, size, rows = 0.0, 0, {}
        for group in groups:
            folder = work / f"{seed}-{'-'.join(group)}"
            seconds += train(recipe_of(glue, group, seed, steps), folder)
            size += file_bytes(folder)
            for name in group:
                head = name if len(group) > 1 else None
                rows[name] = outcomes(folder, glue, name, head)
        record[kind] = {"seconds": round(seconds, 1), "bytes": size, "rows": rows}
    return record


def runs_of(records: Sequence[Mapping[str, Any]], kind: str, name: str) -> RepeatedRuns:
    """Collect what the seeds predict on a task.

    Args:
        records: a record for each seed.
        kind: one adapter or three.
        name: the task.
    """
    files = [
        PredictionFile(KINDS[name], name, 0, name, "", (), each[kind]["rows"][name])
        for each in records
    ]
    return repeated_runs(kind, files, row_score(KINDS[name]))


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the scores, the differences and the costs as a Markdown table."""
    lines = [
        f"| task | score | {JOINT}, three heads | {ALONE} | difference (95 %) | p, corrected |",
        "|---|---|---|---|---|---|",
    ]
    pairs = {name: _pair(records, name) for name in TASKS}
    corrected = holm([pair.p if pair.p is not None else 1.0 for pair in pairs.values()])
    for (name, pair), p in zip(pairs.items(), corrected, strict=True):
        means = [_mean(runs_of(records, kind, name)) for kind in (JOINT, ALONE)]
        tested = p_text(p) if pair.p is not None else "one seed"
        cells = [name, pair.score, *means, _gap(pair), tested]
        lines.append(f"| {' | '.join(cells)} |")
    for cost, unit, factor in (("bytes", "kB", 1e-3), ("seconds", "s", 1.0)):
        means = [
            f"{factor * sum(each[kind][cost] for each in records) / len(records):,.0f} {unit}"
            for kind in (JOINT, ALONE)
        ]
        lines.append(f"| all | {cost} | {means[0]} | {means[1]} | | |")
    return "\n".join(lines)


def _pair(records: Sequence[Mapping[str, Any]], name: str) -> PairedComparison:
    joint, alone = (runs_of(records, kind, name) for kind in (JOINT, ALONE))
    (pair,) = compare_with(alone, [joint])
    return pair


def _mean(runs: RepeatedRuns) -> str:
    (found,) = estimate_all([runs])
    spread = f" ± {found.points * float(runs.scores.std(ddof=1)):.1f}" if runs.seeds > 1 else ""
    return f"{found.points * float(runs.scores.mean()):.1f}{spread}"


def _gap(pair: PairedComparison) -> str:
    if pair.value is None or pair.low is None or pair.high is None:
        return ""
    value, low, high = (pair.points * x for x in (pair.value, pair.low, pair.high))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def main() -> None:
    """Train the seeds that are missing, or print the table."""
    parser, _ = study_parser(__doc__)
    options = parser.parse_args()
    records = RunRecords(options.folder)
    known = records.read()
    if options.command == "table":
        print(table(known))
    elif options.command == "pack":
        print(records.pack())
    else:
        for seed in sorted(set(range(1, options.seeds + 1)) - {each["seed"] for each in known}):
            runs = options.folder / "runs"
            records.add(run_seed(options.glue.resolve(), runs, seed, options.steps))


if __name__ == "__main__":
    main()
