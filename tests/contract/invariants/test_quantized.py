"""Every method on a quantized backbone: the same calls, the same promises."""

from __future__ import annotations

import copy
import gc
import math
import os
import weakref
from importlib.util import find_spec

import pytest
import tiny_models
import torch
from fixtures import train
from matrix import REFUSED, example
from torch import nn
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

import adapterhub as ah
from adapterhub.backbones import quantized
from adapterhub.backbones.probe import probe
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import BackboneError, ConfigError, MergeError, SiteError
from adapterhub.merging.affine import merged_weight_and_bias
from adapterhub.merging.checkpoint import write_checkpoint
from adapterhub.methods import METHODS
from adapterhub.methods._spec import parse_methods
from adapterhub.training.gradient_checkpointing import recompute

pytest.importorskip("bitsandbytes", reason='pip install "adapterhub[quantized]"')

ARCHITECTURES = ("bert", "llama", "t5")
# Those whose library is here.
KINDS = [k for k, scheme in quantized.QUANTIZATIONS.items() if find_spec(scheme.library)]
PRECISIONS = {
    "bf16": {"dtype": "bf16"},
    **{kind: {"quantize": kind} for kind in KINDS if kind != "fp4"},  # as nf4, with other codes
}
LABELS = ["a", "b", "c"]
ALL = [
    (m, a, p)
    for m in sorted(METHODS)
    for a in ARCHITECTURES
    for p in PRECISIONS
    if (m, a) not in REFUSED
]
# They train whole weights, of which a quantized backbone has codes.
WHOLE = {"full", "freeze", "staged", "unfreeze"}
WORKING = [cell for cell in ALL if cell[0] not in WHOLE or cell[2] == "bf16"]
NOT_WORKING = [cell for cell in ALL if cell not in WORKING]
FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"
# Each method once; one of each kind of host on all.
EVERYWHERE = ("lora", "bitfit")
ONCE = [("bert", "nf4"), ("bert", "int8-weight")]
CORE = [c for c in WORKING if FULL or c[0] in EVERYWHERE or c[1:] in ONCE]
cells = pytest.mark.parametrize(("method", "architecture", "precision"), CORE)


def test_the_matrix_covers_every_method_and_precision():
    assert {c[0] for c in CORE} == METHODS.keys() - (set() if FULL else WHOLE)
    assert {c[1:] for c in CORE} >= {(a, p) for a in ARCHITECTURES for p in PRECISIONS}
    assert {c[0] for c in NOT_WORKING} == WHOLE
    assert PRECISIONS.keys() >= {"bf16", "int8", "nf4"}


def loaded(folder, precision, **options):
    return ah.load_backbone(
        str(folder), task="classification", labels=LABELS, **PRECISIONS[precision], **options
    )[0]


@pytest.fixture(scope="module")
def model_of(backbones):
    """A tiny classifier of an architecture in a precision; each is loaded once, and every test
    leaves it bare."""
    made: dict[tuple[str, str], nn.Module] = {}

    def get(architecture, precision):
        key = (architecture, precision)
        if key not in made:
            torch.manual_seed(0)  # the head is drawn
            made[key] = loaded(backbones(architecture), precision)
        assert not any("adapterhub" in name for name, _ in made[key].named_modules())
        return made[key]

    return get


def attached(model, method):
    torch.manual_seed(0)
    return ah.attach(model, example(method) if isinstance(method, str) else method)


def codes(tensor):
    """A tensor as plain ones: torchao's kind of its own keeps several, and cannot be compared."""
    if type(tensor.data) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def equal(one, other):
    pairs = zip(codes(one), codes(other), strict=True)
    return type(one) is type(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def logits(model):
    with torch.no_grad():
        return model(**tiny_models.batch()).logits.float()


@cells
def test_it_trains_and_loads_again(method, architecture, precision, model_of, tmp_path):
    model = model_of(architecture, precision)
    base, bare = copy.deepcopy(model.state_dict()), logits(model)
    adapter = attached(model, method)
    try:
        losses = train(adapter, steps=20)
        assert losses[-1] < losses[0]
        assert {p.dtype for p in adapter.parameters()} == {torch.float32}
        assert {id(p) for p in model.parameters() if p.requires_grad} == {
            id(p) for p in adapter.parameters()
        }
        live = logits(model)
        assert not torch.equal(live, bare)
        adapter.save(tmp_path / "a")
    finally:
        ah.detach(model)
    after = model.state_dict()
    assert list(after) == list(base)
    for name, tensor in base.items():
        assert equal(after[name], tensor), name
    assert torch.equal(logits(model), bare)
    manifest = ah.load(model, tmp_path / "a").manifest()
    try:
        assert torch.equal(logits(model), live)
    finally:
        ah.detach(model)
    assert manifest.backbone.dtype == "bf16"
    assert manifest.backbone.quantization == PRECISIONS[precision].get("quantize")
    assert manifest.backbone.fingerprint == ah.fingerprint(model.config._name_or_path)


@cells
def test_gradient_checkpointing_gives_equal_gradients(method, architecture, precision, model_of):
    model, gradients = model_of(architecture, precision), []
    for on in (False, True):
        adapter = attached(model, method)
        try:
            tiny_models.scramble(adapter)
            adapter.train_mode()
            with recompute(model, on) as layers:
                if layers:
                    layers.apply()
                model(**tiny_models.labelled_batch(model)).loss.backward()
            gradients.append({n: t.grad for n, t in adapter.tensors().items() if t.requires_grad})
        finally:
            ah.detach(model)
            model.eval()
    plain, checkpointed = gradients
    assert plain
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("training", [False, True])
def test_gradient_checkpointing_keeps_no_input_of_a_projection(precision, training, backbones):
    """bitsandbytes keeps the input of an int8 layer out of its sight: it must not stay alive."""
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
        alive = {id(found) for ref in inputs if (found := ref()) is not None}
        assert len(inputs) == len(hosts)
        assert not alive
        loss.backward()
    for handle in handles:
        handle.remove()
    ah.detach(model)
    assert not [m for m in model.modules() if m._forward_hooks]


REFUSING = [cell for cell in NOT_WORKING if FULL or cell[1:] == ("bert", "nf4")]


@pytest.mark.parametrize(("method", "architecture", "precision"), REFUSING)
def test_what_trains_whole_weights_names_the_methods_that_fit(
    method, architecture, precision, model_of
):
    model = model_of(architecture, precision)
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(SiteError, match="quantized") as error:
        ah.attach(model, method)
    named = error.value.hint.partition(": ")[2].split(", ")
    assert set(named) == {m for m, a, p in WORKING if (a, p) == (architecture, precision)}
    assert [p.requires_grad for p in model.parameters()] == flags


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_moves_between_precisions(architecture, model_of, tmp_path):
    source = model_of(architecture, "nf4")
    adapter = attached(source, ["lora", "norms"])
    try:
        tiny_models.scramble(adapter)
        own = {name: t.detach().clone() for name, t in adapter.tensors().items()}
        adapter.save(tmp_path / "a")
    finally:
        ah.detach(source)
    for precision in PRECISIONS.keys() - {"nf4"}:
        model = model_of(architecture, precision)
        bare = logits(model)
        there = ah.load(model, tmp_path / "a")
        try:
            assert all(torch.equal(t, own[name]) for name, t in there.tensors().items())
            assert not torch.allclose(logits(model), bare, atol=1e-2)
        finally:
            ah.detach(model)


@pytest.fixture(scope="module")
def wide(tmp_path_factory, backbone):
    """A backbone whose rows fill the blocks of 64 values that have a scale of their own."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("backbones") / "wide"
    tiny_models.model("bert", "features", hidden_size=64, intermediate_size=128).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(backbone).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_that_is_read_is_the_one_that_computes(kind, wide):
    model, _ = ah.load_backbone(str(wide), quantize=kind)
    full, _ = ah.load_backbone(str(wide))
    host, plain = (m.encoder.layer[0].attention.output.dense for m in (model, full))
    for _ in range(2):  # an int8 layer moves its scales when it is called
        weight = read_weight(host)
        assert weight.shape == plain.weight.shape
        assert weight.dtype == torch.float32
        with torch.no_grad():
            eye = torch.eye(weight.shape[1], dtype=torch.bfloat16)
            rows = (host(eye) - host(torch.zeros_like(eye))).float()
        torch.testing.assert_close(rows.T, weight, atol=2e-2, rtol=2e-2)
    distance = (weight - plain.weight).norm() / plain.weight.norm()
    assert 0 < distance < {"int8": 0.01, "int8-weight": 0.01, "nf4": 0.1, "fp4": 0.13}[kind]


def test_the_head_and_what_is_new_stay_in_full_precision(tmp_path, backbone):
    """Also a pooler, which a checkpoint of a language model lacks."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    AutoModelForMaskedLM.from_config(tiny_models.model("bert").config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(backbone).save_pretrained(tmp_path)
    model = loaded(tmp_path, "nf4")
    plain = {name for name, m in model.named_modules() if type(m) is nn.Linear}
    assert plain == {"bert.pooler.dense", "classifier"}
    adapter = ah.attach(model, "lora")
    trained = {name.split(".")[0] for name in adapter.tensors()}
    assert trained == {"encoder", "backbone", "head"}
    losses = train(adapter, 3)
    assert losses[-1] < losses[0]
    causal, _ = ah.load_backbone(str(tmp_path), task="masked-lm", quantize="nf4")
    assert type(causal.get_output_embeddings()) is nn.Linear


def stored_by(kind, backbone, folder):
    """A checkpoint that comes quantized. transformers 5.23 loads one by torchao only as the class
    that saved it."""
    task = {"task": "classification", "labels": LABELS} if "weight" in kind else {}
    model, tokenizer = ah.load_backbone(str(backbone), quantize=kind, **task)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_comes_quantized(kind, backbone, tmp_path):
    stored = stored_by(kind, backbone, tmp_path / "quantized")
    model, _ = ah.load_backbone(str(stored), task="classification", labels=LABELS)
    query = model.bert.encoder.layer[0].attention.self.query
    assert type(query.weight) is not nn.Parameter
    assert type(model.classifier.weight) is nn.Parameter
    adapter = ah.attach(model, "lora")
    losses = train(adapter, 5)
    assert losses[-1] < losses[0]
    manifest = adapter.save(tmp_path / "a")
    assert manifest.backbone.quantization == kind
    assert manifest.backbone.fingerprint == ah.fingerprint(stored)
    live = logits(model)
    ah.detach(model)
    ah.load(model, tmp_path / "a")
    assert torch.equal(logits(model), live)
    with pytest.raises(ConfigError, match="quantized already"):
        ah.load_backbone(str(stored), quantize="int8" if kind == "nf4" else "nf4")
    as_it_is, _ = ah.load_backbone(str(stored), task="classification", labels=LABELS, quantize=kind)
    query_again = as_it_is.bert.encoder.layer[0].attention.self.query
    assert type(query_again.weight) is type(query.weight)


def test_without_bitsandbytes(monkeypatch, backbone, tmp_path):
    stored = stored_by("nf4", backbone, tmp_path / "quantized")
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    for call in ({"quantize": "nf4", "backbone": str(backbone)}, {"backbone": str(stored)}):
        with pytest.raises(ConfigError) as error:
            ah.load_backbone(**call)
        assert error.value.hint == 'pip install "adapterhub[quantized]"'
    with pytest.raises(ConfigError, match="torchao") as error:
        ah.load_backbone(str(backbone), quantize="int8-weight")
    assert error.value.hint == 'pip install "adapterhub[torchao]"'
    ah.load_backbone(str(backbone))


def test_an_unknown_quantization(backbone):
    with pytest.raises(ConfigError, match=r"nf5.*did you mean 'nf4'"):
        ah.load_backbone(str(backbone), quantize="nf5")


def test_evaluation_leaves_gradients_as_they_were(backbone):
    """bitsandbytes packs 4-bit weights anew at a first call without gradients, on some CPUs."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_compute_dtype=torch.bfloat16,
                              llm_int8_skip_modules=["classifier"])  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        backbone, quantization_config=four, dtype=torch.bfloat16, num_labels=3
    )
    gradients = []
    adapter = attached(model, "lora(sites=['attn.q'])")
    tiny_models.scramble(adapter)
    for _ in range(2):
        model.zero_grad()
        model(**tiny_models.labelled_batch(model)).loss.backward()
        gradients.append({n: t.grad.clone() for n, t in adapter.tensors().items()})
        logits(model.eval())
    first, second = gradients
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_merging_is_refused_with_the_way_out(model_of):
    model = model_of("bert", "nf4")
    tiny_models.scramble(attached(model, "lora"))
    try:
        before = logits(model)
        with pytest.raises(MergeError, match="Params4bit") as error:
            ah.merge(model)
        assert "adapterhub merge ADAPTER --base-dtype bf16" in error.value.hint
        assert "--requantize" in error.value.hint
        assert torch.equal(logits(model), before)
    finally:
        ah.detach(model)


MERGED = [("lora", kind) for kind in KINDS] + [("dora", "nf4"), ("ia3", "int8")]


@pytest.mark.parametrize(("method", "kind"), MERGED)
def test_merged_weights_are_quantized_again_only_when_asked(method, kind, wide, tmp_path):
    """What is lost is no more than what the backbone lost when it was quantized; the way back is
    exact."""
    model, tokenizer = ah.load_backbone(
        str(wide), task="classification", labels=LABELS, quantize=kind
    )
    base, bare = copy.deepcopy(model.state_dict()), logits(model)
    adapter = attached(model, method)
    tiny_models.scramble(adapter)
    live = logits(model)
    hosts = [model.get_submodule(placed.site.host) for placed in adapter.placed]
    wanted = [merged_weight_and_bias(host, host.adapterhub)[0] for host in hosts]
    before = ah.fingerprint(wide)
    made = ah.merge(model, requantize=True)
    assert set(made.tolerances.values()) == {math.inf}
    bound = {"int8": 0.01, "int8-weight": 0.01, "nf4": 0.12, "fp4": 0.16}[kind]
    for host, whole in zip(hosts, wanted, strict=True):
        assert (read_weight(host) - whole).norm() < bound * whole.norm()
    merged = logits(model)
    assert made.difference >= 0
    assert (merged - live).norm() < 0.5 * (bare - live).norm()
    assert not torch.equal(merged, bare)
    with pytest.raises(BackboneError, match="quantized"):
        ah.attach(model, "lora").manifest()  # it is no longer its base
    ah.detach(model)
    write_checkpoint(model, tokenizer, tmp_path / "out", probe(model))
    again, _ = ah.load_backbone(str(tmp_path / "out"), task="classification", labels=LABELS)
    assert ah.fingerprint(tmp_path / "out") != before
    torch.testing.assert_close(logits(again), merged, atol=0.02, rtol=0.02)
    ah.unmerge(model)
    assert torch.equal(logits(model), live)
    ah.detach(model)
    after = model.state_dict()
    assert list(after) == list(base)
    assert all(equal(after[name], tensor) for name, tensor in base.items())
    assert torch.equal(logits(model), bare)


def test_quantizing_again_holds_to_a_tolerance_and_to_quantized_backbones(model_of, backbone):
    model = model_of("bert", "nf4")
    tiny_models.scramble(attached(model, "lora"))
    try:
        live = logits(model)
        with pytest.raises(MergeError, match=r"max \|difference\|"):
            ah.merge(model, requantize=True, tolerance=1e-6)
        assert torch.equal(logits(model), live)
    finally:
        ah.detach(model)
    plain, _ = ah.load_backbone(str(backbone))
    ah.attach(plain, "lora")
    with pytest.raises(MergeError, match="is not quantized"):
        ah.merge(plain, requantize=True)


def test_a_changed_quantized_model_has_no_identity(backbone):
    model, _ = ah.load_backbone(str(backbone), quantize="nf4")
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.weight += 1
    adapter = ah.attach(model, "lora")
    with pytest.raises(BackboneError, match="quantized"):
        adapter.manifest()


def test_methods_that_train_whole_weights_are_those_of_the_registry():
    parts = {m for m in METHODS for part in parse_methods(m)[0].parts() if part.trains_backbone}
    assert parts >= WHOLE
