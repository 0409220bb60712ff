"""`quantize=` on the command line: train, evaluate, merge, plan; and checkpoints in FP8."""

import json
import re
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import adapterhub as ah
from adapterhub.backbones import layer_timing
from adapterhub.backbones.torch_free_checks import QUANTIZATION_LIBRARIES
from adapterhub.inference import open as opened
from adapterhub.inference.open import open_adapter
from adapterhub.recipe.recipe import read
from adapterhub.training import loading
from adapterhub.training.plan import plan_of, weight_bytes
from adapterhub.training.run import prepare
from tests.kit import own_models, tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded
from tests.kit.tiny_models import codes

KINDS = [kind for kind, (library, _) in QUANTIZATION_LIBRARIES.items() if find_spec(library)]
pytest.importorskip("bitsandbytes", reason='pip install "adapterhub[quantized]"')


def test_train_evaluate_and_merge(train, adapterhub, backbone, data, tmp_path):
    code, out, err = train("quantize=nf4", "--method", "lora", "train.epochs=2")
    assert err.count("nf4 saves memory; on a CPU") == (not torch.cuda.is_available())
    assert code == 0, err
    accuracy = float(out.split("accuracy")[1].split()[0])
    found = json.loads((tmp_path / "run/adapter/adapter.json").read_text(encoding="utf-8"))
    assert (found["backbone"]["dtype"], found["backbone"]["quantization"]) == ("bf16", "nf4")
    assert found["backbone"]["fingerprint"] == ah.fingerprint(backbone)
    model = open_adapter(tmp_path / "run").model
    assert type(model.bert.encoder.layer[0].output.dense).__name__ == "Linear4bit"
    out = succeeded(adapterhub("eval", tmp_path / "run", "--data", data[1]))
    assert float(out.split("accuracy")[1].split()[0]) == pytest.approx(accuracy, abs=1e-4)
    merged = ("merge", tmp_path / "run", "--output", tmp_path / "merged", "--base-dtype", "bf16")
    succeeded(adapterhub(*merged), "max |difference|")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    again = ("merge", tmp_path / "run", "--output", tmp_path / "again", "--requantize")
    refused(adapterhub(*again, "--base-dtype", "bf16"), "one of the two")
    out = succeeded(adapterhub(*again))
    first, merged, loaded, _ = out.splitlines()
    assert first.endswith(", nf4")
    assert "max |difference|" in merged
    assert loaded.startswith("reloaded")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert type(model.bert.encoder.layer[0].output.dense).__name__ == "Linear4bit"


class Products(TorchDispatchMode):
    """Collects the matrix products that are computed in bf16."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        product = re.search("mm|linear|matmul|attention", func.name())
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if product and any(tensor.dtype == torch.bfloat16 for tensor in tensors):
            self.found.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def slow_in_bf16(monkeypatch):
    """Return a function after whose call the processor takes 90 times as long in bf16."""

    def slow():
        for module in (layer_timing, loading, opened):
            monkeypatch.setattr(module, "times_in_bf16", lambda: 90.0)

    return slow


def test_a_slow_processor_computes_no_products_in_bf16(
    train, adapterhub, data, tmp_path, slow_in_bf16
):
    """Not on what was trained in bf16 elsewhere, nor on a checkpoint that was quantized there."""
    run, nf4 = tmp_path / "run", tmp_path / "nf4"
    assert train("dtype=bf16", "train.max_steps=1")[0] == 0
    assert train("quantize=nf4", "train.max_steps=1", output=nf4)[0] == 0
    stored = tmp_path / "stored"
    assert adapterhub("merge", nf4, "--output", stored, "--requantize")[0] == 0
    slow_in_bf16()
    ways = {
        "predict": ("predict", run, "a good film"),
        "eval": ("eval", run, "--data", data[1]),
        "merge": ("merge", run, "--output", tmp_path / "fp32"),
        "merge into bf16": ("merge", run, "--output", tmp_path / "bf16", "--base-dtype", "bf16"),
        "merge --requantize": ("merge", nf4, "--output", tmp_path / "again", "--requantize"),
        "predict in nf4": ("predict", nf4, "a good film"),
    }
    for way, words in ways.items():
        says = way in ("predict", "eval")
        with Products() as products, pytest.warns(match="90 times") if says else nullcontext():
            code, _, err = adapterhub(*words)
        assert code == 0, err
        assert products.found == set(), way
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bf16")
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    with Products() as products:
        model, _ = ah.load_backbone(str(stored), task="classification", labels=["n", "y"])
        model(**tiny_models.batch())
    assert products.found == set()


@long_table("kind", KINDS, 2)
def test_a_quantized_backbone_computes_in_fp32_on_a_slow_processor(
    kind, train, adapterhub, backbone, data, tmp_path, slow_in_bf16
):
    slow_in_bf16()
    with Products() as products:
        code, _, err = train(f"quantize={kind}", "train.max_steps=1")
    assert code == 0, err
    assert "the quantized backbone computes in fp32" in err
    assert products.found == set()
    recipe = json.loads((tmp_path / "run/adapter/adapter.json").read_text())["training"]["recipe"]
    assert recipe["dtype"] is None  # other machines choose for themselves
    words = ("bench", "--methods", "head", "--rates", "1", "--seeds", "1", "--steps", "2")
    where = ("--backbone", backbone, "--output", tmp_path / "study", "--train", data[0])
    with Products() as products:
        code, _, err = adapterhub(*words, *where, f"quantize={kind}")
    assert code == 0, err
    assert products.found == set()


def test_bf16_that_is_asked_for_stays_with_a_note(train, slow_in_bf16, tmp_path):
    slow_in_bf16()
    for word in ("dtype=bf16", "train.mixed_precision=bf16"):
        code, _, err = train(word, "train.max_steps=1", output=tmp_path / word)
        assert (code, "90 times as long in bf16 as in fp32" in err) == (0, True), err


def test_a_method_that_trains_whole_weights_is_refused(train, tmp_path):
    result = train("--method", "full", "--quantize", "int8")
    refused(result, "quantized")
    assert "lora" in result[2].split("one of the methods that fit")[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["dtype=fp32", "dtype=bf16", *KINDS])
def test_the_planned_memory_of_weights_is_what_they_take(precision, data, backbone, tmp_path):
    wide = tmp_path / "wide"
    model = tiny_models.model("bert", "features", hidden_size=128, intermediate_size=256)
    model.save_pretrained(wide)
    AutoTokenizer.from_pretrained(backbone).save_pretrained(wide)
    word = precision if "=" in precision else f"quantize={precision}"
    where = [f"backbone={wide}", f"data.train={data[0]}", f"data.eval={data[1]}"]
    ready = prepare(read(None, [*where, f"output={tmp_path / 'run'}", word]))
    predicted = plan_of(ready)
    plain, _ = ah.load_backbone(str(wide), task="classification", labels=["n", "y"])
    assert predicted.backbone == sum(
        p.numel() for n, p in plain.named_parameters() if not n.startswith("classifier")
    )
    ready.adapter.detach()
    real = stored_bytes(ready.model)
    assert predicted.memory["backbone weights"] == pytest.approx(real, rel=0.02)
    assert predicted.memory["backbone weights"] == weight_bytes(ready.adapter)


def stored_bytes(model):
    """What the tensors of a state dict take: of a quantized layer all parts of its state."""
    tensors = [part for t in model.state_dict().values() for part in codes(t)]
    held = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}
    missing = [b for n, b in model.named_buffers() if n not in model.state_dict()]
    return sum(held.values()) + sum(b.numel() * b.element_size() for b in missing)


@pytest.mark.parametrize("pooling", ["mean", "model"])
def test_requantized_weights_may_differ_from_the_adapter(train, adapterhub, tmp_path, pooling):
    # A large update: rounded to 4 bits, it changes the logits by more than bf16 would.
    task = f"classification(pooling={pooling})"
    options = ("quantize=nf4", "--method", "lora", "--task", task, "train.learning_rate=0.05")
    assert train(*options, "train.epochs=6")[0] == 0
    merged = ("merge", tmp_path / "run", "--output", tmp_path / "merged", "--requantize", "--json")
    out = succeeded(adapterhub(*merged))
    difference = json.loads(out)["merged"]["logits"]
    assert difference > 0.1
    assert json.loads(out)["loaded again"]["logits"] < difference / 10


# Checkpoints in FP8: decoded, trained on, merged into


@pytest.mark.parametrize("words", [(), ("--quantize", "dequantize")])
def test_train_predict_and_merge(words, adapterhub, tmp_path):
    model = tiny_models.model("llama", "causal-lm")
    checkpoint = own_models.save_checkpoint(model, tmp_path / "coded")
    data = write_tsv(tmp_path / "a.tsv", sentences(24))
    run, merged = tmp_path / "run", tmp_path / "merged"
    line = ("train", "--backbone", checkpoint, "--task", "causal-lm", "--method", "dora", "--train")
    line += (data, "--text", "text", "--label", "label", "--steps", "4", "--output", run, *words)
    succeeded(adapterhub(*line))
    succeeded(adapterhub("predict", run, "a good film"))
    out = succeeded(adapterhub("merge", run, "--output", merged))
    assert "fp32" in out.splitlines()[0]
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    model, _ = ah.load_backbone(str(checkpoint), task="causal-lm", dtype="fp32")
    ah.load(model, run / "adapter")
    inputs = tiny_models.batch()
    torch.testing.assert_close(plain(**inputs).logits, model(**inputs).logits, atol=1e-3, rtol=1e-3)
