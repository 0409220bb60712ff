"""A skeleton of a module: modules and sizes, without values, and apart from the original."""

from __future__ import annotations

import torch
from torch import nn

import adapterhub as ah
from adapterhub.backbones.meta_model import skeleton
from tests.kit import tiny_models
from tests.kit.own_models import Everything


def test_it_has_the_sizes_and_no_values():
    net = Everything()
    empty = skeleton(net)
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: p.shape for n, p in net.named_parameters()
    }
    assert all(p.is_meta for p in empty.parameters())
    assert not any(p.is_meta for p in net.parameters())
    empty.fc = nn.Identity()
    assert isinstance(net.fc, nn.Linear)


def test_what_is_tied_stays_tied():
    model = tiny_models.model("gpt2", "causal-lm")
    empty = skeleton(model)
    assert type(empty) is type(model)
    assert len(list(empty.parameters())) == len(list(model.parameters()))
    assert empty.get_output_embeddings().weight is empty.get_input_embeddings().weight


def test_adapters_are_left_out():
    net = Everything()
    names = {n for n, _ in net.named_parameters()}
    ah.attach(net, "lora(sites=['conv', 'fc'])")
    assert {n for n, _ in skeleton(net).named_parameters()} == names


class Packed(nn.Module):
    """A projection whose weight is codes, as a quantized one's."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 6, 4
        codes = torch.zeros(12, 1, dtype=torch.uint8)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), None


def test_a_quantized_projection_is_a_plain_one():
    host = skeleton(nn.Sequential(Packed()))[0]
    assert isinstance(host, nn.Linear)
    assert (host.weight.shape, host.bias) == ((4, 6), None)
    assert host.weight.is_meta
