"""The hook that collects the outputs of all layers and replaces the last one."""

from __future__ import annotations

import tiny_models
import torch
from torch import nn

import adapterhub as ah
from adapterhub.hooks.forward_pass import AppliedModules, kept_values
from adapterhub.hooks.layer_mix import mix_slot


class Recorder(nn.Module):
    """Records its inputs and returns the first state."""

    def forward(self, states, y):
        self.states, self.y = states, y
        return states[0]


def with_recorder(architecture):
    model = tiny_models.model(architecture, "features")
    anatomy = ah.anatomy_of(model)
    (site,) = anatomy.select(("mix",))
    slot = mix_slot(anatomy, site)
    slot.add("recorder-0", site, recorder := Recorder())
    return model, slot, recorder


def hidden_states(model):
    with torch.no_grad():
        return model(**tiny_models.batch(), output_hidden_states=True).hidden_states


def test_a_module_reads_the_states_of_all_layers_and_replaces_the_last():
    bare = hidden_states(tiny_models.model("bert", "features"))
    model, slot, recorder = with_recorder("bert")
    slot.active = AppliedModules(("recorder-0",))
    with torch.no_grad():
        output = model(**tiny_models.batch()).last_hidden_state
    assert len(recorder.states) == 2
    for state, expected in zip([*recorder.states, recorder.y], bare, strict=True):
        assert torch.equal(state, expected)
    assert torch.equal(output, bare[0])


def test_an_inactive_slot_records_nothing():
    model, slot, recorder = with_recorder("bert")
    expected = hidden_states(tiny_models.model("bert", "features"))
    for state, other in zip(hidden_states(model), expected, strict=True):
        assert torch.equal(state, other)
    assert not kept_values(slot)
    assert not hasattr(recorder, "y")


def test_states_are_released_after_the_forward_pass():
    model, slot, _ = with_recorder("bert")
    slot.active = AppliedModules(("recorder-0",))
    model(**tiny_models.batch())
    assert not kept_values(slot)


def test_one_slot_serves_all_modules_of_a_stack():
    model, slot, _ = with_recorder("bert")
    anatomy = ah.anatomy_of(model)
    (site,) = anatomy.select(("mix",))
    assert mix_slot(anatomy, site) is slot
