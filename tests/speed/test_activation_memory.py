"""Activation memory, extrapolated from small batches, is that of a larger batch."""

import pytest
import torch

import adapterhub as ah
from adapterhub.speed.activation_memory import (
    LOGIT_BYTES,
    LONGEST,
    activation_bytes,
    evaluation_bytes,
    logit_bytes,
    saved_bytes,
)
from tests.kit import tiny_models
from tests.kit.matrix import example

CELLS = [
    ("bert", "lora"), ("bert", "mam"), ("bert", "norms"), ("llama", "houlsby"), ("llama", "prefix"),
    ("gpt2", "ia3"), ("t5", "lora"), ("deberta-v2", "pfeiffer"), ("modernbert", "lora"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "architecture"), [(m, a) for a, m in CELLS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prediction_is_what_a_larger_batch_keeps(method, architecture, dtype):
    model = tiny_models.model(architecture).to(dtype)
    adapter = ah.attach(model, example(method))
    rows, tokens = 5, 2 * LONGEST
    modes = [module.training for module in model.modules()]
    predicted = activation_bytes(adapter, rows, tokens)
    assert [module.training for module in model.modules()] == modes
    adapter.train_mode()
    assert predicted == pytest.approx(saved_bytes(adapter, rows, tokens), rel=0.05)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_short_rows(tokens):
    adapter = ah.attach(tiny_models.model("bert"), "lora")
    predicted = activation_bytes(adapter, 3, tokens)
    adapter.train_mode()
    assert predicted == pytest.approx(saved_bytes(adapter, 3, tokens), rel=0.05)


def test_gradient_checkpointing_keeps_inputs_and_one_layer():
    adapter = ah.attach(tiny_models.model("bert", num_hidden_layers=4), "lora")
    whole, less = (activation_bytes(adapter, 4, 48, on) for on in (False, True))
    adapter.train_mode()
    inputs = saved_bytes(adapter, 4, 48, recomputed=True)
    assert 4 * 4 * 48 * 32 * 4 <= inputs < whole / 4  # layers, rows, tokens, width, bytes
    assert less == pytest.approx(inputs + (whole - inputs) / 4, rel=0.05)
    offloaded = activation_bytes(adapter, 4, 48, True, True)
    assert less - offloaded == pytest.approx(inputs * 3 / 4, rel=0.05)


def test_logits_are_counted_apart():
    model = tiny_models.model("llama", "causal-lm")
    adapter = ah.attach(model, "lora")
    predicted = activation_bytes(adapter, 4, 32)
    assert logit_bytes(adapter, 4 * 32) == LOGIT_BYTES * 4 * 32 * tiny_models.VOCAB
    adapter.train_mode()
    assert predicted == pytest.approx(saved_bytes(adapter, 4, 32), rel=0.05)


def test_random_numbers_are_left_alone():
    adapter = ah.attach(tiny_models.model("bert"), "lora(dropout=0.5)")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    activation_bytes(adapter, 4, 32)
    assert torch.equal(torch.rand(3), expected)


def test_an_evaluation_takes_one_layer_at_a_time():
    adapter = ah.attach(tiny_models.model("bert", num_hidden_layers=4), "lora")
    assert logit_bytes(adapter, 5 * 24) == 0
    whole = activation_bytes(adapter, 5, 24)
    assert evaluation_bytes(adapter, 5, 24) == pytest.approx(whole / 4, rel=0.01)
