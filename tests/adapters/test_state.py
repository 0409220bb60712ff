"""What is active in a model, in a pass and in a block; what is restored after it."""

import contextlib
import cProfile
import pstats
import threading

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import activated, bare, find_state, get_state
from adapterhub.errors import AttachError
from tests.kit import tiny_models
from tests.kit.tiny_models import logits


def two_adapters(model=None):
    model = model or tiny_models.model("bert")
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name), seed=seed)
    return model


def active(model):
    return [adapter.name for adapter in get_state(model).adapters.values() if adapter.active]


def test_what_was_active_is_restored_on_an_error():
    model, untouched = two_adapters(), tiny_models.model("bert")
    ah.activate(model, "a", "b")
    inside = []
    for context in (bare(model), activated(get_state(model), "b")):
        with contextlib.suppress(ZeroDivisionError), context:
            inside.append(active(model))
            raise ZeroDivisionError
        assert active(model) == ["a", "b"]
    assert inside == [[], ["b"]]
    with pytest.raises(AttachError, match="no adapter named 'c'"):
        get_state(model).activate(("b", "c"))
    assert active(model) == ["a", "b"]
    with pytest.raises(ZeroDivisionError), bare(untouched):
        raise ZeroDivisionError
    assert find_state(untouched) is None


def test_labels_of_a_route_are_those_of_the_loss_only():
    model = two_adapters()
    before = dict(model.config.id2label)
    for adapter in get_state(model).adapters.values():
        adapter.head.own["classifier"] = torch.nn.Linear(
            adapter.head.own["classifier"].in_features, 5
        )
        adapter.head.labels["id2label"] = {i: f"c{i}" for i in range(5)}
    ah.activate(model)
    labels = torch.tensor([4, 0, 3])
    with ah.route(model, ["a", "b", "a"]):
        outputs = model(**tiny_models.batch(), labels=labels)
        assert model.config.id2label == before
    expected = torch.nn.functional.cross_entropy(outputs.logits, labels)
    torch.testing.assert_close(outputs.loss, expected)


# `activate`, `route`, `disabled` and `adapters`, as a user calls them.


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


def test_it_nests_with_itself_and_with_routes(model):
    adapted = logits(model)
    rows = len(adapted)
    with ah.route(model, ["a"] * rows) as route:
        routed = logits(model)
        with pytest.raises(AttachError, match=f"has {rows}"):
            route.split(torch.zeros(rows + 1, 3))
        with ah.disabled(model):
            bare = logits(model)
            with ah.route(model, ["a"] * rows), ah.disabled(model):
                assert torch.equal(logits(model), bare)
            with ah.disabled(model):
                assert torch.equal(logits(model), bare)
            with ah.route(model, ["a"] * rows):
                assert torch.equal(logits(model), routed)
            assert torch.equal(logits(model), bare)
            for change, argument in ((ah.attach, "lora"), (ah.activate, "a"), (ah.detach, "a")):
                with pytest.raises(AttachError, match=r"inside route\(...\) or disabled\(...\)"):
                    change(model, argument)
        assert torch.equal(logits(model), routed)
    assert torch.equal(logits(model), adapted)
    assert len({bare.sum().item(), routed.sum().item(), adapted.sum().item()}) == 3


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

    with ah.disabled(model):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        assert torch.equal(states(), bare)
    assert torch.equal(found["active"], adapted)
    torch.testing.assert_close(found["routed"], adapted)
