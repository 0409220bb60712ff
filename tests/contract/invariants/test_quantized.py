"""Every method on quantized backbones: training, saving, loading, merging and detaching."""

import contextlib
import copy
import gc
import math
import warnings
import weakref
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, BitsAndBytesConfig

import adapterhub as ah
from adapterhub.backbones.probe import probe
from adapterhub.backbones.torch_free_checks import QUANTIZATION_LIBRARIES
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import BackboneError, ConfigError, MergeError, SiteError
from adapterhub.inference.merged_checkpoint import write_checkpoint
from adapterhub.loop.engine import recompute
from adapterhub.merging.affine import merged_weight_and_bias
from adapterhub.methods import METHODS
from tests.kit import matrix, tiny_models
from tests.kit.data import train
from tests.kit.matrix import REFUSED, check_equal, example, train_save_and_load
from tests.kit.selection import long_table

pytest.importorskip("bitsandbytes", reason='pip install "adapterhub[quantized]"')

ARCHITECTURES = ("bert", "llama", "t5")
# The quantizations whose library is installed.
KINDS = [kind for kind, (library, _) in QUANTIZATION_LIBRARIES.items() if find_spec(library)]
PRECISIONS = {
    "bf16": {"dtype": "bf16"},
    **{kind: {"quantize": kind} for kind in KINDS if kind != "fp4"},  # fp4 is nf4 with other codes
}
LABELS = ["a", "b", "c"]
CLASSIFIER = {"task": "classification", "labels": LABELS}
ALL = [
    (m, a, p)
    for m in sorted(METHODS)
    for a in ARCHITECTURES
    for p in PRECISIONS
    if (m, a) not in REFUSED
]
# They train full weight matrices, which a quantized backbone does not have.
WHOLE = {"full", "freeze", "staged", "unfreeze"}
WORKING = [cell for cell in ALL if cell[0] not in WHOLE or cell[2] == "bf16"]
NOT_WORKING = [cell for cell in ALL if cell not in WORKING]
# Each method once, and two methods on every backbone.
EVERYWHERE = ("lora", "bitfit")
ONCE = [("bert", "nf4"), ("bert", "int8-weight"), ("bert", "fp8-weight")]
CORE = [c for c in WORKING if tiny_models.FULL_MATRIX or c[0] in EVERYWHERE or c[1:] in ONCE]
REPRESENTED = {*matrix.one_of_each_signature({c[0] for c in CORE} - {*EVERYWHERE}), *EVERYWHERE}
cells = long_table(
    ("method", "architecture", "precision"),
    [c for c in CORE if c[0] in REPRESENTED],
    parts=8,
    nightly=3,
)


@pytest.fixture(scope="module")
def model_of(backbones):
    """Return a function from an architecture and a precision to a tiny classifier.

    Each model is loaded once; every test detaches its adapters.
    """
    models: dict[tuple[str, str], nn.Module] = {}

    def get(architecture, precision):
        key = (architecture, precision)
        if key not in models:
            torch.manual_seed(0)  # the head is initialized at random
            options = CLASSIFIER | PRECISIONS[precision]
            models[key] = ah.load_backbone(str(backbones(architecture)), **options)[0]
        assert not any("adapterhub" in name for name, _ in models[key].named_modules())
        return models[key]

    return get


@contextlib.contextmanager
def attached(model, method):
    """Attach an adapter with an effect, and detach it."""
    torch.manual_seed(0)
    adapter = ah.attach(model, example(method) if isinstance(method, str) else method)
    try:
        tiny_models.scramble(adapter)
        yield adapter
    finally:
        ah.detach(model)


def logits(model):
    return tiny_models.logits(model).float()


@cells
def test_an_adapter_trains_and_loads_again(method, architecture, precision, model_of, tmp_path):
    model = model_of(architecture, precision)
    backbone = train_save_and_load(model, method, tmp_path / "a").backbone
    assert backbone.dtype == "bf16"
    assert backbone.quantization == PRECISIONS[precision].get("quantize")
    assert backbone.fingerprint == ah.fingerprint(model.config._name_or_path)


@cells
def test_gradient_checkpointing_gives_equal_gradients(method, architecture, precision, model_of):
    model, gradients = model_of(architecture, precision), []
    for on in (False, True):
        with attached(model, method) as adapter:
            adapter.train_mode()
            with recompute(model, on) as layers:
                if layers:
                    layers.apply()
                model(**tiny_models.labelled_batch(model)).loss.backward()
            gradients.append({n: t.grad for n, t in adapter.tensors().items() if t.requires_grad})
        model.eval()
    plain, checkpointed = gradients
    assert plain
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("precision", "training"), [("bf16", False), ("int8", True)])
def test_gradient_checkpointing_frees_the_inputs_of_projections(precision, training, backbones):
    """bitsandbytes saves the input of an int8 layer outside of autograd's saved tensors."""
    model = ah.load_backbone(str(backbones("llama")), task="causal-lm", **PRECISIONS[precision])[0]
    inputs, hosts = [], [m for n, m in model.named_modules() if n.endswith("_proj")]
    adapter = ah.attach(model, "houlsby")
    adapter.train_mode()
    model.train(training)
    handles = [
        host.register_forward_hook(lambda _, args, y: inputs.append(weakref.ref(args[0])))
        for host in hosts
    ]
    with recompute(model, True) as layers:
        layers.apply()
        loss = model(**tiny_models.batch(), labels=tiny_models.batch()["input_ids"]).loss
        gc.collect()
        assert len(inputs) == len(hosts)
        assert not [ref for ref in inputs if ref() is not None]
        loss.backward()
    for handle in handles:
        handle.remove()
    ah.detach(model)
    assert not [m for m in model.modules() if m._forward_hooks]


REFUSING = [cell for cell in NOT_WORKING if tiny_models.FULL_MATRIX or cell[1:] == ("bert", "nf4")]


@pytest.mark.parametrize(("method", "architecture", "precision"), REFUSING)
def test_methods_that_train_full_weights_name_the_supported_ones(
    method, architecture, precision, model_of
):
    model = model_of(architecture, precision)
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(SiteError, match="quantized") as error:
        ah.attach(model, method)
    named = error.value.hint.partition(": ")[2].split(", ")
    assert set(named) == {m for m, a, p in WORKING if (a, p) == (architecture, precision)}
    assert [p.requires_grad for p in model.parameters()] == flags


@long_table("architecture", ARCHITECTURES, 3)
def test_an_adapter_loads_in_every_precision(architecture, model_of, tmp_path):
    with attached(model_of(architecture, "nf4"), ["lora", "norms"]) as adapter:
        tensors = {name: t.detach().clone() for name, t in adapter.tensors().items()}
        adapter.save(tmp_path / "a")
    for precision in PRECISIONS.keys() - {"nf4"}:
        model = model_of(architecture, precision)
        bare = logits(model)
        loaded = ah.load(model, tmp_path / "a")
        try:
            for name, tensor in loaded.tensors().items():
                assert torch.equal(tensor, tensors[name]), name
            assert not torch.allclose(logits(model), bare, atol=1e-2)
        finally:
            ah.detach(model)


@pytest.fixture(scope="module")
def wide(tmp_path_factory, backbone):
    """Save a backbone whose rows are whole blocks of 64 values, the unit of quantization."""
    folder = tmp_path_factory.mktemp("backbones") / "wide"
    model = tiny_models.model("bert", "features", hidden_size=64, intermediate_size=128)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(backbone).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_read_weight_returns_the_weight_that_computes(kind, wide):
    model, _ = ah.load_backbone(str(wide), quantize=kind)
    full, _ = ah.load_backbone(str(wide))
    host, plain = (m.encoder.layer[0].attention.output.dense for m in (model, full))
    for _ in range(2):  # an int8 layer moves its scales on the first call
        weight = read_weight(host)
        assert weight.shape == plain.weight.shape
        assert weight.dtype == torch.float32
        with torch.no_grad():
            eye = torch.eye(weight.shape[1], dtype=torch.bfloat16)
            rows = (host(eye) - host(torch.zeros_like(eye))).float()
        torch.testing.assert_close(rows.T, weight, atol=2e-2, rtol=2e-2)
    distance = (weight - plain.weight).norm() / plain.weight.norm()
    most = {"int8": 0.01, "int8-weight": 0.01, "fp8-weight": 0.04, "nf4": 0.1, "fp4": 0.13}[kind]
    assert 0 < distance < most


def test_the_head_and_new_modules_stay_in_full_precision(tmp_path, backbone):
    """So does a pooler, which a language model's checkpoint lacks."""
    AutoModelForMaskedLM.from_config(tiny_models.model("bert").config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(backbone).save_pretrained(tmp_path)
    model, _ = ah.load_backbone(str(tmp_path), quantize="nf4", **CLASSIFIER)
    plain = {name for name, m in model.named_modules() if type(m) is nn.Linear}
    assert plain == {"bert.pooler.dense", "classifier"}
    adapter = ah.attach(model, "lora")
    trained = {name.split(".")[0] for name in adapter.tensors()}
    assert trained == {"encoder", "backbone", "head"}
    losses = train(adapter, 3)
    assert losses[-1] < losses[0]
    causal, _ = ah.load_backbone(str(tmp_path), task="masked-lm", quantize="nf4")
    assert type(causal.get_output_embeddings()) is nn.Linear


def save_quantized(kind, backbone, folder):
    """Save a quantized checkpoint.

    transformers 5.23 loads a torchao checkpoint only into the class that saved it.
    """
    options = CLASSIFIER if "weight" in kind else {}
    model, tokenizer = ah.load_backbone(str(backbone), quantize=kind, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint_trains_and_loads(kind, backbone, tmp_path):
    stored = save_quantized(kind, backbone, tmp_path / "quantized")
    model, _ = ah.load_backbone(str(stored), **CLASSIFIER)
    query = model.bert.encoder.layer[0].attention.self.query
    assert type(query.weight) is not nn.Parameter
    assert type(model.classifier.weight) is nn.Parameter
    manifest = train_save_and_load(model, "lora", tmp_path / "a", 5)
    assert manifest.backbone.quantization == kind
    assert manifest.backbone.fingerprint == ah.fingerprint(stored)
    with pytest.raises(ConfigError, match="quantized already"):
        ah.load_backbone(str(stored), quantize="int8" if kind == "nf4" else "nf4")
    same, _ = ah.load_backbone(str(stored), quantize=kind, **CLASSIFIER)
    assert type(same.bert.encoder.layer[0].attention.self.query.weight) is type(query.weight)


def test_evaluation_does_not_change_gradients(backbone):
    """On some CPUs, bitsandbytes repacks 4-bit weights on the first call without gradients."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_compute_dtype=torch.bfloat16,
                              llm_int8_skip_modules=["classifier"])  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        backbone, quantization_config=four, dtype=torch.bfloat16, num_labels=3
    )
    gradients = []
    with attached(model, "lora(sites=['attn.q'])") as adapter:
        for _ in range(2):
            model.zero_grad()
            model(**tiny_models.labelled_batch(model)).loss.backward()
            gradients.append({n: t.grad.clone() for n, t in adapter.tensors().items()})
            logits(model.eval())
    first, second = gradients
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("precision", sorted(PRECISIONS.keys() - {"bf16"}))
def test_merging_is_refused_with_a_hint(precision, model_of):
    model = model_of("bert", precision)
    with attached(model, "lora(sites=['attn.q'], layers='first 1')"):
        live = logits(model)
        host = model.get_submodule("bert.encoder.layer.0.attention.self.query")
        stored = type(host.weight.data if type(host.weight) is nn.Parameter else host.weight)
        with pytest.raises(MergeError, match=rf"query\.weight: .*{stored.__name__}") as error:
            ah.merge(model)
        assert len(error.value.offenders) == 1
        assert "reload the backbone in bf16 or fp32" in error.value.hint
        assert "adapterhub merge ADAPTER --base-dtype bf16" in error.value.hint
        assert "--requantize" in error.value.hint
        assert torch.equal(logits(model), live)
        with pytest.raises(MergeError, match=r"max \|difference\|"):
            ah.merge(model, requantize=True, tolerance=1e-6)
        assert torch.equal(logits(model), live)
    plain = tiny_models.model("bert")
    ah.attach(plain, "lora")
    with pytest.raises(MergeError, match="is not quantized"):
        ah.merge(plain, requantize=True)


MERGED = [("lora", kind) for kind in KINDS] + [("dora", "nf4"), ("ia3", "int8")]


@long_table(("method", "kind"), MERGED, 3)
def test_requantized_merges_are_close_and_undone_exactly(method, kind, wide, tmp_path):
    """The error is at most that of quantizing the backbone, and unmerging is exact."""
    model, tokenizer = ah.load_backbone(str(wide), quantize=kind, **CLASSIFIER)
    base, bare = copy.deepcopy(model.state_dict()), logits(model)
    with attached(model, method) as adapter:
        live = logits(model)
        hosts = [model.get_submodule(placed.site.host) for placed in adapter.placed]
        merged_weights = [merged_weight_and_bias(host, host.adapterhub)[0] for host in hosts]
        made = ah.merge(model, requantize=True)
        assert set(made.tolerances.values()) == {math.inf}
        bound = {"int8": 0.01, "int8-weight": 0.01, "fp8-weight": 0.04, "nf4": 0.12, "fp4": 0.16}
        for host, weight in zip(hosts, merged_weights, strict=True):
            assert (read_weight(host) - weight).norm() < bound[kind] * weight.norm()
        merged = logits(model)
        assert made.difference >= 0
        assert (merged - live).norm() < 0.5 * (bare - live).norm()
        assert not torch.equal(merged, bare)
        with pytest.raises(BackboneError, match="quantized"):
            ah.attach(model, "lora").manifest()  # the model no longer equals its checkpoint
        ah.detach(model)
        write_checkpoint(model, tokenizer, tmp_path / "out", probe(model))
        again, _ = ah.load_backbone(str(tmp_path / "out"), **CLASSIFIER)
        assert ah.fingerprint(tmp_path / "out") != ah.fingerprint(wide)
        torch.testing.assert_close(logits(again), merged, atol=0.02, rtol=0.02)
        ah.unmerge(model)
        assert torch.equal(logits(model), live)
    check_equal(model.state_dict(), base)
    assert torch.equal(logits(model), bare)


@pytest.mark.parametrize(("size", "lost"), [(0.003, True), (1.0, False)])
def test_an_update_that_is_rounded_away_is_said(size, lost, backbones):
    """Of SmolLM2 on nf4, all that 60 steps had learned was lost, in silence."""
    model, _ = ah.load_backbone(str(backbones("llama")), task="causal-lm", quantize="nf4")
    with (
        attached(model, "lora(sites=['attn.*', 'ffn.*'])") as adapter,
        warnings.catch_warnings(record=True) as seen,
    ):
        with torch.no_grad():
            for tensor in adapter.tensors().values():
                tensor.mul_(size**0.5)
        warnings.simplefilter("always")
        ah.merge(model, requantize=True)
        ah.unmerge(model)
    assert any("the update was lost" in str(each.message) for each in seen) == lost
