"""Default sites that only some layers have: refused, and overruled with `partial`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.methods.common.projections import PartialSitesError
from tests.kit import tiny_models


@pytest.fixture
def half():
    """Return a BERT in whose second layer no site is found."""
    model = tiny_models.model("bert")

    class Layer(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, *args, **kwargs):
            return self.inside(*args, **kwargs)

    model.bert.encoder.layer[1] = Layer(model.bert.encoder.layer[1])
    return model


METHODS = ("lora", "ia3", "pfeiffer", "houlsby", "mam", "unipelt")


@pytest.mark.parametrize("method", METHODS)
def test_half_a_model_is_refused(half, method):
    with pytest.raises(SiteError, match="not all layers have the sites of") as error:
        ah.attach(half, method)
    assert error.value.offenders == ("encoder: 1 of 2 layers have some (0)",)
    assert "partial=True" in error.value.hint
    assert isinstance(error.value.__cause__ or error.value, PartialSitesError)
    assert not ah.adapters(half)


def test_a_composition_with_parts_of_its_own_is_refused(half):
    """The gated parts of UniPELT are no methods that a file could name."""
    with pytest.raises(SiteError, match="not all layers have the sites of"):
        ah.attach(half, "unipelt", partial=True)
    ah.attach(half, "unipelt(layers=0)")


@pytest.mark.parametrize("method", METHODS[:-1])
def test_partial_adapts_what_is_there(half, method, tmp_path):
    """And the files name it, so that loading needs no such argument."""
    adapter = ah.attach(half, method, partial=True)
    assert {placed.site.layer for placed in adapter.placed} == {0}
    assert adapter.count() == sum(m.count(adapter.anatomy) for m in adapter.methods) > 0
    tiny_models.scramble(adapter)
    with torch.no_grad():
        expected = half.eval()(**tiny_models.batch()).logits
        adapter.save(tmp_path / "a")
        ah.detach(half)
        ah.load(half, tmp_path / "a")
        assert torch.equal(half(**tiny_models.batch()).logits, expected)


def test_partial_changes_nothing_where_all_layers_have_them():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(rank=4)", partial=True)
    assert adapter.methods == (ah.LoRA(rank=4),)


def test_other_refusals_stay(half):
    with pytest.raises(SiteError, match="no such site"):
        ah.attach(half, "lora(sites=[cross.q])", partial=True)
