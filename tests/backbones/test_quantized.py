"""Quantized backbones: what is decoded, trained on and refused, and how layers are tried."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.anatomy.backbone import quantization_kind
from adapterhub.backbones import quantized
from adapterhub.backbones.checkpoint import stored_quantization
from adapterhub.backbones.torch_free_checks import QUANTIZATION_LIBRARIES
from adapterhub.errors import AttachError, BackboneError, ConfigError
from adapterhub.patch import Patch
from tests.kit import own_models, tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.own_models import float8_layer

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def torchao(name):
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name}}}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: True)


def checkpoint(folder, config):
    text = json.dumps({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (NF4, "nf4"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({}, "unknown"),
        (torchao("Int8WeightOnlyConfig"), "int8-weight"),
        (torchao("Float8WeightOnlyConfig"), "fp8-weight"),
        (torchao("Float8Config"), "torchao-Float8Config"),
    ],
)
def test_a_configuration_has_a_kind(config, kind):
    assert quantization_kind(config) == kind


def test_the_kind_of_each_scheme_is_its_own_name():
    pytest.importorskip("bitsandbytes")
    for name in ("nf4", "fp4", "int8"):
        config = quantized.QUANTIZATIONS[name].config(torch.bfloat16, ["head"])
        assert quantization_kind(config.to_dict()) == name
        assert config.llm_int8_skip_modules == ["head"]


def test_a_checkpoint_is_quantized_if_it_is_not_as_requested_already(installed, tmp_path):
    for folder in (tmp_path, checkpoint(tmp_path, None)):
        assert stored_quantization(folder) is None
        assert quantized.remaining_quantization("nf4", folder) == "nf4"
        assert quantized.remaining_quantization(None, folder) is None
    options = {"dtype": torch.float32, "num_labels": 2}
    assert quantized.loading_options(None, checkpoint(tmp_path, None), options, None) is options
    folder = checkpoint(tmp_path, NF4)
    assert stored_quantization(folder) == "bitsandbytes"
    assert quantized.remaining_quantization("nf4", folder) is None
    assert quantized.remaining_quantization(None, folder) is None


@pytest.mark.parametrize(("requested", "config", "said"), [
    ("int8", NF4, "quantized already, by bitsandbytes"),
    ("dequantize", None, "is not quantized"),
    ("dequantize", {"quant_method": "gptq"}, "is quantized by gptq"),
    *(("dequantize", {"quant_method": m}, "") for m in ("fp8", "mxfp4", "compressed-tensors")),
])  # fmt: skip
def test_another_quantization_or_what_transformers_cannot_decode_is_refused(
    requested, config, said, installed, tmp_path
):
    folder = checkpoint(tmp_path, config)
    if not said:
        assert quantized.remaining_quantization(requested, folder) == requested
        return
    with pytest.raises(ConfigError, match=said) as error:
        quantized.remaining_quantization(requested, folder)
    assert requested != "dequantize" or "fp8, mxfp4" in error.value.expected


@pytest.mark.parametrize("kind", quantized.QUANTIZATIONS)
def test_a_library_that_is_not_installed_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    library, extra = QUANTIZATION_LIBRARIES[kind]
    with pytest.raises(ConfigError, match=f"needs {library}") as error:
        quantized.remaining_quantization(kind, tmp_path)
    assert error.value.hint == f'pip install "adapterhub[{extra}]"'


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


@pytest.mark.parametrize(("dtype", "quantize"), [("fp32", "dequantize"), ("bf16", None)])
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


class FourBit(nn.Linear):
    """A layer that may repack its weight, unless told otherwise."""

    def __init__(self, packed):
        super().__init__(4, 4)
        self.weight.quant_state = SimpleNamespace(packing_format_for_cpu=packed)
        self.support_avx512bf16_for_cpu = True
        self.unpacked = False

    def state_dict(self, *args, **options):
        self.unpacked = True
        return super().state_dict(*args, **options)


def test_only_layers_that_can_repack_are_changed_and_restored():
    eight_bit = nn.Linear(4, 4)
    eight_bit.weight.SCB = torch.ones(4)  # one scale per row
    model = nn.Sequential(FourBit(packed=True), eight_bit, FourBit(packed=False), nn.Linear(4, 4))
    quantized.keep_4bit_layout(model, patch := Patch())
    assert len(patch.undoing) == 2
    assert [model[0].unpacked, model[2].unpacked] == [True, False]
    patch.undo()
    for _ in range(2):
        quantized.prepare_quantized(model, patch)
        assert not model[0].support_avx512bf16_for_cpu
        assert len(model[1]._forward_hooks) == 1
        made = len(patch.undoing)
        quantized.prepare_quantized(model, patch)
        assert len(patch.undoing) == made, "a second call changes nothing"
        patch.undo()
        assert model[0].support_avx512bf16_for_cpu
        assert not model[1]._forward_hooks


@pytest.mark.parametrize("block", [(16, 8), (16, 16), (7, 5), (48, 32)])
def test_blocks_of_fp8_are_scaled_by_their_scale(block):
    """Also blocks that do not divide the matrix."""
    linear = nn.Linear(30, 44)
    with torch.no_grad():
        linear.weight[:20].mul_(100)  # other scales
    found = quantized.dequantized(float8_layer(linear, block))
    assert found.shape == linear.weight.shape
    assert ((found - linear.weight).abs() <= 0.07 * linear.weight.abs() + 1e-4).all()
    assert not quantized.can_requantize(float8_layer(linear, block))


class Own(nn.Linear):
    """A linear layer with a factor, a rounding of its inputs, and a cut."""

    def __init__(self, factor: float = 1.0, levels: float = 0.0, cut: bool = False) -> None:
        super().__init__(16, 24)
        self.factor, self.levels, self.cut = factor, levels, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.levels:
            x = (x * self.levels).round() / self.levels
        return F.linear(x.detach() if self.cut else x, self.factor * self.weight, self.bias)


class Many(nn.Linear):
    """A layer that returns a tuple."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@pytest.mark.parametrize(("layer", "computes", "blocks"), [
    (Own(), True, False),
    (Own(levels=16.0), True, True),  # 8 bits of activations; the gradient of a rounding is zero
    (Own(levels=1.0), False, True),
    (Own(cut=True), True, True),
    (Own(factor=1.2), False, False),
    (Own(factor=float("nan")), False, False),
    (Many(16, 24), False, False),
])  # fmt: skip
def test_a_layer_computes_with_its_weight_and_passes_gradients(layer, computes, blocks):
    assert quantized.computes_with(layer, layer.weight, torch.float32) is computes
    assert not quantized.computes_with(layer, torch.randn(24, 8), torch.float32)
    layer.requires_grad_(False)
    with torch.no_grad():
        assert quantized.blocks_gradients(layer, 16, layer.weight) is blocks


def test_hooks_are_not_called_and_random_numbers_are_not_drawn():
    layer = Own()
    layer.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    before = torch.get_rng_state()
    assert quantized.computes_with(layer, layer.weight, torch.float32)
    assert not quantized.blocks_gradients(layer, 16, layer.weight)
    assert torch.equal(before, torch.get_rng_state())


class NoBackward(torch.autograd.Function):
    """A product whose kernel has no backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kernel_without_a_backward_pass_is_found(is_there):
    """A layer without a kernel here is left to the model."""
    layer = nn.Linear(16, 24)
    kernel = NoBackward.apply if is_there else lambda *each: torch.ops.not_there.kernel(*each)
    layer.forward = lambda x: kernel(x, layer.weight)
    assert not quantized.computes_with(layer, layer.weight, torch.float32)  # the bias is missing
    assert quantized.blocks_gradients(layer, 16, layer.weight) == is_there
