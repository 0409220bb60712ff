"""Projections and their sizes."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.projections import in_features, is_projection, out_features


class Packed(nn.Module):
    """A layer with packed codes in place of a weight, as GPTQ has."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 3, 5
        self.register_buffer("qweight", torch.zeros(2, dtype=torch.int32))


def test_sizes_do_not_depend_on_the_layout_of_the_weight():
    for module in (nn.Linear(3, 5), Conv1D(5, 3), Packed()):
        assert is_projection(module)
        assert (in_features(module), out_features(module)) == (3, 5)


def test_a_bare_weight_is_read_as_input_by_output():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(3, 5))
    assert (in_features(module), out_features(module)) == (3, 5)


def test_other_modules_are_not_projections():
    for module in (nn.LayerNorm(3), nn.Embedding(3, 5), nn.Dropout(), nn.Conv1d(3, 5, 1)):
        assert not is_projection(module)
