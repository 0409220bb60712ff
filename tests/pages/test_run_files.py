"""The files of a run folder, complete, cut or broken."""

from __future__ import annotations

import pytest

from adapterhub.errors import FileError
from adapterhub.pages.page import lower_is_better, read_run, submapping
from tests.kit.runs import predictions, run_folder


def test_a_run_without_an_adapter_is_read(tmp_path):
    run = read_run(run_folder(tmp_path / "mine", predictions("classes")))
    assert (run.name, run.manifest, run.trained, run.size) == ("mine", None, 0, 0)
    assert run.metrics == pytest.approx({"accuracy": 0.4, "loss": 0.25})
    assert run.best == run.evaluations[-1]
    assert run.main_metric == "accuracy"
    assert run.predictions == predictions("classes")


def test_the_main_metric_is_that_of_the_recipe(tmp_path):
    folder = run_folder(tmp_path)
    (folder / "recipe.yaml").write_text("task: regression\n")
    assert read_run(folder).main_metric == "pearson"
    (folder / "recipe.yaml").write_text("task: regression\ntrain: {best_metric: mse}\n")
    assert read_run(folder).main_metric == "mse"
    (folder / "recipe.yaml").write_text("{}\n")
    assert read_run(run_folder(tmp_path, predictions("losses"))).main_metric == "loss"
    (folder / "predictions.jsonl").unlink()
    (folder / "recipe.yaml").write_text("task: of the future\n")
    assert read_run(folder).main_metric == "accuracy"


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileError, match="no run in"):
        read_run(tmp_path)


def test_a_last_line_that_was_cut_is_left_out(tmp_path):
    folder = run_folder(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    assert len(read_run(folder).training) == 2


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"event": "train"}', '{"event": "x", "step": 1}',
     '{"event": "train", "step": "1"}', '{"event": "eval", "step": 1, "metrics": {"a": "b"}}',
     '{"event": "eval", "step": 1, "metrics": [1]}'],
)  # fmt: skip
def test_a_broken_line_is_named(line, tmp_path):
    path = run_folder(tmp_path) / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(FileError, match=r"metrics\.jsonl, line 1 is broken"):
        read_run(tmp_path)


def test_small_helpers():
    assert lower_is_better("loss")
    assert lower_is_better("eval_mse")
    assert not lower_is_better("accuracy")
    assert submapping({"a": {"b": 1}, "c": 2}, "a") == {"b": 1}
    assert submapping({"a": {"b": 1}, "c": 2}, "c") == {}
