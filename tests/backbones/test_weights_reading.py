"""Reading the weight and bias of a projection."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from one_site import PROJECTIONS
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.errors import SiteError


def test_weights_are_read_as_they_compute():
    for architecture in PROJECTIONS:
        model = tiny_models.model(architecture)
        for site in ah.anatomy_of(model).sites.values():
            if site.kind == "linear":
                host = model.get_submodule(site.host)
                x = torch.randn(2, site.d_in)
                y = host(x) if site.part is None else site.part.read(host(x))
                weight, bias = read_weight(host, site.part), read_bias(host, site.part)
                assert weight.dtype == torch.float32
                assert weight.shape == (site.d_out, site.d_in)
                torch.testing.assert_close(F.linear(x, weight, bias), y, atol=1e-5, rtol=1e-5)


def test_a_weight_that_cannot_be_read_is_refused():
    with pytest.raises(SiteError, match="LayerNorm cannot be read"):
        read_weight(torch.nn.LayerNorm(4))
