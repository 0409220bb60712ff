"""MAM: the composition of a prefix and a scaled parallel adapter, nothing more."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from tests.kit import tiny_models

PARTS = ["prefix(length=3)", "scaled-parallel(size=4, scale=2)"]


def test_outputs_equal_those_of_its_two_methods():
    logits = []
    for method in ("mam(length=3, size=4, scale=2)", PARTS):
        model = tiny_models.model("bert")
        torch.manual_seed(0)
        adapter = ah.attach(model, method)
        tiny_models.scramble(adapter)
        with torch.no_grad():
            logits.append((set(adapter.tensors()), model(**tiny_models.batch()).logits))
    (names, outputs), (expected_names, expected) = logits
    assert names == expected_names
    assert torch.equal(outputs, expected)


def test_the_count_is_the_sum_of_both():
    adapter = ah.attach(tiny_models.model("bert"), "mam(length=3, size=4)")
    prefix, bottleneck = 2 * 3 * 32, 4 * (32 + 1) + 32 * (4 + 1)
    assert adapter.count() == 2 * (prefix + bottleneck)
    assert adapter.count() == sum(m.count(adapter.anatomy) for m in adapter.methods)


@pytest.mark.parametrize("option", ["length", "size"])
def test_a_size_of_zero_is_refused(option):
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), f"mam({option}=0)")
    assert option in str(error.value)
