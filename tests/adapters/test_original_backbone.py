"""The identity is that of the backbone, whatever adapters have put in its place."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.adapters.state import get_state, identities_before
from adapterhub.anatomy.build import anatomy_of
from tests.kit import tiny_models


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("method", ["full", "norms", "mam", "dora"])
def test_adapters_change_nothing(architecture, method):
    model = tiny_models.usual_model(architecture)
    anatomy = anatomy_of(model)
    before = identities_before(anatomy, {}).identity(complete=True)
    tiny_models.scramble(ah.attach(model, method))
    state = get_state(model)
    assert state.identity() == before
    ah.activate(model)
    assert state.identity() == before


def test_tied_embeddings_that_an_adapter_unties():
    model = tiny_models.model("bart", "seq2seq")
    before = identities_before(anatomy_of(model), {}).identity(complete=True)
    tiny_models.scramble(ah.attach(model, "chosen(untied=true)"))
    assert get_state(model).identity() == before
