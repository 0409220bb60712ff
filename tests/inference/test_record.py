"""The training record in a manifest: settings for new data, and nothing of another machine."""

from __future__ import annotations

from typing import Any

import pytest

from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, FileError
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead
from adapterhub.inference.record import training_record
from tests.kit.registries import IDENTITY

BACKBONE = BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY)


CLASSIFIER = TaskHead("classification")


def manifest(
    task: str | None = None, head: TaskHead | None = CLASSIFIER, **training: Any
) -> Manifest:
    return Manifest(
        name="polite",
        methods=({"lora": {"rank": 2}},),
        backbone=BACKBONE,
        task=task,
        head=head,
        training=training,
    )


def test_settings_of_the_run_are_defaults_for_new_data() -> None:
    recipe = {
        "task": "seq2seq(metric=rouge)",
        "data": {"text": "question", "label": "answer"},
        "train": {"max_length": 64, "epochs": 9},
    }
    record = training_record(manifest(recipe=recipe, seed=7))
    assert record.task.name == "seq2seq"
    assert (record.data.text, record.data.label) == ("question", "answer")
    assert (record.max_length, record.seed) == (64, 7)
    # Where the data was and how many rows are dropped; without a length it is that of then.
    data = {"train": "/home/x/train.tsv", "eval": "hf:x/y", "rows": 100, "text": "t"}
    record = training_record(manifest(recipe={"data": data, "train": {"max_length": None}}))
    assert (record.data, record.max_length) == (DataOptions(text="t"), 128)


def test_an_adapter_without_a_recipe_has_the_task_of_its_manifest() -> None:
    record = training_record(manifest(task="tagging"))
    assert record.task.name == "tagging"
    assert (record.data, record.max_length, record.seed) == (DataOptions(), 2_048, 0)
    assert training_record(manifest()).task.name == "classification"
    with pytest.raises(ConfigError, match="does not record what kind of model"):
        training_record(manifest(head=None))
    assert training_record(manifest(head=None), "reranking").kind == "regression"


@pytest.mark.parametrize(
    ("training", "offender"),
    [
        ({"recipe": [1]}, "recipe is not a mapping"),
        ({"recipe": {"data": {"text": ["a"]}}}, "text"),
        ({"recipe": {"train": {"max_length": 0}}}, "max_length is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"recipe": {"task": "classify"}}, "unknown task"),
    ],
)
def test_a_broken_record_is_an_error_of_the_file(training: dict[str, Any], offender: str) -> None:
    with pytest.raises(FileError, match="training record of 'polite'") as error:
        training_record(manifest(**training))
    assert offender in "\n".join(error.value.offenders)


def test_options_of_a_later_version_that_change_nothing_are_ignored() -> None:
    data = {"text": "t", "later": None, "other": False}
    assert training_record(manifest(recipe={"data": data})).data == DataOptions(text="t")
    with pytest.raises(FileError) as error:
        training_record(manifest(recipe={"data": {"later": "x"}}))
    assert "later is not an option" in str(error.value)
