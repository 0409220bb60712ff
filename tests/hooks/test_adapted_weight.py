"""Products with an adapted weight: each way of multiplying gives what the changed weight gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  registers grouped_mm_fallback

from adapterhub.anatomy.projections import HeldWeight
from adapterhub.hooks.own_weight import AdaptedWeight

EXPERTS, D_IN, D_OUT = 3, 8, 4
NUMBERS = torch.tensor([2, 0, 2, 1, 1])
ENDS = torch.tensor([1, 3, 5], dtype=torch.int32)


def adapted(transposed, monkeypatch=None):
    """Return a weight whose outputs are doubled and then get x Cᵀ, and the weight it stands for."""
    torch.manual_seed(0)
    shape = (EXPERTS, D_IN, D_OUT) if transposed else (EXPERTS, D_OUT, D_IN)
    tensor, change = torch.randn(shape), torch.randn(EXPERTS, D_OUT, D_IN)

    def apply(x, product, rows):
        return 2 * product(x) + rows.product(x, change)

    weight = AdaptedWeight(tensor, HeldWeight("w", EXPERTS, transposed), apply)
    expected = 2 * tensor + (change.transpose(1, 2) if transposed else change)
    if monkeypatch:
        monkeypatch.setattr(AdaptedWeight, "changed", lambda self: pytest.fail("a changed copy"))
    return weight, expected


@pytest.mark.parametrize("transposed", [False, True])
def test_the_changed_weight(transposed):
    weight, expected = adapted(transposed)
    torch.testing.assert_close(weight.changed(), expected)
    torch.testing.assert_close(weight[1].changed(), expected[1])
    torch.testing.assert_close(weight[NUMBERS].changed(), expected[NUMBERS])
    torch.testing.assert_close(weight.mT.changed(), expected.mT)
    assert (weight.shape, weight.dtype, len(weight)) == (expected.shape, expected.dtype, EXPERTS)


PRODUCTS = {
    "linear": lambda w: F.linear(torch.ones(2, D_IN), w[1]),
    "linear of a cast": lambda w: F.linear(torch.ones(2, D_IN), w[1].type(torch.float32)),
    "batched columns": lambda w: torch.bmm(w[NUMBERS], torch.ones(5, D_IN, 1)),
    "grouped": lambda w: F.grouped_mm(torch.ones(5, D_IN), w.transpose(-2, -1), offs=ENDS),
    "in a loop": lambda w: torch.ops.transformers.grouped_mm_fallback(
        torch.ones(5, D_IN), w.transpose(-2, -1), ENDS
    ),
    "matmul": lambda w: torch.ones(2, D_IN) @ w[2].T,
}
TRANSPOSED_PRODUCTS = {
    "matmul": lambda w: torch.ones(2, D_IN) @ w[1],
    "batched rows": lambda w: torch.bmm(torch.ones(5, 1, D_IN), w[NUMBERS]),
    "all experts": lambda w: torch.bmm(torch.ones(EXPERTS, 2, D_IN), w),
    "linear": lambda w: F.linear(torch.ones(2, D_IN), w[1].mT),
    "grouped": lambda w: F.grouped_mm(torch.ones(5, D_IN), w, offs=ENDS),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, monkeypatch):
    weight, expected = adapted(False, monkeypatch)
    torch.testing.assert_close(PRODUCTS[name](weight), PRODUCTS[name](expected))


@pytest.mark.parametrize("name", TRANSPOSED_PRODUCTS)
def test_products_of_transposed_matrices(name, monkeypatch):
    weight, expected = adapted(True, monkeypatch)
    result = TRANSPOSED_PRODUCTS[name](weight)
    torch.testing.assert_close(result, TRANSPOSED_PRODUCTS[name](expected))


def test_any_other_use_gets_a_changed_copy(subtests):
    cases = [
        lambda w: torch.einsum("eoi,ri->reo", w, torch.ones(2, D_IN)),
        lambda w: w[:2] + 1,
        lambda w: w.sum(),
        lambda w: torch.bmm(w[NUMBERS], torch.ones(5, D_IN, 2)),
        lambda w: w @ torch.ones(D_IN, 2),
        lambda w: torch.cat([w, w]),
        lambda w: w.transpose(0, 1),
        lambda w: torch.addmm(torch.ones(2, D_OUT), torch.ones(2, D_IN), w[1].T),
    ]
    for number, use in enumerate(cases):
        with subtests.test(number=number):
            weight, expected = adapted(False)
            torch.testing.assert_close(use(weight), use(expected))


def test_one_matrix_without_experts():
    tensor, change, bias = torch.randn(3, 2), torch.randn(3, 2), torch.ones(3)
    weight = AdaptedWeight(
        tensor, HeldWeight("weight"), lambda x, product, rows: product(x) + x @ change.T
    )
    x = torch.randn(4, 2)
    torch.testing.assert_close(F.linear(x, weight, bias), F.linear(x, tensor + change, bias))
    torch.testing.assert_close(weight.changed(), tensor + change)
