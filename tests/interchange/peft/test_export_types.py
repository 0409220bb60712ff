"""Parts of a checkpoint are added up; targets are named exactly."""

from __future__ import annotations

import torch

from adapterhub.anatomy.build import anatomy_of
from adapterhub.interchange.peft.export_types import (
    CheckpointPart,
    ExportSource,
    exact_names,
    target_options,
)
from tests.kit import tiny_models


def test_parts_are_added_up():
    first = CheckpointPart({"r": 8}, {"a": torch.zeros(1)}, ["query"], ["one"])
    second = CheckpointPart({"bias": "all"}, {"b": torch.ones(1)}, ["value"], ["two"])
    total = first + second
    assert total.config == {"r": 8, "bias": "all"}
    assert total.tensors.keys() == {"a", "b"}
    assert (total.targets, total.problems) == (["query", "value"], ["one", "two"])
    assert first.config == {"r": 8}
    assert first + CheckpointPart() == first


def test_names_are_short_where_they_match_exactly():
    modules = dict.fromkeys(("layer.0.query", "layer.1.query", "layer.0.value"))
    both = ["layer.0.query", "layer.1.query"]
    assert exact_names(both, modules) == ["query"]
    assert exact_names(both[:1], modules) == both[:1]
    assert exact_names([*both, "layer.0.value"], modules) == ["query", "value"]


def test_transposed_weights_are_marked():
    for architecture, name, transposed in (("gpt2", "c_attn", True), ("bert", "query", False)):
        model = tiny_models.model(architecture)
        source = ExportSource(anatomy_of(model), [], [], {})
        paths = [path for path in source.modules if path.endswith(f".{name}")]
        options = target_options(source, paths)
        assert options == {"target_modules": [name], "fan_in_fan_out": transposed}
