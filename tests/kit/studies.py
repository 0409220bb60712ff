"""Studies for tests: planned in a folder, and what of their records is equal anywhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from adapterhub.bench.cells import Cell
from adapterhub.bench.conduct import LocalEngine
from adapterhub.bench.plan import PlannedStudy, plan_study
from adapterhub.bench.records import (
    CellRecord,
    Costs,
    PredictedRows,
    RecordFolder,
)
from adapterhub.bench.study import RECORDS, Study
from adapterhub.training.loading import SharedLoader


def planned(study: Study, tmp_path: Path) -> tuple[PlannedStudy, RecordFolder, LocalEngine]:
    loader = SharedLoader()
    work = tmp_path / "study" / "work"
    plan = plan_study(study, loader, work)
    folder = RecordFolder(tmp_path / "study" / RECORDS)
    return plan, folder, LocalEngine(plan.contexts, loader, work)


def facts(record: CellRecord) -> object:
    """Return what does not depend on time and place."""
    known = (record.selected, record.tested, record.trained, record.rows)
    return record.key, record.cell, record.status, *known


def made_records(
    study: Study, accuracy: dict[str, float], test_rows: int = 200, rows: int = 100
) -> list[CellRecord]:
    """Make the records of a study without training: two classes, four trials, some seeds.

    Args:
        study: the study.
        accuracy: the accuracy of each method, about; NaN for one whose runs diverge.
        test_rows: the number of test rows.
        rows: the number of training rows.
    """
    found = []
    for task in study.tasks():
        for number, (method, value) in enumerate(accuracy.items()):
            group = (task, method, rows)
            trials = [Cell(*group, 20, rate, 0, "search") for rate in (1e-4, 1e-3, 1e-2)]
            trials += [Cell(*group, 80, rate, 0, "search") for rate in (1e-3, 1e-2)]
            finals = [Cell(*group, 80, 1e-3, seed, "final") for seed in (1, 2, 3)]
            dead = value != value  # NaN
            cells = trials if dead else [*trials, *finals]
            found += [made_record(cell, number, value, test_rows) for cell in cells]
    return found


def made_record(cell: Cell, number: int, accuracy: float, test_rows: int) -> CellRecord:
    """Make one record.

    Args:
        cell: its cell.
        number: of the method, which decides its costs.
        accuracy: its accuracy, about; NaN if it diverged.
        test_rows: the number of test rows.
    """
    key = hashlib.sha256(repr(cell).encode()).hexdigest()[:32]
    origin = {"data": {"train": "a" * 64, "test": "b" * 64}, "backbone": "c" * 64,
              "device": "cpu", "versions": {"torch": "2"}, "recipe": {"dtype": "fp32"}}  # fmt: skip
    if accuracy != accuracy:  # NaN
        return CellRecord(key, cell, "diverged", error="the loss is nan", metric="accuracy",
                          origin=origin)  # fmt: skip
    random = np.random.default_rng([cell.seed, number, int(1e6 * cell.rate)])
    label = ["pos" if row % 3 else "neg" for row in range(test_rows)]
    right = random.random(test_rows) < accuracy
    other = {"pos": "neg", "neg": "pos"}
    given = [one if r else other[one] for one, r in zip(label, right, strict=True)]
    columns = {"label": label, "prediction": given, "score": [0.9] * test_rows}
    is_final = cell.stage == "final"
    scores = {"accuracy": float(right.mean())}
    costs = Costs(
        trained=1000 * 10**number,
        head=10,
        backbone=10**7,
        file_bytes=5000,
        seconds=9.0,
        train_seconds=4.0 + number,
        peak_memory=10**9 + 10**8 * number,
    )
    return CellRecord(
        key,
        cell,
        "done",
        metric="accuracy",
        selected=scores,
        trained={"accuracy": 0.95} if is_final else {},
        tested=scores if is_final else {},
        rows=PredictedRows("classes", columns) if is_final else None,
        costs=costs,
        origin=origin,
    )
