"""An adapter saved in one process gives equal logits and labels in another, for every cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import selection, tiny_models
from tests.kit.matrix import CELLS, example
from tests.kit.tiny_models import logits

# By default each method on an encoder, and one on each architecture.
SAVED = [(m, a) for m, a in CELLS if a == "bert" or m == "lora" or selection.ALL]
LABELS = {
    "id2label": {0: "ham", 1: "eggs", 2: "spam"},
    "label2id": {"ham": 0, "eggs": 1, "spam": 2},
}


def load_all(folder: Path) -> None:
    """Load every adapter of a folder and write its logits and labels; runs in the child process."""
    outputs, labels = {}, {}
    for method, architecture in SAVED:
        model = tiny_models.usual_model(architecture)  # without the labels and the trained head
        adapter = ah.load(model, folder / f"{method}-{architecture}")
        outputs[f"{method}-{architecture}"] = logits(model)
        labels[f"{method}-{architecture}"] = adapter.labels
    save_file(outputs, folder / "outputs.safetensors")
    (folder / "labels.json").write_text(json.dumps(labels), encoding="utf-8")


@pytest.mark.apart
def test_a_new_process_computes_equal_logits(tmp_path):
    expected = {}
    for method, architecture in SAVED:
        model = tiny_models.usual_model(architecture, **LABELS)
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter)
        adapter.save(tmp_path / f"{method}-{architecture}")
        expected[f"{method}-{architecture}"] = logits(model)
    code = f"import test_saving as t; t.load_all(t.Path({str(tmp_path)!r}))"
    path = [str(Path(__file__).parent), *sys.path]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], check=True
    )
    outputs = load_file(tmp_path / "outputs.safetensors")
    assert len(outputs) == len(SAVED) > 0
    for cell, value in expected.items():
        assert torch.equal(outputs[cell], value), cell
    labels = json.loads((tmp_path / "labels.json").read_text(encoding="utf-8"))
    for cell, names in labels.items():
        headless = cell.endswith(tiny_models.WITHOUT_CLASSIFIER)
        assert names == ([] if headless else ["ham", "eggs", "spam"]), cell
    assert len(labels) == len(SAVED)


@pytest.mark.apart
def test_a_new_process_needs_only_the_backbone_and_the_adapter(backbone, tmp_path):
    """Logits are identical and labels are restored; the user passes neither head nor labels."""
    labels = ["ham", "eggs", "spam"]
    model, tokenizer = ah.load_backbone(str(backbone), task="classification", labels=labels)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "adapter")
    inputs = tokenizer(["a good movie"], return_tensors="pt")
    with torch.no_grad():
        save_file({"logits": model.eval()(**inputs).logits}, tmp_path / "expected.safetensors")
    code = """if True:
        import json, sys, torch
        from safetensors.torch import load_file
        from adapterhub.inference.open import open_adapter
        folder, base = sys.argv[1:]
        opened = open_adapter(f"{folder}/adapter", base)
        inputs = opened.setting.tokenizer(["a good movie"], return_tensors="pt")
        with torch.no_grad():
            logits = opened.model.eval()(**inputs).logits
        assert torch.equal(logits, load_file(f"{folder}/expected.safetensors")["logits"])
        print(json.dumps(opened.model.config.id2label))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(backbone)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert list(json.loads(done.stdout.splitlines()[-1]).values()) == labels


@pytest.fixture
def saved(tmp_path):
    model = tiny_models.model("bert", **LABELS)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


def test_another_backbone_of_the_same_shape_is_refused(saved):
    folder, expected = saved
    other = tiny_models.model("bert", seed=1)
    before = logits(other)
    with pytest.raises(MismatchError, match="trained on a different backbone") as error:
        ah.load(other, folder)
    assert str(error.value).count("v2-") == 2, "the message names both fingerprints"
    assert torch.equal(logits(other), before)
    assert not any("adapterhub" in key for key in other.state_dict())
    ah.load(other, folder, any_backbone=True)
    assert not torch.equal(logits(other), before)
    assert not torch.equal(logits(other), expected)


def test_a_backbone_of_another_size_lists_every_tensor(saved):
    folder, _ = saved
    with pytest.raises(MismatchError) as error:
        ah.load(tiny_models.model("bert", hidden_size=16), folder, any_backbone=True)
    assert len(error.value.offenders) >= 8


def test_the_head_keeps_its_own_number_of_labels(saved):
    folder, expected = saved
    model = tiny_models.model("bert", num_labels=5)
    adapter = ah.load(model, folder)
    assert logits(model).shape == expected.shape
    assert model.num_labels == model.config.num_labels == 3
    assert model(**tiny_models.batch(), labels=torch.tensor([0, 1, 2])).loss.isfinite()
    adapter.detach()
    assert model.num_labels == 5
    assert logits(model).shape[-1] == 5


def test_a_model_without_a_head_is_refused_with_a_hint(saved):
    folder, _ = saved
    with pytest.raises(MismatchError, match="has a task head") as error:
        ah.load(tiny_models.model("bert", "features"), folder)
    assert "ham" in error.value.hint


def test_loading_uses_no_random_numbers(saved):
    folder, _ = saved
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ah.load(tiny_models.model("bert"), folder)
    assert torch.equal(torch.rand(1), expected)


def test_the_fingerprint_depends_on_weights_not_on_dtype():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "full")
    expected = adapter.manifest().backbone.fingerprint
    tiny_models.scramble(adapter)
    assert adapter.manifest().backbone.fingerprint == expected, "it depends on the adapter"
    half = ah.attach(tiny_models.model("bert").bfloat16(), "lora").manifest().backbone.fingerprint
    other = ah.attach(tiny_models.model("bert", seed=1), "lora").manifest().backbone.fingerprint
    assert half == expected != other
