"""From a cell to its record."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapterhub.bench import execute
from adapterhub.bench.cells import Cell
from adapterhub.bench.execute import TaskContext, reset_peak_memory, run_cell
from adapterhub.bench.study import Study
from adapterhub.data.options import DataOptions
from adapterhub.loop.loop import peak_memory
from adapterhub.loop.processes import Stopped
from adapterhub.recipe.recipe import Recipe
from adapterhub.training.loading import SharedLoader
from tests.kit.studies import facts, planned


def test_a_cell_that_was_stopped_continues_from_its_checkpoint(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, engine = planned(study, tmp_path)
    context = plan.contexts["train"]
    cell = Cell("train", "head", 90, 8, 1e-3, 1, "final")
    whole = run_cell(cell, context, SharedLoader(), tmp_path / "whole")
    evaluate, calls = type(context.data.run.task).evaluate, []

    def stopping(self: object, *rest: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(context.data.run.task), "evaluate", stopping)
    work = tmp_path / "work"
    with pytest.raises(Stopped, match="train: head, rate") as error:
        run_cell(cell, context, engine.loader, work)
    assert "the same command again" in str(error.value)
    assert "--resume" not in str(error.value)
    assert (work / context.key(cell)).is_dir()
    parts = run_cell(cell, context, engine.loader, work)
    assert facts(parts) == facts(whole)


def test_a_cell_that_was_killed_before_its_first_step_begins_anew(
    study: Study, tmp_path: Path
) -> None:
    """Its folder is there, without the recipe that a run is continued by."""
    plan, _, engine = planned(study, tmp_path)
    context = plan.contexts["train"]
    cell = Cell("train", "head", 90, 4, 1e-3, 1, "search")
    folder = tmp_path / "work" / context.key(cell)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{", encoding="utf-8")
    record = run_cell(cell, context, engine.loader, tmp_path / "work")
    assert (record.status, record.error) == ("done", "")
    assert not folder.exists()


def test_peak_memory_begins_anew() -> None:
    device = torch.device("cpu")
    block = mmap.mmap(-1, 240_000_000)  # returned to the system at once, unlike what malloc keeps
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    high = peak_memory(device)
    block.close()
    reset_peak_memory()
    assert peak_memory(device) < high - 100_000_000


def test_a_new_option_that_changes_nothing_leaves_the_digest(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = planned(study, tmp_path)[0].contexts["train"]
    cell = Cell("train", "head", 90, 8, 1e-3, 1, "final")
    key, to_dict = context.key(cell), execute.to_dict

    def with_more(obj: object) -> dict[str, object]:
        found = to_dict(obj)
        return {**found, "new": None, "train": {**found["train"], "newer": False, "newest": []}}

    monkeypatch.setattr(execute, "to_dict", with_more)
    assert context.key(cell) == key
    changed = replace(context.recipe, train=replace(context.recipe.train, weight_decay=0.5))
    assert replace(context, recipe=changed).key(cell) != key


def test_what_decides_a_cell_is_what_decided_it_in_earlier_versions():
    """New options have neutral values: records that were committed keep their keys."""
    data = DataOptions(train="t", text="x", label="y")
    context = TaskContext(Recipe(backbone="a", output="o", data=data), None, {}, "")
    text = json.dumps(context._deciding(), sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert found == "51aba3c2ac3a0e85", (
        "a new option with another default than null, false or none at all?"
    )
