"""`ah.search` passes a query to the local registry or to a hub."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, RegistryError
from adapterhub.registry.search import why_empty
from adapterhub.registry.store import Query
from tests.kit import registries


def test_the_fields_of_a_query_are_keywords(tmp_path):
    registry = tmp_path / "registry"
    for name, accuracy in (("a", 0.5), ("b", 0.75)):
        folder = registries.write_sample(tmp_path / name, accuracy=accuracy)
        ah.publish(folder, name, registry=registry)
    best = ah.search("bert", registry=registry, sort="accuracy", method="lora", limit=1)
    assert [entry.name for entry in best] == ["b"]
    assert ah.search(registry=registry, task="tagging") == []
    with pytest.raises(RegistryError, match="no registry"):
        ah.search(registry=tmp_path / "missing")
    with pytest.raises(TypeError, match="colour"):
        ah.search(registry=registry, colour="red")
    with pytest.raises(ConfigError, match="https"):
        ah.search(hub="ftp://h.org")


def test_an_empty_result_is_explained(tmp_path):
    registry = tmp_path / "registry"
    registry.mkdir()
    assert why_empty(Query(task="tagging"), registry) == []
    rows = (("a", "lora", "classification", {"accuracy": 0.5}),
            ("b", "mam", "classification", {"f1": 0.5}),
            ("c", "lora", "regression", {}))  # fmt: skip
    for name, method, task, metrics in rows:
        folder = registries.write_sample(tmp_path / name, 0, method=method, task=task, **metrics)
        ah.publish(folder, name, registry=registry, tags=("good",))
    for query, line in (
        (Query(task="tagging"), "no adapter has task=tagging; tasks here: classification (2),"
         " regression (1)"),
        (Query(tags=("bad",)), "no adapter has tag=bad; tags here: good (3)"),
        (Query(method="x"), "no adapter has method=x; methods here: lora (2), mam (1)"),
        (Query(sort="bleu"), "no adapter has the metric bleu to sort by; metrics here:"
         " accuracy (1), f1 (1)"),
        (Query("zebra"), "no adapter has the words 'zebra'"),
        (Query(backbone="x/y"), "no adapter has backbone=x/y; backbones here: acme/bert-small (3)"),
    ):  # fmt: skip
        assert why_empty(query, registry) == [line]
    assert why_empty(Query(task="regression", method="mam"), registry) == [
        "no adapter has all of task=regression, method=mam",
        "without task=regression: 1",
        "without method=mam: 1",
    ]
    assert why_empty(Query(task="x", method="y"), registry) == [
        "no adapter has task=x; tasks here: classification (2), regression (1)",
        "no adapter has method=y; methods here: lora (2), mam (1)",
    ]
