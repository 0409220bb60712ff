"""New parameter values become a task head and methods; problems are collected."""

from __future__ import annotations

import pytest
import torch

from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import MismatchError
from adapterhub.interchange.translation import Translation, size_options
from tests.kit import tiny_models


@pytest.fixture
def translation():
    return Translation(anatomy_of(tiny_models.model("bert")))


def values(translation, *endings):
    parameters = translation.anatomy.model.named_parameters()
    return {path: p.detach() + 1 for path, p in parameters if path.endswith(endings)}


@pytest.mark.parametrize(
    ("endings", "method"),
    [(("LayerNorm.weight", "LayerNorm.bias"), "norms"), (("query.weight",), "chosen")],
)
def test_values_become_the_method_that_trains_them(translation, endings, method):
    translation.values |= values(translation, *endings)
    count = len(translation.values)
    translation.finalize()
    assert [name for spec in translation.methods for name in spec] == [method]
    assert len(translation.tensors) == count
    assert all(f".{method}." in name for name in translation.tensors)
    assert not translation.head


def test_head_values_become_the_task_head(translation):
    translation.values |= values(translation, "classifier.weight")
    translation.finalize()
    assert translation.head
    assert translation.tensors.keys() == {"head.classifier.weight", "head.classifier.bias"}
    assert translation.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert translation.notes == ["classifier.bias: part of the task head, missing from the files"]
    assert [name for spec in translation.methods for name in spec] == ["head"]


def test_labels_follow_the_heads_outputs(translation):
    translation.values["classifier.weight"] = torch.ones(5, 32)
    translation.values["classifier.bias"] = torch.ones(5)
    translation.finalize()
    assert translation.labels == tuple(f"LABEL_{i}" for i in range(5))


def test_one_error_lists_all_problems(translation):
    translation.values |= {
        "bert.no_such.weight": torch.ones(1),
        "classifier.scale": torch.ones(1),
        "bert.encoder.layer.0.output.dense.bias": torch.ones(3),
    }
    translation.finalize()
    with pytest.raises(MismatchError, match="the checkpoint cannot be imported on this bert") as e:
        translation.raise_problems("the checkpoint")
    assert e.value.offenders == (
        "bert.encoder.layer.0.output.dense.bias: shape (3,), the backbone needs (32,)",
        "bert.no_such.weight: this model has no such parameter",
        "classifier.scale: the head has no such tensor",
    )


def test_without_problems_nothing_is_raised(translation):
    translation.raise_problems("the checkpoint")
    translation.note_dropout(0.0)
    translation.note_dropout(0.1)
    assert translation.notes == ["dropout 0.1 of training is not carried over"]


def test_the_most_common_size_is_the_default():
    assert size_options("rank", {"a": 8, "b": 4, "c": 8}) == {"rank": 8, "ranks": {"b": 4}}
    assert size_options("size", {"a": 3}) == {"size": 3, "sizes": {}}
