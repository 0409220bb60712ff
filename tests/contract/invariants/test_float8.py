"""Checkpoints in FP8: with the layers that a GPU has, and decoded as on a CPU."""

from __future__ import annotations

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.backbones import weights
from adapterhub.errors import ConfigError, MergeError, SiteError
from adapterhub.methods import METHODS
from tests.kit import own_models, tiny_models
from tests.kit.matrix import REFUSED, example
from tests.kit.selection import long_table

METHOD_NAMES = [m for m in sorted(METHODS) if (m, "llama") not in REFUSED and m != "head"]
TRAIN_WEIGHTS = {"full", "freeze", "unfreeze", "staged"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8") / "llama"
    return own_models.save_checkpoint(tiny_models.model("llama", "causal-lm"), folder)


@pytest.fixture
def coded(checkpoint, monkeypatch):
    own_models.float8_kernel(monkeypatch)
    return own_models.float8_model(checkpoint)


def decoded(checkpoint, dtype="fp32", **options):
    return ah.load_backbone(str(checkpoint), task="causal-lm", dtype=dtype, **options)[0]


def passed(model):
    """Return the outputs, and the gradients of what is trained."""
    (adapter,) = ah.adapters(model).values()
    outputs = model(**tiny_models.batch()).logits
    trained = {name: t for name, t in adapter.tensors().items() if t.requires_grad}
    gradients = torch.autograd.grad(outputs.square().mean(), [*trained.values()])
    return outputs, dict(zip(trained, gradients, strict=True))


def test_the_layers_compute_with_the_decoded_weights(coded, checkpoint, monkeypatch):
    """They are not tried in a forward pass."""
    plain, batch = decoded(checkpoint), tiny_models.batch()
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    torch.testing.assert_close(coded(**batch).logits, plain(**batch).logits)
    ah.attach(coded, "dora")
    monkeypatch.setattr(weights, "computes_with", None)
    coded(**batch)


@long_table("method", [m for m in METHOD_NAMES if m not in TRAIN_WEIGHTS], parts=3)
def test_an_adapter_is_the_same_on_codes_and_on_decoded_weights(
    method, coded, checkpoint, tmp_path
):
    bare = coded(**tiny_models.batch()).logits
    torch.manual_seed(0)
    adapter = ah.attach(coded, example(method))
    tiny_models.scramble(adapter)
    outputs, gradients = passed(coded)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    manifest = adapter.save(tmp_path / "a")
    assert manifest.backbone.quantization == "fp8"
    ah.detach(coded)
    assert torch.equal(coded(**tiny_models.batch()).logits, bare)
    plain = decoded(checkpoint)
    ah.load(plain, tmp_path / "a")
    found, others = passed(plain)
    torch.testing.assert_close(found, outputs, atol=2e-4, rtol=2e-4)
    if method in ("p-tuning", "adapterplus", "cpt"):  # a file has another form of it
        return
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("method", sorted(TRAIN_WEIGHTS))
def test_codes_are_not_trained_and_decoded_weights_are(method, coded, checkpoint):
    with pytest.raises(SiteError, match="stored as float8_e4m3fn"):
        ah.attach(coded, example(method))
    assert ah.attach(decoded(checkpoint), example(method)).parameters()


def test_a_decoded_model_is_saved_as_a_plain_one(checkpoint, tmp_path):
    model = decoded(checkpoint, "bf16")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="plain is not quantized"):
        decoded(tmp_path / "plain", quantize="dequantize")
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))
    logits = model(**tiny_models.batch()).logits
    assert torch.equal(plain.eval()(**tiny_models.batch()).logits, logits)


def test_merging_needs_decoded_weights(coded, checkpoint):
    ah.attach(coded, "lora")
    with pytest.raises(MergeError, match="stored as float8_e4m3fn"):
        ah.merge(coded)
    plain = decoded(checkpoint)
    tiny_models.scramble(ah.attach(plain, "lora"))
    before = plain(**tiny_models.batch()).logits
    ah.merge(plain)
    torch.testing.assert_close(plain(**tiny_models.batch()).logits, before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", None])
def test_a_decoded_checkpoint_has_one_dtype(dtype, checkpoint):
    expected = {"fp32": torch.float32, "fp16": torch.float16}.get(dtype, torch.bfloat16)
    for quantize in (None, "dequantize"):
        model = decoded(checkpoint, dtype, quantize=quantize)
        assert {p.dtype for p in model.parameters()} == {expected}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert getattr(model.config, "quantization_config", None) is None
        assert model(**tiny_models.batch()).logits.isfinite().all()


def test_all_ways_to_load_it_have_the_fingerprint_of_the_files(coded, checkpoint):
    models = [coded, decoded(checkpoint), decoded(checkpoint, "bf16", quantize="dequantize")]
    prints = {ah.attach(model, "lora").manifest().backbone.fingerprint for model in models}
    assert prints == {ah.fingerprint(checkpoint)}
