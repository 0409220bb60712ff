"""Checkpoints that are decoded as they are loaded, and those that cannot be trained on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.backbones.quantized import remaining_quantization
from adapterhub.errors import AttachError, BackboneError, ConfigError
from tests.kit import own_models, tiny_models
from tests.kit.data import word_tokenizer

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def four_bit_experts(folder):
    """Save a tiny gpt-oss with its experts in MXFP4: 32 values of 4 bits share an exponent."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=tiny_models.VOCAB, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=16,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    word_tokenizer("<s>", "").save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(EXPERTS):
            experts, rows, columns = tensor.shape
            size = experts, columns, rows // 32
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, size, dtype=torch.uint8)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("quantize", [None, "dequantize"])
def test_experts_in_mxfp4_train_when_they_are_decoded(dtype, quantize, tmp_path):
    folder = four_bit_experts(tmp_path / "gpt-oss")
    options = {"task": "causal-lm", "dtype": dtype, "quantize": quantize}
    model, _ = ah.load_backbone(str(folder), **options)
    assert len({p.dtype for p in model.parameters()}) == 1
    adapter = ah.attach(model, {"lora": {"sites": ["attn.q", "ffn.experts.*"]}})
    tiny_models.scramble(adapter)
    logits = model(**tiny_models.batch()).logits
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())
    manifest = adapter.save(tmp_path / "a")
    assert (manifest.backbone.fingerprint, manifest.backbone.quantization) == (
        ah.fingerprint(folder), None)  # fmt: skip
    other, _ = ah.load_backbone(str(folder), **options)
    ah.load(other, tmp_path / "a")
    assert torch.equal(other(**tiny_models.batch()).logits, logits)


def test_a_decoded_model_that_was_changed_is_not_that_of_the_files(tmp_path):
    """Codes are not compared with decoded values; all other tensors are."""
    folder = own_models.save_checkpoint(tiny_models.model("llama", "causal-lm"), tmp_path / "a")
    model, _ = ah.load_backbone(str(folder), task="causal-lm")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert ah.attach(model, "lora").manifest().backbone.fingerprint != ah.fingerprint(folder)


@pytest.mark.parametrize(("method", "said"), [
    (None, "plain is not quantized"),
    ("gptq", "plain is quantized by gptq"),
    ("fp8", ""), ("mxfp4", ""), ("compressed-tensors", ""),
])  # fmt: skip
def test_what_transformers_cannot_decode_is_refused(method, said, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    config = {"quantization_config": {"quant_method": method}} if method else {}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if not said:
        assert remaining_quantization("dequantize", folder) == "dequantize"
        return
    with pytest.raises(ConfigError, match=said) as error:
        remaining_quantization("dequantize", folder)
    assert "fp8, mxfp4" in error.value.expected


def quantized_by(method, tmp_path):
    folder = own_models.save_checkpoint(tiny_models.model("llama", "causal-lm"), tmp_path / "coded")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def test_an_unknown_quantization_is_refused_and_not_read_as_weights(tmp_path):
    """transformers warns, and loads the codes of the checkpoint as values."""
    folder = quantized_by("of-next-year", tmp_path)
    with pytest.raises(ConfigError, match=r"of-next-year, which transformers .* cannot load"):
        ah.load_backbone(folder, task="causal-lm")


@pytest.mark.parametrize("method", ["aqlm", "vptq", "quanto"])
def test_a_missing_library_is_named(method, tmp_path):
    with pytest.raises(BackboneError, match=f"(?i){method}.*pip install"):
        ah.load_backbone(quantized_by(method, tmp_path), task="causal-lm")


@pytest.mark.parametrize("kind", ["mxfp4", "vptq"])
def test_kernels_without_gradients_are_refused(kind):
    model = tiny_models.model("llama", "causal-lm")
    model.hf_quantizer = SimpleNamespace(is_trainable=True)
    model.config.quantization_config = {"quant_method": kind}
    ah.attach(model, "lora").detach()
    model.hf_quantizer = SimpleNamespace(is_trainable=False)
    with pytest.raises(AttachError, match=f"layers in {kind}") as error:
        ah.attach(model, "lora")
    assert ("dequantize" in error.value.hint) == (kind == "mxfp4")


def test_a_layer_that_cuts_gradients_is_refused():
    """compressed-tensors rounds activations so, while transformers says that it trains."""
    model = tiny_models.model("llama", "causal-lm")
    layer = model.model.layers[1].self_attn.k_proj
    layer.forward = lambda x: torch.nn.functional.linear(x.detach(), layer.weight)
    model.requires_grad_(False)
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    for method in ("lora", "norms"):
        with pytest.raises(AttachError, match="no gradient passes") as error:
            ah.attach(model, method)
        assert error.value.offenders == ("model.layers.1.self_attn.k_proj",)
        assert "dequantize" in error.value.hint
    del layer.forward
    ah.attach(model, "lora")
