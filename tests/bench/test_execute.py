"""From a cell to its record, and the rows of a study: parts that are the same for every run."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
from dataclasses import replace

import pytest
import torch

from adapterhub.bench import execute
from adapterhub.bench.cells import Cell
from adapterhub.bench.execute import (
    TEST_SHARE,
    TaskContext,
    read_task_data,
    reset_peak_memory,
    run_cell,
)
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.loop.loop import peak_memory
from adapterhub.loop.processes import Stopped
from adapterhub.recipe.recipe import Recipe, read_draft
from adapterhub.training.loading import SharedLoader
from tests.kit.data import sentences, write_tsv
from tests.kit.studies import facts, planned


def test_a_cell_that_was_stopped_continues_from_its_checkpoint(study, tmp_path, monkeypatch):
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


def test_a_cell_that_was_killed_before_its_first_step_begins_anew(study, tmp_path):
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


def test_peak_memory_begins_anew():
    device = torch.device("cpu")
    block = mmap.mmap(-1, 240_000_000)  # returned to the system at once, unlike what malloc keeps
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    high = peak_memory(device)
    block.close()
    reset_peak_memory()
    assert peak_memory(device) < high - 100_000_000


def test_a_new_option_that_changes_nothing_leaves_the_digest(study, tmp_path, monkeypatch):
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


@pytest.fixture
def recipe(tmp_path):
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(200))]
    source = write_tsv(tmp_path / "train.tsv", rows)
    return read_draft(None, (), {"data": {"train": str(source)}})


def texts(examples: list[object]) -> set[str]:
    return {example.text for example in examples}  # type: ignore[attr-defined]


def test_three_parts_of_one_file_do_not_overlap(recipe):
    data = read_task_data(recipe, None, 1_000)
    parts = [data.run.train, data.run.evaluation, data.test]
    assert sum(map(len, parts)) == len(set().union(*map(texts, parts))) == 200
    assert len(data.test) == pytest.approx(TEST_SHARE * 180, abs=1)
    assert "144 rows train, 20 select, 36 test" in data.notes
    assert len(set(data.digests.values())) == 3
    assert read_task_data(replace(recipe, seed=7), None, 1_000).digests == data.digests
    shares = [sum(each.label == "pos" for each in part) / len(part)
              for part in (data.run.train, data.test)]  # fmt: skip
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


def test_given_test_data_are_used_whole_and_what_is_trained_as_well_is_told(recipe, tmp_path):
    train = (tmp_path / "train.tsv").read_text().splitlines()
    (tmp_path / "test.tsv").write_text("\n".join([train[0], *train[1:31]]) + "\n")
    data = read_task_data(recipe, str(tmp_path / "test.tsv"), 10)
    assert len(data.test) == 30
    assert len(data.run.evaluation) == 10
    assert any("test rows" in note and "also training rows" in note for note in data.notes)


def test_a_run_has_its_own_draw_of_rows(recipe):
    data = read_task_data(recipe, None, 1_000)
    one, same, other = data.of(20, 1), data.of(20, 1), data.of(20, 2)
    assert one.train == same.train != other.train
    assert len(one.train) == 20
    assert one.evaluation == data.run.evaluation
    assert data.of(10_000, 1).train == data.run.train


def test_no_evaluation_and_test_rows_of_a_run_are_refused(recipe):
    without = replace(recipe, data=replace(recipe.data, eval="none"))
    with pytest.raises(ConfigError, match="selects"):
        read_task_data(without, None, 1_000)
    with pytest.raises(ConfigError, match=r"data\.test=0\.1 in a study"):
        read_task_data(replace(recipe, data=replace(recipe.data, test=0.1)), None, 10)
