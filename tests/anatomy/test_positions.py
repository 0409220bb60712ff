"""The modules that accept token positions, or count them."""

from __future__ import annotations

import pytest
from torch import nn

from adapterhub.anatomy.backbone import padding_table, position_module
from tests.kit import tiny_models


def root_of(architecture):
    model = tiny_models.usual_model(architecture)
    return model.base_model


@pytest.mark.parametrize("architecture", ["bert", "llama", "gpt2"])
def test_a_stack_that_takes_position_ids(architecture):
    root = root_of(architecture)
    assert position_module(root) is root


def test_a_table_of_positions_that_takes_them():
    encoder = root_of("bart").encoder
    assert position_module(encoder) is encoder.embed_positions


def test_a_stack_without_position_inputs():
    assert position_module(root_of("t5").encoder) is None
    assert position_module(nn.Linear(1, 1)) is None


def test_a_table_that_counts_from_padding():
    encoder = root_of("m2m_100").encoder
    assert padding_table(encoder) is encoder.embed_positions
    for architecture in ("bart", "roberta", "llama"):
        assert not any(map(padding_table, root_of(architecture).modules()))
