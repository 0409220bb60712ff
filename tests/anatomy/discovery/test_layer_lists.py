"""Which module lists of a model are layers."""

from __future__ import annotations

import every_type
import pytest
from torch import nn

from adapterhub.anatomy.discovery.layer_lists import layer_lists


@pytest.mark.parametrize(
    ("model_type", "paths"),
    [
        ("bert", ["encoder.layer"]),
        ("bart", ["encoder.layers", "decoder.layers"]),
        ("albert", ["encoder.albert_layer_groups.*.albert_layers"]),
        ("clip", ["text_model.encoder.layers", "vision_model.encoder.layers"]),
        ("qwen3_next", ["layers"]),  # attention in some
        ("mamba", ["layers"]),  # attention in none
    ],
)
def test_the_lists_of_a_model(model_type, paths):
    found = layer_lists(every_type.build(model_type, "AutoModel"))
    assert [path for path, _ in found] == paths
    assert all(layers for _, layers in found)


def test_a_model_without_lists_has_no_layers():
    assert layer_lists(nn.Sequential(nn.Linear(2, 2))) == []


def test_layers_of_convolutions_are_layers_where_there_are_no_others():
    layers = nn.ModuleList([nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)])
    assert layer_lists(nn.ModuleDict({"stages": layers})) == [("stages", list(layers))]
    alone = nn.ModuleDict({"stages": layers, "blocks": nn.ModuleList(map(feed_forward, "ab"))})
    assert [path for path, _ in layer_lists(alone)] == ["blocks"]


def test_a_list_with_a_place_for_a_module_that_is_missing_is_no_list_of_layers():
    layers = nn.ModuleList(map(feed_forward, "ab"))
    gaps = nn.ModuleList([feed_forward("a"), None])
    found = layer_lists(nn.ModuleDict({"layers": layers, "convolutions": gaps}))
    assert [path for path, _ in found] == ["layers"]


def test_a_shorter_list_beside_layers_with_attention_belongs_to_them():
    blocks = nn.ModuleList([attention(n) for n in "abc"])
    tower = {"blocks": blocks, "mergers": nn.ModuleList(map(feed_forward, "ab"))}
    assert [path for path, _ in layer_lists(nn.ModuleDict(tower))] == ["blocks"]
    tower["mergers"] = nn.ModuleList(map(feed_forward, "abc"))
    assert [path for path, _ in layer_lists(nn.ModuleDict(tower))] == ["blocks", "mergers"]


def attention(_):
    return nn.ModuleDict({f"{name}_proj": nn.Linear(4, 4) for name in "qkvo"})


def feed_forward(_):
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
