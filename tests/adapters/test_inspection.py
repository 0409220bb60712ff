"""`inspect`: what was found in a module and what was not, and what attaching would do."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.adapters.inspection import Inspection
from adapterhub.errors import AdapterhubError, AttachError, SiteError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.own_models import Everything
from tests.kit.selection import cases_of


class Own(nn.Module):
    """A network with modules and parameters that are no sites."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.up = nn.ConvTranspose2d(3, 4, 2)
        self.other = nn.ConvTranspose2d(4, 4, 2, bias=False)
        self.groups = nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(self.groups(self.other(self.up(x * self.scale[:, None, None]))))
        return y


class Vision(nn.Module):
    """Blocks with the names of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 8))
        self.blocks = nn.Sequential(_block(), _block(), _block())


def _block() -> nn.Module:
    block = nn.Module()
    block.norm1, block.attn, block.mlp = nn.LayerNorm(8), nn.Module(), nn.Module()
    block.attn.qkv, block.attn.proj = nn.Linear(8, 24), nn.Linear(8, 8)
    block.mlp.fc1, block.mlp.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
    return block


def _rows(found: Inspection) -> dict[str, dict]:
    return {row["site"]: row for row in found.facts()["sites"]}


def test_the_sites_of_a_network():
    rows = _rows(ah.inspect(Everything()))
    conv = rows["conv"]
    assert (conv["in"], conv["out"], conv["modules"]) == (48, 32, ["Conv1d"])
    assert (rows["attn.v"]["modules"], rows["attn.v"]["number"]) == (["MultiheadAttention"], 2)
    assert rows["ffn.up"]["layers"] == "all"
    assert rows["table"]["sizes"] == [[20, 16]]
    assert rows["norm1"]["kind"] == "norm"
    sites = ah.anatomy_of(Everything()).sites
    assert sites["depthwise"].d_in == 3  # of a group
    assert sites["layers.0"].role == "ffn"
    assert "layers.0.self_attn.out_proj" not in sites  # which nothing calls


def test_what_is_at_no_site_is_counted():
    found = ah.inspect(Own())
    numbers = {rest.module: (len(rest.paths), rest.parameters) for rest in found.not_found}
    # The features of a GroupNorm are no last dimension, of which a site changes the output.
    assert numbers == {"ConvTranspose2d": (2, 116), "GroupNorm": (1, 8), "Own": (1, 3)}
    assert found.not_found[0].names == ("weight", "bias")
    assert found.not_found[2].paths == ("",)
    text = str(found)
    assert "of them at no site" in text.splitlines()[1]
    assert "ConvTranspose2d        2       116         weight, bias  up" in text
    assert repr(found) == text
    with_head = ah.inspect(Own(), head=["up", "other"])
    assert [rest.module for rest in with_head.not_found] == ["GroupNorm", "Own"]
    assert with_head.methods["head"].problem == ""
    assert found.methods["head"].details == ("attach(head=[...])",)


def _networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "everything": Everything(),
        "own": Own(),
        "vision": Vision(),
        "bert": tiny_models.model("bert", "features"),
    }


def _named(site, module) -> str:
    hosted = site.kind in ("linear", "norm")
    return type(module.get_submodule(site.host)).__name__ if hosted else site.kind


@pytest.mark.parametrize("name", _networks())
def test_attaching_does_what_is_said(name):
    """Each method fits, or not, with so many parameters, at these sites."""
    module = _networks()[name]
    state = torch.get_rng_state()
    found = ah.inspect(module)
    assert torch.equal(torch.get_rng_state(), state)
    anatomy = ah.anatomy_of(module)
    for method, fit in cases_of(found.methods.items(), 3):
        example = METHODS[method].example()
        if fit.parameters is not None and (fit.parameters or method != "head"):
            adapter = ah.attach(module, example)
            assert sum(p.numel() for p in adapter.parameters()) == fit.parameters, method
            placed = {each.site.id for each in adapter.placed}
            said = {site.id for site in anatomy.select(fit.sites)} if fit.sites else set()
            assert said == placed, method
            adapter.detach()
        else:
            with pytest.raises(AdapterhubError):
                ah.attach(module, example)
        for kind in fit.named:
            sites = [site for site in anatomy.sites.values() if _named(site, module) == kind]
            site = max(sites, key=lambda site: min(site.d_in, site.d_out)).id
            ah.attach(module, dataclasses.replace(example, sites=(site,)))
            ah.detach(module)


def test_each_row_names_its_sites_and_no_others():
    for name, module in _networks().items():
        if name != "bert":
            anatomy = ah.anatomy_of(module)
            for row in ah.inspect(module).rows:
                assert set(anatomy.select([row.site])) == set(row.sites), row.site


def test_neither_weights_nor_adapters_are_looked_at():
    net = Everything()
    facts = ah.inspect(net).facts()
    json.dumps(facts)
    with torch.device("meta"):
        assert ah.inspect(Everything()).facts() == facts
    ah.attach(net, "lora(sites=['conv', 'attn.q', 'fc'])")
    assert ah.inspect(net).facts() == facts
    assert list(ah.adapters(net)) == ["default"]


def test_what_is_refused():
    with pytest.raises(AttachError, match="nor another module"):
        ah.inspect("bert")
    with pytest.raises(SiteError, match="no modules inside"):
        ah.inspect(nn.Linear(2, 2))
    with pytest.raises(SiteError, match="no such module to be a head"):
        ah.inspect(Own(), head=["nothing"])
