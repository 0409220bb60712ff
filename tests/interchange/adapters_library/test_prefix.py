"""Prefixes of `adapters` compute the same here."""

from __future__ import annotations

import pytest
import torch

from adapterhub.errors import MismatchError
from tests.kit.peers import EXPECTED, UNEVEN, backbone, hidden, imported, inputs

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(("architecture", "case"), sorted(UNEVEN))
def test_a_prefix_in_some_layers_of_t5_is_refused(architecture, case):
    with pytest.raises(MismatchError, match="relative positions"):
        imported(backbone(architecture), architecture, case, head=False)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_prefix_is_applied_by_every_attention(architecture):
    """Compare sdpa with the golden outputs of eager attention.

    In adapters 1.3 with transformers 4.57, a prefix on GPT-2 and Llama has no effect under sdpa
    with an attention mask, so the golden files were made with eager attention.
    """
    model = backbone(architecture)
    model.set_attn_implementation("sdpa")
    imported(model, architecture, "prefix-flat", head=False)
    mask = inputs(architecture)["attention_mask"].bool()
    found = hidden(model, inputs(architecture))[mask]
    expected = EXPECTED[architecture]["prefix-flat.hidden"][mask]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
