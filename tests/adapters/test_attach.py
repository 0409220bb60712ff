"""`ah.attach` and `ah.detach`: all or nothing."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from forge import refused

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError


@pytest.mark.parametrize(
    ("method", "name", "says"),
    [
        ("lora(sites=['attn.x'])", "a", "attn.x"),
        ("lora(sites=['ffn'], rank=0)", "a", "less than 1"),
        (["lora", "lora"], "a", "two methods of one kind"),
        ("lora", "../up", "invalid adapter name"),
        ("adapterfusion(adapters=['x', 'y'])", "a", "no such adapter"),
    ],
)
def test_a_refused_adapter_leaves_the_model_as_it_was(method, name, says):
    model = tiny_models.model("bert")
    with refused(model, says):
        ah.attach(model, method, name=name)


def test_a_new_adapter_is_the_active_one_and_alone_trains():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="a")
    adapter = ah.attach(model, "ia3", name="b")
    state = get_state(model)
    assert [a.name for a in state.adapters.values() if a.active] == ["b"]
    own = {id(p) for p in adapter.parameters()}
    assert all(p.requires_grad for p in adapter.parameters())
    backbone = [p for n, p in model.named_parameters() if "adapterhub" not in n]
    assert not any(p.requires_grad for p in backbone if id(p) not in own)


def test_detach_without_a_name_detaches_all():
    model = tiny_models.model("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ah.attach(model, "bitfit", name="a")
    ah.attach(model, "lora", name="b")
    ah.detach(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_detach_names_the_nearest_adapter():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="polite")
    with pytest.raises(AttachError, match="did you mean 'polite'"):
        ah.detach(model, "polit")
