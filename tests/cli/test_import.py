"""`adapterhub import`."""

import itertools
import json
import shutil

import pytest
import safetensors.torch
import torch

import adapterhub as ah
from tests.kit.selection import long_table

peft = pytest.importorskip("peft")
from tests.kit.peers import outputs  # noqa: E402
from tests.kit.session import refused, succeeded  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save_with_peft(backbone, folder, outputs_=3):
    """Save a LoRA of peft, with random weights, for the backbone in a folder."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(backbone, num_labels=outputs_)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def test_an_imported_adapter_computes_the_same_with_other_labels(adapterhub, backbone, tmp_path):
    model = save_with_peft(backbone, tmp_path / "theirs")
    words = ("import", tmp_path / "theirs", "--backbone", backbone, "--output", tmp_path / "ours")
    refused(adapterhub(*words, "--labels", "ham,eggs"), "2 labels for 3 outputs")
    assert not (tmp_path / "ours").exists()
    code, out, err = adapterhub(*words, "--labels", "ham,eggs,spam")
    assert code == 0, err
    assert "labels: ham, eggs, spam" in out
    assert "it was not checked" not in err
    ours, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
    adapter = ah.load(ours, tmp_path / "ours")
    assert adapter.labels == ("ham", "eggs", "spam")
    torch.testing.assert_close(outputs(ours), outputs(model), atol=5e-6, rtol=1e-5)


def test_an_imported_language_model_is_exported_and_used_without_its_task(
    adapterhub, backbones, tmp_path
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(backbones("llama"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "theirs")
    for command in (
        ("import", tmp_path / "theirs", "--output", tmp_path / "ours"),
        ("export", tmp_path / "ours", "--output", tmp_path / "back"),
        ("predict", tmp_path / "ours", "a good movie"),
    ):
        succeeded(adapterhub(*command))
    manifest = json.loads((tmp_path / "ours" / "adapter.json").read_text(encoding="utf-8"))
    assert manifest["task"] == "causal-lm"


def test_import_finds_the_backbone_and_the_outputs_in_the_files(adapterhub, backbone, tmp_path):
    save_with_peft(backbone, tmp_path / "theirs", outputs_=1)
    succeeded(adapterhub("import", tmp_path / "theirs", "--output", tmp_path / "ours"))
    manifest = json.loads((tmp_path / "ours" / "adapter.json").read_text(encoding="utf-8"))
    assert manifest["labels"] == []
    assert manifest["head"]
    assert manifest["task"] == "regression"


FOLDERS = {
    "name": "l",
    "dotted": "./l",
    "below": "sub/../l",
    "absolute": "{here}/l",
    "of the user": "~/l",
    "like a Hub id": "sub/l",
    "a copy": "{here}/copy",
}


@pytest.fixture(scope="module")
def written(backbones, tmp_path_factory):
    """A folder with a backbone, a copy, other weights, and an adapter of peft for each name."""
    here = tmp_path_factory.mktemp("here")
    (here / "sub").mkdir()
    for name in ("l", "copy", "sub/l", "other"):
        shutil.copytree(backbones("bert"), here / name)
    weights = here / "other" / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    changed = {name: tensor + 1.0 for name, tensor in tensors.items()}
    safetensors.torch.save_file(changed, weights, metadata={"format": "pt"})
    save_with_peft(here / "l", here / "theirs")
    for name, path in FOLDERS.items():
        shutil.copytree(here / "theirs", here / name)
        config = json.loads((here / name / "adapter_config.json").read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = path.format(here=here)
        (here / name / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return here


TYPED = [name for name in FOLDERS if name != "of the user"]  # which the shell writes in full


@long_table(("recorded", "given"), itertools.product(FOLDERS, TYPED), 8)
def test_a_folder_is_the_same_backbone_however_it_is_written(
    recorded, given, written, adapterhub, monkeypatch, tmp_path
):
    monkeypatch.chdir(written)
    monkeypatch.setenv("HOME", str(written))
    path = FOLDERS[given].format(here=written)
    code, _, err = adapterhub("import", recorded, "--backbone", path, "--output", tmp_path / "ours")
    assert code == 0, err
    assert "checked" not in err


@long_table("recorded", FOLDERS, 3)
def test_a_folder_with_other_weights_is_refused_with_flags(
    recorded, written, adapterhub, monkeypatch, tmp_path
):
    monkeypatch.chdir(written)
    monkeypatch.setenv("HOME", str(written))
    words = ("import", recorded, "--backbone", "other", "--output", tmp_path / "ours")
    remedy = f"--backbone {FOLDERS[recorded].format(here=written)}, or --any-backbone"
    refused(adapterhub(*words), "a different backbone", remedy)
    assert adapterhub(*words, "--any-backbone")[0] == 0
    refused(adapterhub(*words, "--any-backbone"), "--overwrite")
    assert adapterhub(*words, "--any-backbone", "--overwrite")[0] == 0
