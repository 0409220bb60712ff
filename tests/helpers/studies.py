"""Studies for tests: planned in a folder, and what of their records is equal anywhere."""

from __future__ import annotations

from pathlib import Path

from adapterhub.bench.conduct import RECORDS, LocalEngine, PlannedStudy, plan_study
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.study import Study
from adapterhub.training.loading import SharedLoader


def planned(study: Study, tmp_path: Path) -> tuple[PlannedStudy, RecordFolder, LocalEngine]:
    loader = SharedLoader()
    work = tmp_path / "study" / "work"
    plan = plan_study(study, loader, work)
    folder = RecordFolder(tmp_path / "study" / RECORDS)
    return plan, folder, LocalEngine(plan.contexts, loader, work)


def facts(record: CellRecord) -> object:
    """Return what does not depend on time and place."""
    curve = [(point.step, point.score, point.loss) for point in record.curve]
    known = (record.selected, record.tested, record.trained, record.rows, curve)
    return record.key, record.cell, record.status, *known
