"""One head of an adapter with several, from its manifest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from adapterhub.errors import ConfigError, FileError
from adapterhub.files.manifest import (
    BackboneRef,
    HeadRecord,
    Manifest,
    TaskHead,
    TensorInfo,
    from_json,
    name_in_file,
    to_json,
    with_head,
)
from adapterhub.files.schema import canonical_json
from tests.kit.registries import IDENTITY

CLASSES = TaskHead("classification", "single_label_classification", "mean")
ONE = Manifest(
    name="polite",
    methods=({"lora": {}},),
    backbone=BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY),
    tensors={"encoder.0.attn.q.lora.A": TensorInfo("F32", (8, 4))},
    files={"adapter.safetensors": "0" * 64},
)
SEVERAL = replace(
    ONE,
    heads={
        "rte": HeadRecord("classification", ("no", "yes"), CLASSES),
        "sts-b": HeadRecord("regression", (), TaskHead("regression", "regression")),
    },
    tensors={
        **ONE.tensors,
        "heads.rte.classifier.weight": TensorInfo("F32", (2, 4)),
        "heads.sts-b.classifier.weight": TensorInfo("F32", (1, 4)),
    },
    metrics={"mean": 0.5, "rte/accuracy": 0.75, "sts-b/pearson": 0.25},
    training={
        "seed": 3,
        "recipe": {
            "task": "classification",
            "mixing": {"size": {}},
            "tasks": {"rte": {"task": "classification", "data": {"text": "a"}, "weight": 1.0},
                      "sts-b": {"task": "regression", "data": {}, "weight": 1.0}},
        },
    },
)  # fmt: skip


def test_heads_round_trip_and_other_manifests_keep_their_bytes() -> None:
    assert from_json(to_json(SEVERAL)) == SEVERAL
    assert "heads" not in json.loads(to_json(ONE))
    assert from_json(to_json(ONE)) == ONE


def test_one_head_makes_an_ordinary_manifest() -> None:
    one = with_head(SEVERAL, "rte")
    assert (one.name, one.task, one.labels) == ("polite-rte", "classification", ("no", "yes"))
    assert (one.head, one.heads, one.metrics) == (CLASSES, {}, {"accuracy": 0.75})
    assert set(one.tensors) == {"encoder.0.attn.q.lora.A", "head.classifier.weight"}
    assert one.tensors["head.classifier.weight"].shape == (2, 4)
    recipe = {"task": "classification", "data": {"text": "a"}}
    assert one.training == {"seed": 3, "recipe": recipe}
    assert from_json(to_json(one)) == one
    assert with_head(SEVERAL, "sts-b").head == TaskHead("regression", "regression")
    assert with_head(ONE, None) == ONE


def test_names_of_tensors_lead_back_to_the_file() -> None:
    for head in SEVERAL.heads:
        names = {name_in_file(name, head) for name in with_head(SEVERAL, head).tensors}
        assert names <= SEVERAL.tensors.keys()
        assert f"heads.{head}.classifier.weight" in names
    assert name_in_file("head.classifier.weight", None) == "head.classifier.weight"


@pytest.mark.parametrize(
    ("manifest", "head", "match"),
    [(SEVERAL, None, "2 heads: which one"), (SEVERAL, "rtee", "did you mean 'rte'"),
     (ONE, "rte", "no heads with names")],
)  # fmt: skip
def test_a_head_that_is_not_there_is_refused(manifest, head, match):
    with pytest.raises(ConfigError, match=match) as error:
        with_head(manifest, head)
    if manifest.heads:
        assert "one of rte, sts-b" in str(error.value)


@pytest.mark.parametrize("recipe", [None, [], {"tasks": 3}, {"tasks": {"rte": 3}}, {"tasks": {}}])
def test_a_record_without_tasks_stays(recipe: object) -> None:
    manifest = replace(SEVERAL, training={"recipe": recipe})
    assert with_head(manifest, "rte").training == {"recipe": recipe}


@pytest.mark.parametrize(
    "heads",
    [{"a.b": {"task": "classification", "labels": [], "head": None}}, {"a": {}}, [1], {"a": 3},
     {"a": {"task": "classification", "labels": ["x", "x"], "head": None}}],
)  # fmt: skip
def test_broken_heads_are_refused(heads: object) -> None:
    tree = {**json.loads(to_json(ONE)), "heads": heads}
    with pytest.raises(FileError, match="not a valid adapter manifest"):
        from_json(canonical_json(tree))
