"""Timing a step of one layer with each dtype and attention implementation."""

from __future__ import annotations

import itertools

import pytest
import torch

from adapterhub.backbones.layer_timing import EAGER, SDPA, Kernels, LayerShape, _Layer, time_kernels

SHAPE = LayerShape(rows=2, tokens=8, width=16, inner=32, heads=2)
ALL = [Kernels(d, a) for d, a in itertools.product(("fp32", "bf16"), (SDPA, EAGER))]


def test_every_candidate_is_timed() -> None:
    times = time_kernels(SHAPE, ALL)
    assert list(times) == ALL
    assert all(seconds > 0 for seconds in times.values())


def test_the_candidates_compute_the_same() -> None:
    outputs = {kernels: _Layer(SHAPE, kernels)._forward().float() for kernels in ALL}
    exact = outputs[Kernels("fp32", SDPA)]
    for kernels, output in outputs.items():
        tolerance = 1e-5 if kernels.dtype == "fp32" else 2e-2
        torch.testing.assert_close(output, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [64, 384, 1024, 4096, 12288])
@pytest.mark.parametrize("rows", [1, 32, 512])
def test_a_large_layer_is_scaled_down(width: int, rows: int) -> None:
    shape = LayerShape(rows, 128, width, 4 * width, width // 64)
    measured = shape.measured()
    assert measured.width <= 1024 or measured.heads % 2
    assert measured.work <= 7e9
    assert (measured.tokens, measured.width // measured.heads) == (128, 64)
