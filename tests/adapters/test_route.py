"""`ah.route` as a user calls it; the contract suite compares every method with single runs."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError
from tests.kit import tiny_models


@pytest.fixture
def model():
    model = tiny_models.model("bert")
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name), seed=seed)
    return model


def test_rows_equal_single_runs(model):
    batch = tiny_models.batch(rows=3)
    expected = []
    for row, names in enumerate((["b"], [], ["a", "b"])):
        ah.activate(model, *names)
        expected.append(model(**{k: v[row : row + 1] for k, v in batch.items()}).logits[0])
    with ah.route(model, ["b", None, ("a", "b")]) as routed:
        logits = routed.split(model(**batch).logits)
    for found, single in zip(logits, expected, strict=True):
        torch.testing.assert_close(found, single)


def test_an_error_inside_closes_the_route(model):
    ah.activate(model, "a")
    with pytest.raises(ZeroDivisionError), ah.route(model, ["a", "b"]):
        raise ZeroDivisionError
    state = get_state(model)
    assert state.routes == []
    assert state.compositions == (("a",),)


def test_routes_nest(model):
    with ah.route(model, ["a", "b"]), ah.route(model, ["b"]):
        assert get_state(model).compositions == ("b",)
    assert get_state(model).routes == []


def test_logits_of_another_batch_are_not_split(model):
    with ah.route(model, ["a", "b"]) as routed, pytest.raises(AttachError, match="has 2"):
        routed.split(torch.zeros(3, 3))
