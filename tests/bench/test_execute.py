"""From a cell to its record."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from studies import facts, planned

from adapterhub.bench.cells import Cell
from adapterhub.bench.execute import reset_peak_memory, run_cell
from adapterhub.bench.study import Study
from adapterhub.training.clock import peak_memory
from adapterhub.training.loading import SharedLoader
from adapterhub.training.stop_signals import Stopped


def test_a_cell_that_was_stopped_continues_from_its_checkpoint(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, engine = planned(study, tmp_path)
    context = plan.contexts["train"]
    cell = Cell("train", "head", 90, 8, 1e-3, 1, "final")
    whole = run_cell(cell, context, SharedLoader(), tmp_path / "whole", measure=False)
    evaluate, calls = type(context.data.run.task).evaluate, []

    def stopping(self: object, *rest: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(context.data.run.task), "evaluate", stopping)
    work = tmp_path / "work"
    with pytest.raises(Stopped):
        run_cell(cell, context, engine.loader, work, measure=False)
    assert (work / context.key(cell)).is_dir()
    parts = run_cell(cell, context, engine.loader, work, measure=False)
    assert facts(parts) == facts(whole)


def test_peak_memory_begins_anew() -> None:
    device = torch.device("cpu")
    block = torch.ones(60_000_000)
    high = peak_memory(device)
    del block
    reset_peak_memory()
    assert peak_memory(device) < high - 100_000_000
