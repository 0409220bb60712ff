"""`quantize=` on the command line: train, evaluate, merge, plan."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import tiny_models
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import adapterhub as ah
from adapterhub.backbones import quantized
from adapterhub.inference.open import open_adapter
from adapterhub.training.plan import plan_of, weight_bytes
from adapterhub.training.prepare import prepare
from adapterhub.training.recipe import read

KINDS = [k for k, scheme in quantized.QUANTIZATIONS.items() if find_spec(scheme.library)]
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
    code, out, err = adapterhub("eval", tmp_path / "run", "--data", data[1])
    assert code == 0, err
    assert float(out.split("accuracy")[1].split()[0]) == pytest.approx(accuracy, abs=1e-4)
    merged = ("merge", tmp_path / "run", "--output", tmp_path / "merged", "--base-dtype", "bf16")
    code, out, err = adapterhub(*merged)
    assert code == 0, err
    assert "max |difference|" in out
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    out_folder = tmp_path / "again"
    again = ("merge", tmp_path / "run", "--output", out_folder, "--requantize")
    code, _, err = adapterhub(*again, "--base-dtype", "bf16")
    assert code == 2
    assert "one of the two" in err
    code, out, err = adapterhub(*again)
    assert code == 0, err
    first, merged, loaded, _ = out.splitlines()
    assert first.endswith(", nf4")
    assert "max |difference|" in merged
    assert "largest value" in merged
    assert loaded.startswith("reloaded")
    model = AutoModelForSequenceClassification.from_pretrained(out_folder)
    assert type(model.bert.encoder.layer[0].output.dense).__name__ == "Linear4bit"


def test_nothing_to_quantize_again(train, adapterhub, tmp_path):
    assert train("--method", "lora", "train.max_steps=1")[0] == 0
    code, _, err = adapterhub("merge", tmp_path / "run", "--output", tmp_path / "m", "--requantize")
    assert code == 2
    assert "not quantized" in err
    assert not (tmp_path / "m").exists()


def test_an_unknown_quantization(train, tmp_path):
    code, _, err = train("--quantize", "nf3")
    assert code == 2
    assert "did you mean 'nf4'" in err
    assert not (tmp_path / "run").exists()


def test_a_method_that_trains_whole_weights_is_refused(train, tmp_path):
    code, _, err = train("--method", "full", "--quantize", "int8")
    assert code == 2
    assert "quantized" in err
    assert "lora" in err.split("one of the methods that fit")[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["dtype=fp32", "dtype=bf16", *KINDS])
def test_the_planned_memory_of_weights_is_what_they_take(precision, data, backbone, tmp_path):
    tiny_models.model("bert", "features", hidden_size=128, intermediate_size=256).save_pretrained(
        tmp_path / "wide"
    )
    AutoTokenizer.from_pretrained(backbone).save_pretrained(tmp_path / "wide")
    word = precision if "=" in precision else f"quantize={precision}"
    where = [f"backbone={tmp_path / 'wide'}", f"data.train={data[0]}", f"data.eval={data[1]}"]
    ready = prepare(read(None, [*where, f"output={tmp_path / 'run'}", word]))
    predicted = plan_of(ready)
    plain, _ = ah.load_backbone(str(tmp_path / "wide"), task="classification", labels=["n", "y"])
    assert predicted.backbone == sum(
        p.numel() for n, p in plain.named_parameters() if not n.startswith("classifier")
    )
    ready.adapter.detach()
    real = stored_bytes(ready.model)
    assert predicted.memory["backbone weights"] == pytest.approx(real, rel=0.02)
    assert predicted.memory["backbone weights"] == weight_bytes(ready.adapter)


def codes(tensor):
    """A tensor as plain ones: torchao's kind of its own keeps several."""
    if type(tensor.data) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


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
    code, out, err = adapterhub(*merged)
    assert code == 0, err
    difference = json.loads(out)["merged"]["logits"]
    assert difference > 0.1
    assert json.loads(out)["loaded again"]["logits"] < difference / 10
