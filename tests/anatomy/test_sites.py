"""What a site promises on every architecture: its x and y."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import adapterhub as ah


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_a_sublayer_begins_with_its_input(architecture):
    """The x of every sublayer has the caller's rows and tokens and the sublayer's width, however
    often its projections are called."""
    model = tiny_models.usual_model(architecture)
    roles = {site.role for site in ah.anatomy_of(model).sites.values()}
    sites = sorted(roles & {"attn", "cross", "ffn"})
    adapter = ah.attach(model, {"parallel": {"sites": sites}})
    seen: dict = {}
    for placed in adapter.placed:
        placed.module.register_forward_pre_hook(
            lambda _, args, site=placed.site: seen.setdefault(site, args)
        )
    inputs = tiny_models.batch()
    model(**inputs, **tiny_models.decoder_inputs(model, inputs))
    assert len(seen) == len(adapter.placed) > 0
    for site, (x, y) in seen.items():
        assert x.shape[-1] == site.d_in
        assert y.shape[-1] == site.d_out
        # XLNet counts tokens first; a list of experts or of rows may be flat.
        assert x.shape[:-1] == y.shape[:-1]
        assert x.shape[:-1].numel() in (27, 12)


@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_a_prompt_leaves_every_output_at_the_length_of_its_input(architecture):
    model = tiny_models.usual_model(architecture)
    adapter = ah.attach(model, "prompt")
    tiny_models.scramble(adapter)
    inputs = tiny_models.batch()
    with torch.no_grad():
        output = model(
            **inputs, **tiny_models.decoder_inputs(model, inputs), output_hidden_states=True
        )
    lengths = {9, 4} if model.config.is_encoder_decoder else {9}
    states = [
        state
        for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
        for state in output.get(name) or ()
    ]
    assert len(states) >= 3
    assert {state.shape[1] for state in states} <= lengths


@pytest.mark.parametrize("architecture", [a for a in tiny_models.ARCHITECTURES if "pegasus" in a])
def test_constants_do_not_train(architecture):
    model = tiny_models.usual_model(architecture)
    adapter = ah.attach(model, "full")
    constants = ah.anatomy_of(model).family.constants
    assert constants
    for path in constants:
        table = model.base_model.get_parameter(path)
        assert not table.requires_grad
        assert all(table is not changed.original for changed in adapter.changed)


def test_a_layer_is_one_set_of_weights():
    """ALBERT's two groups of two layers are four sites of a role, run sixteen times."""
    model = tiny_models.model("albert", num_hidden_layers=8, num_hidden_groups=2, inner_group_num=2)
    adapter = ah.attach(model, {"lora": {"sites": ["attn.q"]}})
    assert ah.anatomy_of(model).depth("encoder") == 4
    hosts = [p.site.host for p in adapter.placed]
    assert [p.site.layer for p in adapter.placed] == [0, 1, 2, 3]
    assert hosts[2] == "albert.encoder.albert_layer_groups.1.albert_layers.0.attention.query"
    calls = []
    for placed in adapter.placed:
        placed.module.register_forward_hook(lambda *_, site=placed.site: calls.append(site.layer))
    model(**tiny_models.batch())
    assert len(calls) == 16
    assert set(calls) == {0, 1, 2, 3}
    paths = ah.anatomy_of(model).parameters()
    layers = {ah.anatomy_of(model).layer_of(path) for path in paths}
    assert layers == {"below", "above", *(("encoder", number) for number in range(4))}
