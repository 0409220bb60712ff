"""Save, new process, load: equal logits and labels, for every method on every architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from matrix import CELLS, example
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError

LABELS = {
    "id2label": {0: "ham", 1: "eggs", 2: "spam"},
    "label2id": {"ham": 0, "eggs": 1, "spam": 2},
}


def logits(model):
    with torch.no_grad():
        inputs = tiny_models.batch()
        return model(**inputs, **tiny_models.decoder_inputs(model, inputs)).logits


def in_a_new_process(folder: Path) -> None:
    """What the child process runs: load every adapter of a folder, write its logits and labels."""
    found, labels = {}, {}
    for method, architecture in CELLS:
        model = tiny_models.usual_model(architecture)  # it knows neither the labels nor the head
        adapter = ah.load(model, folder / f"{method}-{architecture}")
        found[f"{method}-{architecture}"] = logits(model)
        labels[f"{method}-{architecture}"] = adapter.labels
    save_file(found, folder / "found.safetensors")
    (folder / "labels.json").write_text(json.dumps(labels), encoding="utf-8")


def test_a_new_process_computes_equal_logits(tmp_path):
    expected = {}
    for method, architecture in CELLS:
        model = tiny_models.usual_model(architecture, **LABELS)
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter)
        adapter.save(tmp_path / f"{method}-{architecture}")
        expected[f"{method}-{architecture}"] = logits(model)
    code = f"import test_saving as t; t.in_a_new_process(t.Path({str(tmp_path)!r}))"
    here = Path(__file__).parent
    env_path = [str(here), str(here.parent), *sys.path]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {env_path!r}; {code}"], check=True
    )
    found = load_file(tmp_path / "found.safetensors")
    assert len(found) == len(CELLS) > 0
    for cell, value in expected.items():
        assert torch.equal(found[cell], value), cell
    labels = json.loads((tmp_path / "labels.json").read_text(encoding="utf-8"))
    for cell, names in labels.items():
        headless = cell.endswith(tiny_models.WITHOUT_CLASSIFIER)
        assert names == ([] if headless else ["ham", "eggs", "spam"]), cell
    assert len(labels) == len(CELLS)


def test_a_new_process_needs_the_base_and_the_adapter_alone(backbone, tmp_path):
    """Train with a head, reload in a fresh process with nothing but base id + adapter: logits are
    identical, and the labels are restored without the user passing them."""
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
        place, base = sys.argv[1:]
        opened = open_adapter(f"{place}/adapter", base)
        inputs = opened.setting.tokenizer(["a good movie"], return_tensors="pt")
        with torch.no_grad():
            found = opened.model.eval()(**inputs).logits
        assert torch.equal(found, load_file(f"{place}/expected.safetensors")["logits"])
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
    assert str(error.value).count("bf16-") == 2, "both identities are named"
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


def test_a_model_without_a_head_is_told_how_to_get_one(saved):
    folder, _ = saved
    with pytest.raises(MismatchError, match="has a task head") as error:
        ah.load(tiny_models.model("bert", "features"), folder)
    assert "ham" in error.value.hint


def test_loading_leaves_the_random_generator_alone(saved):
    folder, _ = saved
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ah.load(tiny_models.model("bert"), folder)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    "name", ["lora", "mlp", "a.b/c", "größe", "adapterhub", "training", "default-0"]
)
def test_any_name_works(tmp_path, name):
    model = tiny_models.model("gpt2")
    first, second = ah.attach(model, "lora", name="x"), ah.attach(model, "mam", name=name)
    tiny_models.scramble(second)
    expected = logits(model)
    second.save(tmp_path / "adapter")
    second.detach()
    again = ah.load(model, tmp_path / "adapter")
    assert again.name == name
    assert torch.equal(logits(model), expected)
    first.detach()
    assert torch.equal(logits(model), expected)


def test_the_fingerprint_ignores_dtype_and_knows_weights():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "full")
    identity = adapter.manifest().backbone.fingerprint
    tiny_models.scramble(adapter)
    assert adapter.manifest().backbone.fingerprint == identity, "the backbone's, not the adapter's"
    half = ah.attach(tiny_models.model("bert").bfloat16(), "lora").manifest().backbone.fingerprint
    other = ah.attach(tiny_models.model("bert", seed=1), "lora").manifest().backbone.fingerprint
    assert half == identity != other
