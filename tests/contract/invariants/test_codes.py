"""Backbones with codes for weights: packed projections (GPTQ, AWQ), and FP8, decoded or not."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones import weights
from adapterhub.errors import BackboneError, ConfigError, MergeError, SiteError
from adapterhub.methods import METHODS
from tests.kit import own_models, tiny_models
from tests.kit.matrix import REFUSED, example, reading_weights, train_save_and_load
from tests.kit.selection import long_table

GROUP = 16
TRAIN_WEIGHTS = {"full", "freeze", "unfreeze", "staged"}


READ_WEIGHTS = reading_weights() - TRAIN_WEIGHTS
CELLS = [
    (m, a)
    for m in sorted(METHODS)
    for a in ("bert", "llama", "t5")
    if (m, a) not in REFUSED and (tiny_models.FULL_MATRIX or a == "bert" or m == "lora")
]
SUPPORTED = [cell for cell in CELLS if cell[0] not in READ_WEIGHTS | TRAIN_WEIGHTS]
UNSUPPORTED = [cell for cell in CELLS if cell not in SUPPORTED]


class PackedLinear(nn.Module):
    """A linear layer with two 4-bit codes per byte, and a scale and zero point per group."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        groups = linear.weight.detach().unflatten(1, (-1, GROUP))
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scales = (high - low) / 15
        codes = ((groups - low) / scales).round().to(torch.uint8).flatten(1)
        self.register_buffer("qweight", (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous())
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", low)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x):
        codes = torch.stack([self.qweight >> 4, self.qweight & 15], 2).flatten(1)
        weight = codes.unflatten(1, (-1, GROUP)) * self.scales + self.zeros
        return nn.functional.linear(x, weight.flatten(1).to(x.dtype), self.bias)


def packed_model(architecture, folder, seed=0):
    """Build a model with packed projections, and save it as a quantized checkpoint."""
    model = tiny_models.model(architecture, seed=seed)
    for host in {s.host for s in anatomy_of(model).sites.values() if s.kind == "linear"}:
        if host.endswith(".wo"):  # transformers reads this weight of T5, and never quantizes it
            continue
        parent, _, name = host.rpartition(".")
        setattr(model.get_submodule(parent), name, PackedLinear(model.get_submodule(host)))
    folder.mkdir(exist_ok=True)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model.config.quantization_config = config["quantization_config"]
    model.config._name_or_path = str(folder)
    return model.requires_grad_(False)


@long_table(("method", "architecture"), SUPPORTED, parts=10, nightly=4)
def test_methods_that_only_call_their_hosts_train(method, architecture, tmp_path):
    model = packed_model(architecture, tmp_path / "base")
    backbone = train_save_and_load(model, method, tmp_path / "adapter", steps=10).backbone
    assert backbone.fingerprint == ah.fingerprint(tmp_path / "base")
    assert backbone.quantization == "gptq"


@long_table(("method", "architecture"), UNSUPPORTED, 6, nightly=2)
def test_methods_that_need_weights_are_refused(method, architecture, tmp_path):
    model = packed_model(architecture, tmp_path / "base")
    with pytest.raises(SiteError) as error:
        ah.attach(model, example(method))
    message = str(error.value)
    assert ("cannot be read" if method in READ_WEIGHTS else "packed") in message
    assert "lora" in error.value.hint
    assert not any(CHILD in name for name, _ in model.named_modules())


def test_merging_into_packed_weights_is_refused(tmp_path):
    model = packed_model("bert", tmp_path / "base")
    tiny_models.scramble(ah.attach(model, "lora"))
    for requantize in (False, True):
        with pytest.raises(MergeError, match="not stored as one parameter") as error:
            ah.merge(model, requantize=requantize)
    assert "--base-dtype" in error.value.hint


def test_the_fingerprint_is_that_of_the_checkpoint_files(tmp_path):
    """The fingerprint covers the packed codes, not just norms and embeddings."""
    model, other = packed_model("bert", tmp_path / "a"), packed_model("bert", tmp_path / "b")
    assert anatomy_of(model).packed_hosts()
    host = other.get_submodule(anatomy_of(other).packed_hosts()[0])
    host.qweight.bitwise_not_()
    save_file(dict(other.state_dict()), tmp_path / "b" / "model.safetensors")
    fingerprints = {ah.attach(m, "lora").manifest().backbone.fingerprint for m in (model, other)}
    assert fingerprints == {ah.fingerprint(tmp_path / name) for name in "ab"}
    assert len(fingerprints) == 2
    ah.detach(model)
    model.config._name_or_path = "moved-away"
    with pytest.raises(BackboneError, match="quantized"):
        ah.attach(model, "lora").manifest()


METHOD_NAMES = [m for m in sorted(METHODS) if (m, "llama") not in REFUSED and m != "head"]


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


@long_table("method", [m for m in METHOD_NAMES if m not in TRAIN_WEIGHTS], parts=10, nightly=4)
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
