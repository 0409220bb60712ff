"""Roles of projections that no known sublayer has."""

from __future__ import annotations

from torch import nn

from adapterhub.anatomy.discovery.roles import further_sites, kind_of, mixer_of, own_name


class NewConvMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out_proj(self.in_proj(x))


class NewMLP(NewConvMixer):
    pass


class NewConvLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.feed_forward = NewConvMixer(), NewMLP()
        self.moe = nn.ModuleDict({"experts": nn.ModuleList([NewMLP()]), "gate": nn.Linear(4, 2)})
        self.side = nn.Linear(4, 4)


PATHS = (
    "conv.in_proj",
    "conv.out_proj",
    "feed_forward.in_proj",
    "moe.experts.0.in_proj",
    "moe.gate",
    "side",
)


def test_each_projection_has_a_role_by_the_module_around_it_but_those_of_experts():
    assert further_sites(NewConvLayer(), PATHS, {"attn.o": "conv.out_proj"}) == {
        "mixer.in_proj": "conv.in_proj",
        "ffn.in_proj": "feed_forward.in_proj",
        "moe.gate": "moe.gate",
        "other.side": "side",
    }


def test_equal_names_and_names_that_are_taken_get_longer():
    layer = nn.ModuleDict({"a": NewMLP(), "b": NewMLP()})
    paths = ("a.in_proj", "b.in_proj")
    found = further_sites(nn.ModuleDict({"mlp": layer}), [f"mlp.{p}" for p in paths], {})
    assert found == {"ffn.a_in_proj": "mlp.a.in_proj", "ffn.b_in_proj": "mlp.b.in_proj"}
    one = further_sites(nn.ModuleDict({"mlp": NewMLP()}), ["mlp.in_proj"], {"ffn.in_proj": "x"})
    assert one == {"ffn.mlp_in_proj": "mlp.in_proj"}


def test_the_innermost_module_decides(subtests):
    for path, kind in list(
        zip(PATHS, ("mixer", "mixer", "ffn", "ffn", "moe", "other"), strict=True)
    ):
        with subtests.test(path=path):
            assert kind_of(NewConvLayer(), path) == kind


def test_what_a_class_shares_with_its_layer_says_nothing():
    assert own_name(NewMLP(), NewConvLayer()) == "MLP"
    assert own_name(NewConvMixer(), NewConvLayer()) == "Mixer"
    assert own_name(NewMLP(), NewMLP()) == "NewMLP"


def test_a_mixer_is_the_module_that_has_all_its_projections():
    layer = NewConvLayer()
    assert mixer_of(layer, {"mixer.in": "conv.in_proj", "mixer.out": "conv.out_proj"}) == "conv"
    assert mixer_of(layer, {"mixer.in": "conv.in_proj", "mixer.out": "side"}) is None
    assert mixer_of(layer, {"ffn.up": "feed_forward.in_proj"}) is None
