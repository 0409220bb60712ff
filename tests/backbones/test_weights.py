"""Weights of projections, however they are stored; models without values, and stand-ins."""

import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.backbones.meta_model import skeleton, stand_in
from adapterhub.backbones.weights import as_stored, read_bias, read_weight
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.own_models import Everything, float8_kernel
from tests.kit.tiny_adapters import PROJECTIONS


@pytest.mark.parametrize("module", [nn.Linear(3, 6), Conv1D(6, 3)])
def test_the_weight_is_output_by_input_in_any_layout(module):
    weight, bias = read_weight(module), read_bias(module)
    assert weight.shape == (6, 3)
    x = torch.randn(2, 3)
    torch.testing.assert_close(x @ weight.T + bias, module(x))
    assert as_stored(module, weight).shape == module.weight.shape
    assert torch.equal(as_stored(module, as_stored(module, weight)), weight)
    assert weight.data_ptr() == module.weight.data_ptr(), "a view"


def test_what_is_no_weight_of_a_product_is_refused():
    """No matrix, codes without a scale, and a layer whose forward was replaced."""
    codes, replaced = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
    values = codes.weight.data.to(torch.float8_e4m3fn)
    codes.weight = nn.Parameter(values, requires_grad=False)
    weight = replaced.weight.detach()
    replaced.forward = lambda x: F.linear(x, 2 * weight, replaced.bias)
    for module in (nn.Embedding(3, 5), nn.LayerNorm(4), codes, replaced):
        name = type(module).__name__
        with pytest.raises(SiteError, match=f"{name} cannot be read") as error:
            read_weight(module)
        assert "lora" in error.value.hint or name == "Linear"
    replaced.forward = lambda x: F.linear(x, weight, replaced.bias)
    assert torch.equal(read_weight(replaced), weight)


def test_weights_are_read_as_they_compute():
    for architecture in (*PROJECTIONS, "gpt_neox"):
        model = tiny_models.model(architecture)
        for site in ah.anatomy_of(model).sites.values():
            if site.kind == "linear":
                host = model.get_submodule(site.host)
                x = torch.randn(2, site.d_in)
                y = host(x) if site.part is None else site.part.read(host(x))
                weight, bias = read_weight(host, site.part), read_bias(host, site.part)
                assert weight.dtype == torch.float32
                assert weight.shape == (site.d_out, site.d_in)
                torch.testing.assert_close(F.linear(x, weight, bias), y, atol=1e-5, rtol=1e-5)


ROUTER = SimpleNamespace(hidden_size=32, num_local_experts=8, num_experts_per_tok=2,
                         router_jitter_noise=0.0, input_jitter_noise=0.0)  # fmt: skip
# By the class of transformers: how to build one with 32 inputs, and whether its weight is read;
# None: where this torch has a kernel for a CPU.
SUBCLASSES = {
    "models.falcon.modeling_falcon.FalconLinear": (lambda c: c(32, 48), True),
    "models.esm.modeling_esmfold.EsmFoldLinear": (lambda c: c(32, 48), True),
    "models.idefics.modeling_idefics.IdeficsDecoupledLinear": (lambda c: c(32, 48, 4), False),
    "models.deepseek_v4.modeling_deepseek_v4.DeepseekV4GroupedLinear": (
        lambda c: c(16, 48, n_groups=2), False),
    "models.llama4.modeling_llama4.Llama4Router": (lambda c: c(ROUTER), False),
    "models.phimoe.modeling_phimoe.PhimoeTopKRouter": (lambda c: c(ROUTER), False),
    "integrations.finegrained_fp8.FP8Linear": (lambda c: c(32, 48, (16, 16)), True),
    "integrations.finegrained_fp8.FP8GroupedLinear": (
        lambda c: c(16, 48, n_groups=2, block_size=(16, 16)), False),
    "integrations.fbgemm_fp8.FbgemmFp8Linear": (lambda c: c(32, 48, bias=False), None),
    "integrations.compressed_tensors.CompressedTensorsFP8Linear": (lambda c: c(32, 48), None),
    "integrations.bitnet.AutoBitLinear": (lambda c: c(32, 48), False),
    "integrations.metal_quantization.MetalLinear": (lambda c: c(128, 48), False),
    "integrations.gemma_quant.QuantizedLinear": (lambda c: c(32, 48), False),
}  # fmt: skip


def subclasses_in_source() -> set[str]:
    """List the classes of transformers that change how nn.Linear or another one computes."""
    root = Path(transformers.__file__).parent
    pattern = r"^class (\w+)\((?:\w+\.)*(?:Linear|FP8Linear|Conv1D)\):"
    return {
        f"{'.'.join(file.relative_to(root).with_suffix('').parts)}.{name}"
        for file in (*root.glob("models/*/modeling_*.py"), *root.glob("integrations/*.py"))
        for name in re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def weight_or_refusal(layer: nn.Module) -> tuple[torch.Tensor | None, str]:
    try:
        return read_weight(layer), ""
    except SiteError as error:
        return None, str(error)


def test_every_kind_of_linear_layer_is_listed():
    assert subclasses_in_source() <= SUBCLASSES.keys()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@torch.compiler.set_stance("force_eager")  # BitNet's
@pytest.mark.parametrize("path", SUBCLASSES)
def test_a_layer_with_its_own_code_is_read_as_it_computes_or_refused(path, monkeypatch):
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {path}")
    float8_kernel(monkeypatch)
    build, is_read = SUBCLASSES[path]
    torch.manual_seed(0)
    layer = build(cls)
    for parameter in layer.parameters():
        if parameter.is_floating_point():
            parameter.data = torch.randn(parameter.shape).to(parameter.dtype)
    if hasattr(layer, "online_quant"):  # BitNet
        layer.weight_scale.fill_(0.25)
    weight, refusal = weight_or_refusal(layer)
    if weight is None:
        assert not is_read, refusal
        assert f"{name} cannot be read" in refusal
        return
    assert is_read is not False
    x = torch.randn(3, 32)
    y = layer(x)
    rounding = 0.1 if is_read is None else 1e-4
    assert (F.linear(x, weight, layer.bias) - y).norm() < rounding * y.norm()


# Models without values, and stand-ins with random ones.


def test_it_has_the_sizes_and_no_values():
    net = Everything()
    empty = skeleton(net)
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: p.shape for n, p in net.named_parameters()
    }
    assert all(p.is_meta for p in empty.parameters())
    assert not any(p.is_meta for p in net.parameters())
    empty.fc = nn.Identity()
    assert isinstance(net.fc, nn.Linear)
    ah.attach(net, "lora(sites=['conv', 'fc'])")
    without = {n for n, _ in skeleton(net).named_parameters()}
    assert without == {n for n, _ in Everything().named_parameters()}, "adapters are left out"


def test_what_is_tied_stays_tied():
    model = tiny_models.model("gpt2", "causal-lm")
    empty = skeleton(model)
    assert type(empty) is type(model)
    assert len(list(empty.parameters())) == len(list(model.parameters()))
    assert empty.get_output_embeddings().weight is empty.get_input_embeddings().weight


class Packed(nn.Module):
    """A projection whose weight is codes, as a quantized one's."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 6, 4
        codes = torch.zeros(12, 1, dtype=torch.uint8)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), None


def test_a_quantized_projection_is_a_plain_one():
    host = skeleton(nn.Sequential(Packed()))[0]
    assert isinstance(host, nn.Linear)
    assert (host.weight.shape, host.bias) == ((4, 6), None)
    assert host.weight.is_meta


def test_a_stand_in_takes_almost_no_memory():
    size = {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 100_000}
    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=8, **size))
    made = stand_in(model)
    parameters = list(made.parameters())
    assert sum(p.numel() for p in parameters) > 140_000_000
    assert sum(p.untyped_storage().nbytes() for p in parameters) < 2_000_000
    assert torch.linalg.matrix_rank(made.encoder.layer[0].attention.self.query.weight) == 1024


@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_a_stand_in_computes(architecture):
    model = tiny_models.usual_model(architecture)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    made, again = stand_in(model), stand_in(model.to("meta"))
    assert {name: parameter.shape for name, parameter in made.named_parameters()} == shapes
    buffers = dict(tiny_models.usual_model(architecture).named_buffers())
    for name, buffer in made.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], equal_nan=True)
    inputs = tiny_models.batch()
    inputs |= tiny_models.decoder_inputs(made, inputs)
    with torch.no_grad():
        logits, repeated = made(**inputs).logits, again(**inputs).logits
    assert torch.equal(logits, repeated)
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def is_whole(model):
    return not any(parameter.is_meta for parameter in model.parameters())


def test_models_made_at_the_same_time_have_their_weights(backbones):
    """Without the lock some had parameters without values, and so had all that came later."""
    folder, other = str(backbones("bert")), tiny_models.language_model("llama")

    def load(task):
        return ah.load_backbone(folder, task=task)[0] if task else stand_in(other)

    with ThreadPoolExecutor(6) as pool:
        models = list(pool.map(load, ["masked-lm", None, "features"] * 8))
    assert all(map(is_whole, models))
    assert is_whole(ah.load_backbone(folder, task="masked-lm")[0])
