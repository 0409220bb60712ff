"""`adapterhub import`."""

from __future__ import annotations

import json

import pytest
import torch

import adapterhub as ah

peft = pytest.importorskip("peft")
from peft_reference import outputs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


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


def test_import_then_use_and_export_again(adapterhub, backbone, tmp_path):
    model = save_with_peft(backbone, tmp_path / "theirs")
    code, out, err = adapterhub(
        "import", tmp_path / "theirs", "--backbone", backbone, "--output", tmp_path / "ours",
        "--labels", "ham,eggs,spam",
    )  # fmt: skip
    assert code == 0, err
    assert "labels: ham, eggs, spam" in out
    assert "it was not checked" in err
    ours, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
    adapter = ah.load(ours, tmp_path / "ours")
    assert adapter.labels == ("ham", "eggs", "spam")
    torch.testing.assert_close(outputs(ours), outputs(model), atol=5e-6, rtol=1e-5)
    code, out, err = adapterhub(
        "export", tmp_path / "ours", "--backbone", backbone, "--output", tmp_path / "back"
    )
    assert code == 0, err
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text(encoding="utf-8"))
    assert sorted(config["target_modules"]) == ["query", "value"]
    assert "eggs" in (tmp_path / "back" / "README.md").read_text(encoding="utf-8")
    from transformers import AutoModelForSequenceClassification

    fresh = AutoModelForSequenceClassification.from_pretrained(backbone, num_labels=3)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "back")
    torch.testing.assert_close(outputs(again), outputs(model), atol=5e-6, rtol=1e-5)


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
        code, _, err = adapterhub(*command)
        assert code == 0, err
    manifest = json.loads((tmp_path / "ours" / "adapter.json").read_text(encoding="utf-8"))
    assert manifest["task"] == "causal-lm"


def test_import_finds_the_backbone_and_the_outputs_in_the_files(adapterhub, backbone, tmp_path):
    save_with_peft(backbone, tmp_path / "theirs", outputs_=1)
    code, _, err = adapterhub("import", tmp_path / "theirs", "--output", tmp_path / "ours")
    assert code == 0, err
    manifest = json.loads((tmp_path / "ours" / "adapter.json").read_text(encoding="utf-8"))
    assert manifest["labels"] == []
    assert manifest["head"]
    assert manifest["task"] == "regression"


def test_unknown_formats_and_wrong_labels_are_refused(adapterhub, backbone, tmp_path):
    code, _, err = adapterhub("import", tmp_path, "--output", tmp_path / "ours")
    assert code == 2
    assert "no adapter in a known format" in err
    save_with_peft(backbone, tmp_path / "theirs")
    code, _, err = adapterhub(
        "import", tmp_path / "theirs", "--backbone", backbone, "--output", tmp_path / "ours",
        "--labels", "ham,eggs",
    )  # fmt: skip
    assert code == 2
    assert "2 labels for 3 outputs" in err
    assert not (tmp_path / "ours").exists()
