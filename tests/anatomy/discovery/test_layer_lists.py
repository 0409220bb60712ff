"""Which module lists of a model are layers."""

from __future__ import annotations

import every_type
from torch import nn

from adapterhub.anatomy.discovery.row import layer_lists


def test_the_lists_of_a_model(subtests):
    cases = [
        ("bert", ["encoder.layer"]),
        ("bart", ["encoder.layers", "decoder.layers"]),
        ("albert", ["encoder.albert_layer_groups.*.albert_layers"]),
        ("clip", ["text_model.encoder.layers", "vision_model.encoder.layers"]),
        ("qwen3_next", ["layers"]),  # attention in some
        ("mamba", ["layers"]),  # attention in none
    ]
    for model_type, paths in cases:
        with subtests.test(model_type=model_type):
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
    tower = {"blocks": blocks, "others": nn.ModuleList(map(feed_forward, "ab"))}
    assert [path for path, _ in layer_lists(nn.ModuleDict(tower))] == ["blocks"]
    tower["others"] = nn.ModuleList(map(feed_forward, "abc"))
    assert [path for path, _ in layer_lists(nn.ModuleDict(tower))] == ["blocks", "others"]
    tower["others"] = nn.ModuleDict({"mergers": tower["others"]})
    assert [path for path, _ in layer_lists(nn.ModuleDict(tower))] == ["blocks"]
    del tower["blocks"]  # of networks alone
    assert [path for path, _ in layer_lists(nn.ModuleDict(tower))] == ["others.mergers"]


def test_a_sequence_of_layers_with_attention_is_a_list():
    layers = nn.Sequential(attention("a"), attention("b"))
    model = nn.ModuleDict({"blocks": layers, "head": nn.Sequential(*map(feed_forward, "ab"))})
    assert layer_lists(model) == [("blocks", list(layers))]
    mixed = nn.Sequential(attention("a"), nn.ReLU())
    assert layer_lists(nn.ModuleDict({"blocks": mixed})) == []


def test_the_layers_of_stages_are_layers():
    """Where each stage has some; else the stages are."""

    def stage(**lists):
        return nn.ModuleDict({n: nn.ModuleList(map(feed_forward, m)) for n, m in lists.items()})

    stages = nn.ModuleList([stage(layers="a"), stage(layers="ab")])
    ((path, layers),) = layer_lists(nn.ModuleDict({"stages": stages}))
    assert path == "stages.*.layers"
    assert layers == [*stages[0]["layers"], *stages[1]["layers"]]
    stages = nn.ModuleList([stage(layers="a"), stage(parts="ab")])
    assert [path for path, _ in layer_lists(nn.ModuleDict({"stages": stages}))] == ["stages"]


def attention(_):
    return nn.ModuleDict({f"{name}_proj": nn.Linear(4, 4) for name in "qkvo"})


def feed_forward(_):
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
