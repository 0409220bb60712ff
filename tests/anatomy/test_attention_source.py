"""How modules attend, read from the source of their forward."""

from __future__ import annotations

import every_type
import torch
import torch.nn.functional as F
from torch import nn

from adapterhub.anatomy.projections import attends


class OneOfTwo(nn.Module):
    """One softmax on each path."""

    def forward(self, q, k, v, fused=False):
        if fused:
            return F.scaled_dot_product_attention(q, k, v)
        return F.softmax(q @ k, dim=-1) @ v


class OneInEachBranch(nn.Module):
    def forward(self, q, k, v, bias=None):
        if bias is None:
            weights = torch.softmax(torch.matmul(q, k), -1)
        else:
            weights = nn.Softmax(dim=-1)(torch.matmul(q, k) + bias)
        return torch.matmul(weights, v)


class InItsMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalize = nn.Softmax(dim=-1)

    def forward(self, q, k, v):
        return self.weighed(q, k).matmul(v)

    def weighed(self, q, k):
        return self.normalize(q.matmul(k))


class TwoBehindEachOther(nn.Module):
    def forward(self, q, k, v):
        if q.ndim == 3:
            q = F.softmax(q, -1)
        return F.softmax(q @ k, -1) @ v


class InALoop(nn.Module):
    def forward(self, q, k, v):
        for _ in range(2):
            q = F.softmax(q @ k, -1) @ v
        return q


class ByEinsum(nn.Module):
    def forward(self, q, k, v):
        scores = torch.einsum("qd,kd->qk", q, k)
        return torch.einsum("qk,kd->qd", F.softmax(scores, -1), v)


class NoSoftmax(nn.Module):
    def forward(self, q, k, v):
        return (q @ k) @ v


def test_one_softmax_of_products_on_each_path(subtests):
    cases = [
        (OneOfTwo(), "torch"),
        (OneInEachBranch(), "torch"),
        (InItsMethods(), "torch"),
        (TwoBehindEachOther(), None),
        (InALoop(), None),
        (ByEinsum(), None),
        (NoSoftmax(), None),
        (nn.Linear(2, 2), None),
    ]
    for module, found in cases:
        with subtests.test(module=module):
            assert attends(module) == found


def test_attention_of_transformers(subtests):
    cases = [
        ("llama", "layers.0.self_attn", "interface"),
        ("bert", "encoder.layer.0.attention.self", "interface"),
        ("falcon", "h.0.self_attention", "torch"),
        ("bloom", "h.0.self_attention", "torch"),
        ("deberta-v2", "encoder.layer.0.attention.self", "torch"),
        ("codegen", "h.0.attn", "torch"),
        ("convbert", "encoder.layer.0.attention.self", None),
        ("longformer", "encoder.layer.0.attention.self", None),
        ("nystromformer", "encoder.layer.0.attention.self", None),
        ("llama", "layers.0.mlp", None),
    ]
    for model_type, path, found in cases:
        with subtests.test(model_type=model_type):
            model = every_type.build(model_type, "AutoModel", tiny=True)
            assert attends(model.get_submodule(path)) == found
