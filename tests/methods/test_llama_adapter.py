"""LLaMA-Adapter: its equation, in attention by the interface and by torch's functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.errors import SiteError
from adapterhub.methods import METHODS
from tests.kit import tiny_models

# Without rotary positions, so that queries are those of the projection.
ARCHITECTURES = ("bert", "gpt2", "openai-gpt", "bloom", "mpt")


def seen(model, site):
    """Return what the first layer's attention reads, and what it attends to."""
    found = []
    hosts = [model.get_submodule(anatomy_site(model, site, name).host) for name in ("q", "o")]
    handles = [h.register_forward_pre_hook(lambda _, a: found.append(a[0])) for h in hosts]
    with torch.no_grad():
        model(**tiny_models.batch())
    for handle in handles:
        handle.remove()
    return found


def anatomy_site(model, site, name):
    return ah.anatomy_of(model).sites[f"{site.id.removesuffix('kv')}{name}"]


def projected(model, site, name, x):
    own = anatomy_site(model, site, name)
    host = model.get_submodule(own.host)
    y = torch.nn.functional.linear(x, read_weight(host, own.part), read_bias(host, own.part))
    return y.unflatten(-1, (model.config.num_attention_heads, -1)).transpose(-2, -3)


def expected_change(model, placed, x):
    """Compute g softmax(s q (W_k P + b_k)^T) (W_v P + b_v), (batch, tokens, d)."""
    prompt, gate = placed.module.P.detach(), placed.module.g.detach()
    q = projected(model, placed.site, "q", x)
    key, value = (projected(model, placed.site, name, prompt) for name in ("k", "v"))
    weights = (q @ key.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (gate * weights @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("together", ["", "prefix(length=2)"], ids=["alone", "with a prefix"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_added_is_the_equation(architecture, together):
    model = tiny_models.model(architecture)
    if together:
        tiny_models.scramble(ah.attach(model, together, name="other"))
    adapter = ah.attach(model, "llama-adapter(length=3)", name="own")
    ah.activate(model, *(["other"] if together else []))
    placed = adapter.placed[0]
    x, before = seen(model, placed.site)
    ah.activate(model, *(["other"] if together else []), "own")
    assert torch.equal(seen(model, placed.site)[1], before) or together
    tiny_models.scramble(adapter, std=1.0)
    _, after = seen(model, placed.site)
    change = expected_change(model, placed, x)
    assert change.abs().max() > 0.05
    torch.testing.assert_close(after, before + change, atol=2e-5, rtol=1e-4)


def test_an_attention_without_projections_of_its_own_is_refused():
    model = tiny_models.model("bert")
    anatomy = ah.anatomy_of(model)
    fused = {name: site for name, site in anatomy.sites.items() if not name.endswith("attn.k")}
    with pytest.raises(SiteError, match="projections of keys") as error:
        list(METHODS["llama-adapter"]().plan(replace(anatomy, sites=fused)))
    assert error.value.offenders == ("encoder.0.attn.kv", "encoder.1.attn.kv")
