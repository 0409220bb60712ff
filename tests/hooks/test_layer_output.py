"""The hook that collects the outputs of all layers and replaces the last one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.hooks.composition import AppliedModules, kept_values
from adapterhub.hooks.layer_output import mix_slot
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.tiny_models import hidden_states


class Recorder(nn.Module):
    """Records its inputs and returns the first state."""

    def forward(self, states, y):
        self.states, self.y = states, y
        return states[0]


def test_a_module_reads_the_states_of_all_layers_and_replaces_the_last():
    """And nothing is kept behind a pass."""
    model = tiny_models.model("bert", "features")
    bare, anatomy = hidden_states(model), ah.anatomy_of(model)
    (site,) = anatomy.select(("mix",))
    slot = mix_slot(anatomy, site)
    assert mix_slot(anatomy, site) is slot
    slot.add("recorder-0", site, recorder := Recorder())
    assert all(map(torch.equal, hidden_states(model), bare))
    assert not hasattr(recorder, "y")
    slot.active = AppliedModules(("recorder-0",))
    output = model(**tiny_models.batch()).last_hidden_state
    assert not kept_values(slot)
    assert len(recorder.states) == 2
    for state, expected in zip([*recorder.states, recorder.y], bare, strict=True):
        assert torch.equal(state, expected)
    assert torch.equal(output, bare[0])


def scores(model):
    """Generate two tokens; return their scores."""
    ids = tiny_models.batch(2, 6)["input_ids"]
    with torch.no_grad():
        return model.generate(
            input_ids=ids, max_new_tokens=2, do_sample=False, output_scores=True,
            return_dict_in_generate=True, eos_token_id=None, pad_token_id=tiny_models.PAD,
        ).scores  # fmt: skip


def test_a_mix_is_refused_where_heads_read_another_stream():
    """XLNet's generate passes target_mapping: its head reads the second stream."""
    model = tiny_models.model("xlnet", "causal-lm")
    bare, inputs = scores(model), tiny_models.batch()
    with torch.no_grad():
        outputs = model(**inputs).logits
    tiny_models.scramble(ah.attach(model, "scalar-mix"), std=0.5)
    with torch.no_grad():
        assert not torch.allclose(model(**inputs).logits, outputs, atol=1e-3)
    with pytest.raises(SiteError, match="stream of hidden states") as error:
        scores(model)
    assert "target_mapping" in error.value.expected
    ah.activate(model)
    assert all(torch.equal(a, b) for a, b in zip(scores(model), bare, strict=True))


def test_other_methods_have_an_effect_on_what_xlnet_generates(subtests):
    for method in ["bitfit", "compacter", "full", "houlsby", "ia3", "norms"]:
        with subtests.test(method=method):
            model = tiny_models.model("xlnet", "causal-lm")
            bare = scores(model)
            tiny_models.scramble(ah.attach(model, example(method)), std=0.5)
            assert all(
                not torch.allclose(a, b, atol=1e-3)
                for a, b in zip(scores(model), bare, strict=True)
            )
