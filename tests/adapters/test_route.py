"""`activate`, `route`, `disabled` and `adapters`, as a user calls them."""

from __future__ import annotations

import cProfile
import pstats
import threading

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.adapters.route import adapters, disabled
from adapterhub.errors import AttachError
from tests.kit import tiny_models
from tests.kit.tiny_models import logits


def calls(run):
    """Count the function calls of the second of two equal runs."""
    run()
    profile = cProfile.Profile()
    profile.runcall(run)
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize("operation", ["swap", "attach", "load"])
def test_the_cost_does_not_grow_with_the_adapters_attached(operation, tmp_path):
    model = tiny_models.usual_model("bert")
    ah.attach(model, "lora(layers='top 1')", name="a").save(tmp_path / "a")
    ah.attach(model, "lora(layers='top 1')", name="b")
    runs = {
        "swap": lambda: (ah.activate(model, "a"), ah.activate(model, "b")),
        "attach": lambda: ah.attach(model, "lora", name=f"new {len(ah.adapters(model))}"),
        "load": lambda: ah.load(model, tmp_path / "a", name=f"new {len(ah.adapters(model))}"),
    }
    few = calls(runs[operation])
    for n in range(30):
        ah.attach(model, "lora", name=str(n))
    assert calls(runs[operation]) < 1.2 * few


@pytest.fixture
def model():
    """A classifier with the adapters a and b; b is active."""
    model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    for name, method in (("a", "lora"), ("b", "bitfit")):
        tiny_models.scramble(ah.attach(model, method, name=name))
    return model.eval()


def test_the_adapters_are_listed_in_order(model):
    assert list(adapters(model)) == list(ah.adapters(model)) == ["a", "b"]
    assert [adapter.active for adapter in adapters(model).values()] == [False, True]
    ah.activate(model, "a", "b")
    assert [adapter.active for adapter in adapters(model).values()] == [True, True]
    adapters(model).clear()  # a copy
    ah.detach(model, "a")
    assert list(adapters(model)) == ["b"]
    ah.detach(model)
    assert adapters(model) == {}
    for call in (adapters, lambda thing: disabled(thing).__enter__()):
        with pytest.raises(AttachError, match="is not a model of transformers"):
            call(nn.DataParallel(model))


def test_the_room_is_the_function():
    import adapterhub.adapters

    assert ah.adapters is adapterhub.adapters
    assert ah.adapters(tiny_models.model("bert")) == {}


def test_it_nests_with_itself_and_with_routes(model):
    adapted = logits(model)
    rows = len(adapted)
    with ah.route(model, ["a"] * rows) as route:
        routed = logits(model)
        with pytest.raises(AttachError, match=f"has {rows}"):
            route.split(torch.zeros(rows + 1, 3))
        with disabled(model):
            bare = logits(model)
            with ah.route(model, ["a"] * rows), disabled(model):
                assert torch.equal(logits(model), bare)
            with disabled(model):
                assert torch.equal(logits(model), bare)
            with ah.route(model, ["a"] * rows):
                assert torch.equal(logits(model), routed)
            assert torch.equal(logits(model), bare)
        assert torch.equal(logits(model), routed)
    assert torch.equal(logits(model), adapted)
    assert len({bare.sum().item(), routed.sum().item(), adapted.sum().item()}) == 3


def test_what_is_attached_and_active_does_not_change_inside(model):
    with disabled(model):
        for change in (
            lambda: ah.attach(model, "lora", name="c"),
            lambda: ah.activate(model, "a"),
            lambda: ah.detach(model, "a"),
        ):
            with pytest.raises(AttachError, match=r"inside route\(...\) or disabled\(...\)"):
                change()
    ah.activate(model, "a")


def test_it_applies_in_its_own_thread():
    """The other thread computes with its route, as if nothing were disabled here."""
    model = tiny_models.model("bert", "features", **tiny_models.NO_DROPOUT)

    def states():
        with torch.no_grad():
            return model(**tiny_models.batch()).last_hidden_state

    bare = states()
    tiny_models.scramble(ah.attach(model, "lora", name="a"))
    model.eval()
    adapted, found = states(), {}

    def compute():
        found["active"] = states()
        with ah.route(model, ["a"] * len(bare)):
            found["routed"] = states()

    with disabled(model):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        assert torch.equal(states(), bare)
    assert torch.equal(found["active"], adapted)
    torch.testing.assert_close(found["routed"], adapted)


def test_the_text_of_an_adapter(model):
    a, b = adapters(model).values()
    assert repr(b) == (
        "<Adapter 'b': bitfit on BertForSequenceClassification, "
        f"{b.count():,} parameters, labels LABEL_0, LABEL_1, LABEL_2, active>"
    )
    assert str(a).startswith("<Adapter 'a': lora on Bert")
    assert not str(a).endswith("active>")
    c = ah.attach(
        tiny_models.model("bert", "features"), ["lora(rank=2)", "prefix"], name="two words"
    )
    assert repr(c).startswith("<Adapter 'two words': lora(rank=2) + prefix on BertModel, ")
