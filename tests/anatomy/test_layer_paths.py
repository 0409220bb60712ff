"""Paths of a row: lists of layers, and modules in a layer."""

from __future__ import annotations

from torch import nn

from adapterhub.anatomy.backbone import first_existing, has_path, layer_paths


def test_layers_of_nested_lists_are_numbered_across_them():
    base = nn.Module()
    base.groups = nn.ModuleList([nn.Module(), nn.Module()])
    for group in base.groups:
        group.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert layer_paths(base, "groups.*.layers") == [
        "groups.0.layers.0", "groups.0.layers.1", "groups.1.layers.0", "groups.1.layers.1"
    ]  # fmt: skip
    assert layer_paths(base, "encoder.layers") == []


def test_the_first_path_that_exists_is_taken():
    layer = nn.ModuleDict({"up": nn.Linear(1, 1), "down": nn.Linear(1, 1)})
    assert first_existing(layer, "gate|up|down") == "up"
    assert first_existing(layer, "gate") is None
    assert has_path(layer, "up>down")
    assert not has_path(layer, "up>gate")
