"""The modules of a backbone do not contain those of adapters."""

from __future__ import annotations

import adapterhub as ah
from adapterhub.anatomy.backbone import own_modules, slots_in
from tests.kit import tiny_models


def test_modules_are_those_without_adapters():
    for architecture in ("bert", "albert", "t5"):
        model = tiny_models.usual_model(architecture)
        before = list(model.named_modules())
        assert own_modules(model) == before
        assert own_modules(model, every_use=True) == list(
            model.named_modules(remove_duplicate=False)
        )
        for name in "ab":
            ah.attach(model, "lora", name=name)
        heads = set(dict(before)) & {"classifier", "classification_head"}
        assert [path for path, _ in own_modules(model)] == [path for path, _ in before], heads


def test_slots_are_listed_without_what_they_hold():
    model = tiny_models.usual_model("bert")
    assert not list(slots_in(model))
    ah.attach(model, "lora", name="a")
    slots = list(slots_in(model))
    assert len(slots) == 4
    ah.attach(model, "lora", name="b")
    assert list(slots_in(model)) == slots
