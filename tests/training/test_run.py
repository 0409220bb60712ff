"""A run from its recipe to its files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from adapterhub.errors import AdapterhubError, ConfigError, OutputError
from adapterhub.loop.report import Reporter
from adapterhub.pages.page import recorded_words
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training import run as running
from adapterhub.training.run import run
from tests.kit.runs import Notes, lines, quiet


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    return recipe_with(
        "method=lora(rank=2)", "train.max_steps=3", "train.tensorboard=false", "train.report=false"
    )


def test_the_output_folder_has_every_file_of_a_run(recipe, tmp_path):
    output = tmp_path / "run"
    outcome = run(recipe, quiet(recipe))
    assert {path.name for path in output.iterdir()} == {
        ".lock", "adapter", "checkpoints", "metrics.jsonl", "recipe.schema.json",
        "recipe.yaml", "timings.jsonl",
    }  # fmt: skip
    assert read(output / "recipe.yaml") == replace(recipe, task="classification")
    assert outcome.folder == output / "adapter"
    assert outcome.adapter_bytes == sum(f.stat().st_size for f in outcome.folder.iterdir())
    assert outcome.result.steps == 3
    assert outcome.metrics == outcome.result.best
    assert lines(output / "metrics.jsonl")[-1]["metrics"] == outcome.result.last
    training = json.loads((outcome.folder / "adapter.json").read_text("utf-8"))["training"]
    assert (training["steps"], training["data"]["train"]) == (3, 64)
    (method,) = training["recipe"]["method"]
    assert method["lora"]["rank"] == 2
    assert str(tmp_path) not in json.dumps(training)


def test_a_report_adds_its_files_and_changes_no_other(recipe, tmp_path):
    plain, shown = tmp_path / "run", tmp_path / "shown"
    run(recipe, quiet(recipe))
    recipe = replace(recipe, output=str(shown), train=replace(recipe.train, report=True))
    outcome = run(recipe, quiet(recipe))
    assert outcome.page == shown / "report.html"
    names = [{path.name for path in folder.iterdir()} for folder in (plain, shown)]
    assert names[1] - names[0] == {"bag_of_words.json", "predictions.jsonl", "report.html"}
    for file in ("adapter/adapter.safetensors", "metrics.jsonl"):
        assert (plain / file).read_bytes() == (shown / file).read_bytes()
    assert outcome.words.record() == recorded_words(shown).record()
    assert outcome.words.lines[0] in (shown / "report.html").read_text().replace("A bag", "a bag")
    # A resume may turn the report off: nothing that is trained depends on it.
    recipe = replace(recipe, train=replace(recipe.train, report=False))
    assert run(recipe, Reporter(), resume=True).page is None


def test_a_record_has_no_unset_option_that_earlier_versions_cannot_read(recipe):
    data = running._identity(recipe)["data"]
    assert not {"text", "label", "header", "encoding", "skip_empty", "eval_rows"} & data.keys()
    fixed = replace(recipe.data, text="a", header=False, skip_empty=True)
    data = running._identity(replace(recipe, data=fixed))["data"]
    assert (data["text"], data["header"], data["skip_empty"]) == ("a", False, True)


def test_a_moved_run_resumes_with_data_at_another_path(recipe, data, tmp_path):
    whole = run(recipe, Reporter()).result
    (tmp_path / "run").rename(tmp_path / "moved")
    train = data[0].rename(tmp_path / "renamed.tsv")
    moved = replace(
        recipe, output=str(tmp_path / "moved"), data=replace(recipe.data, train=str(train))
    )
    assert run(moved, Reporter(), resume=True).result.history == whole.history
    with pytest.raises(ConfigError, match="another run") as error:
        run(replace(moved, seed=9), Reporter(), resume=True)
    assert any(line.startswith("seed") for line in error.value.offenders)


LONG = "x" * 1001
MANY = [f"{number:04}{'x' * 900}" for number in range(1300)]  # 1.2 MB, where a manifest has 1


@pytest.mark.parametrize("task", ["classification", "multi-label", "tagging"])
@pytest.mark.parametrize(
    ("labels", "problem"), [([LONG, "b"], "a label of at most 1000"), (MANY, "bytes, more than")]
)
def test_labels_that_no_adapter_can_have_are_found_before_the_first_step(
    recipe, tmp_path, monkeypatch, task,
    labels, problem,
):  # fmt: skip
    rows = [json.dumps({"text": f"row {n}", "label": label}) for n, label in enumerate(labels)]
    if task == "tagging":
        rows = [json.dumps({"tokens": ["a"], "tags": [f"B-{label}"]}) for label in labels]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(rows * (2 if len(rows) < 9 else 1)))
    text, label = ("tokens", "tags") if task == "tagging" else ("text", "label")
    source = replace(recipe.data, train=str(file), eval="none", text=text, label=label)
    monkeypatch.setattr(running.loop, "train", lambda session: pytest.fail("it was trained"))
    with pytest.raises(OutputError, match="cannot be written") as error:
        run(replace(recipe, data=source, task=task), Reporter())
    assert problem in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change", [{"name": "a/../b"}, {"method": ["lora(rank=2)", "lora(rank=4)"]}]
)
def test_what_no_manifest_can_have_is_found_before_the_first_step(
    recipe, tmp_path, monkeypatch, change
):
    monkeypatch.setattr(running.loop, "train", lambda session: pytest.fail("it was trained"))
    with pytest.raises(AdapterhubError):
        run(replace(recipe, **change), Reporter())
    assert not (tmp_path / "run").exists()


def test_parameters_require_a_gradient_again_after_a_failure(recipe, monkeypatch):
    prepared = running.prepare(replace(recipe, method="unfreeze"))
    monkeypatch.setattr(running, "prepare", lambda *_, **__: prepared)

    def fail(*arguments: object, **options: object) -> None:
        for tensor in prepared.adapter.tensors().values():
            tensor.requires_grad_(False)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(running.loop, "train", fail)
    with pytest.raises(torch.OutOfMemoryError):
        run(recipe, Reporter())
    changed = [c.own.requires_grad for c in prepared.adapter.changed]
    assert changed
    assert all(changed)


def test_a_warning_names_stages_that_the_run_does_not_reach(recipe):
    notes = Notes()
    options = replace(recipe.train, max_steps=None, epochs=1)
    run(replace(recipe, method="unfreeze", train=options), notes)
    assert len([note for note in notes.notes if note.startswith("unfreeze has ")]) == 1
    assert notes.notes[0] == "train.tsv: tab-separated, 64 rows; columns: text, label"
