"""Building an adapter does not touch the model."""

from __future__ import annotations

import pytest
import tiny_models
from forge import state_of

import adapterhub as ah
from adapterhub.adapters.build import build_adapter
from adapterhub.adapters.state import bare
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods._spec import parse_methods


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_model_is_not_touched(method):
    model = tiny_models.model("bert")
    before = state_of(model)
    with bare(model) as state:
        adapter = build_adapter(state, (METHODS[method].example(),), "a")
    assert state_of(model) == before
    assert adapter.parameters()
    assert not adapter.active


@pytest.mark.parametrize("method", ["full", "bitfit", "norms", "freeze", "unfreeze"])
def test_weights_in_float64_are_not_called_quantized(method):
    model = tiny_models.model("bert").double()
    with pytest.raises(SiteError) as error:
        ah.attach(model, method)
    assert "it is stored as float64" in str(error.value)
    assert "model.float()" in str(error.value)
    assert "quantized" not in str(error.value)


def test_names_that_look_alike_as_module_names_stay_apart():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="a.b")
    ah.attach(model, "lora", name="a_b")
    keys = [name for name, _ in model.named_modules() if "a_b-" in name]
    assert len(keys) == len(set(keys)) == 2 * 4


def test_a_method_that_does_not_fit_lists_those_that_do():
    model = tiny_models.model("vit") if "vit" in tiny_models.ARCHITECTURES else None
    model = model or tiny_models.model("bert")
    with pytest.raises((SiteError, AttachError)) as error, bare(model) as state:
        build_adapter(state, parse_methods("lora(sites=['cross.q'])"), "a")
    assert "cross.q" in str(error.value)
