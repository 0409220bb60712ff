"""`ah.activate` as a user calls it."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AttachError
from tests.kit import tiny_models


def test_the_order_of_names_is_the_order_of_the_stack():
    """A scale and a low-rank update do not commute: y -> l (y + u) or l y + u."""
    model = tiny_models.model("bert")
    tiny_models.scramble(ah.attach(model, "ia3(sites=['attn.v'])", name="scale"), seed=1)
    tiny_models.scramble(ah.attach(model, "lora(sites=['attn.v'])", name="update"), seed=2)
    logits = {}
    for names in (("scale", "update"), ("update", "scale")):
        ah.activate(model, *names)
        logits[names] = model(**tiny_models.batch()).logits
    first, second = logits.values()
    assert not torch.allclose(first, second)


def test_no_names_is_the_bare_backbone():
    model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    bare = model(**tiny_models.batch()).logits
    tiny_models.scramble(ah.attach(model, "lora"))
    assert not torch.equal(model(**tiny_models.batch()).logits, bare)
    ah.activate(model)
    assert torch.equal(model(**tiny_models.batch()).logits, bare)


def test_what_is_no_name_is_refused():
    model = tiny_models.model("bert")
    ah.attach(model, "lora")
    with pytest.raises(AttachError, match="3 is not the name of an adapter"):
        ah.activate(model, 3)


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
