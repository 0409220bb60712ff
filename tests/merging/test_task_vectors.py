"""Rules for task vectors, by hand on small vectors; the contract suite compares them with peft."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.merging.combine import RULES, Cut, combine_vectors, cut_product, low_rank, trim

A = torch.tensor([3.0, -1.0, 0.5, -4.0])
B = torch.tensor([1.0, 2.0, -0.5, -2.0])


def combined(how, weights=(1.0, 1.0), density=1.0, seed=0):
    return combine_vectors(how, [A, B], weights, density, torch.Generator().manual_seed(seed))


def test_rules_by_hand():
    assert torch.equal(combined("linear", (2.0, -1.0)), 2 * A - B)
    assert torch.equal(trim(A, 0.5), torch.tensor([3.0, 0.0, 0.0, -4.0]))
    # Signs of the sums: +, +, + (a sum of 0 counts as positive), -.
    assert torch.equal(combined("ties"), torch.tensor([2.0, 2.0, 0.5, -3.0]))
    for how in RULES:
        first, again = (combined(how, density=0.5, seed=3) for _ in range(2))
        assert torch.equal(first, again)


def test_dare_keeps_the_expected_value():
    mean = sum(combined("dare", density=0.5, seed=seed) for seed in range(2000)) / 2000
    torch.testing.assert_close(mean, A + B, atol=0.3, rtol=0)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 100))
def test_low_rank_is_exact_at_full_rank(rows, columns, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    left, right = low_rank(matrix, Cut(min(rows, columns)))
    torch.testing.assert_close(left @ right, matrix, atol=1e-5, rtol=1e-4)


def test_of_a_large_matrix_few_components_are_found_nearly_as_near():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 640, generator=generator)
    state = torch.random.get_rng_state()
    left, right = low_rank(matrix, Cut(16))
    assert torch.equal(torch.random.get_rng_state(), state)
    values = torch.linalg.svdvals(matrix)
    nearest = values[16:].square().sum().sqrt()
    assert nearest <= (matrix - left @ right).norm() < 1.002 * nearest
    assert all(map(torch.equal, low_rank(matrix, Cut(16)), (left, right)))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_a_product_is_cut_as_its_matrix_is(rows, columns, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape, generator=generator).double()
                   for shape in ((rows, rank), (rank, columns)))  # fmt: skip
    product = left @ right
    for cut in (Cut(2), Cut(energy=0.9), Cut(3, 0.99)):
        b, a, lost = cut_product(left, right, cut)
        expected = low_rank(product, cut)
        torch.testing.assert_close(b @ a, expected[0] @ expected[1], atol=1e-6, rtol=1e-5)
        assert len(a) <= (cut.rank or 9)
        assert abs(lost - (product - b @ a).norm() / product.norm()) < 1e-6
        if cut.rank is None:
            assert lost**2 <= 1 - cut.energy + 1e-9


@pytest.mark.parametrize("cut", [Cut(100, 1.0), Cut(energy=1.0), Cut(100)])
@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (520, 600)])
def test_a_rank_above_that_of_the_matrix_ends(cut, shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, right = low_rank(matrix, cut)
    assert len(right) == min(cut.rank or 1000, *shape)
    if len(right) == min(shape):
        torch.testing.assert_close(left @ right, matrix, atol=1e-4, rtol=1e-4)


def test_of_a_large_matrix_so_many_components_are_found_as_have_the_energy():
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(700, 90, generator=generator), torch.randn(90, 600, generator=generator)
    matrix = factors[0] @ factors[1]
    left, right = low_rank(matrix, Cut(energy=0.99))
    values = torch.linalg.svdvals(matrix).square()
    assert len(right) == int((values.cumsum(0) < 0.99 * values.sum()).sum()) + 1
    assert (matrix - left @ right).square().sum() <= 0.0101 * matrix.square().sum()
