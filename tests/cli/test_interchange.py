"""`adapterhub import` and `adapterhub export`, as a user types them."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch

import adapterhub as ah

peft = pytest.importorskip("peft")
from peft_reference import outputs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def theirs(backbone, folder, outputs_=3):
    """An adapter that peft trained on the backbone in a folder."""
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
    model = theirs(backbone, tmp_path / "theirs")
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


def test_import_finds_the_backbone_and_the_outputs_in_the_files(adapterhub, backbone, tmp_path):
    theirs(backbone, tmp_path / "theirs", outputs_=1)
    code, _, err = adapterhub("import", tmp_path / "theirs", "--output", tmp_path / "ours")
    assert code == 0, err
    manifest = json.loads((tmp_path / "ours" / "adapter.json").read_text(encoding="utf-8"))
    assert manifest["labels"] == []
    assert manifest["head"]
    assert manifest["task"] == "regression"


def test_import_says_what_is_wrong(adapterhub, backbone, tmp_path):
    code, _, err = adapterhub("import", tmp_path, "--output", tmp_path / "ours")
    assert code == 2
    assert "no adapter of a known format" in err
    theirs(backbone, tmp_path / "theirs")
    code, _, err = adapterhub(
        "import", tmp_path / "theirs", "--backbone", backbone, "--output", tmp_path / "ours",
        "--labels", "ham,eggs",
    )  # fmt: skip
    assert code == 2
    assert "2 labels for 3 outputs" in err
    assert not (tmp_path / "ours").exists()


def test_a_run_goes_to_peft(train, adapterhub, tmp_path):
    assert train("--method", "lora(rank=4)", "train.epochs=1")[0] == 0
    code, _, err = adapterhub("export", tmp_path / "run", "--output", tmp_path / "theirs")
    assert code == 0, err
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    code, out, _ = adapterhub("export", tmp_path / "run", "--check", "peft")
    assert (code, out) == (0, "peft: nothing in the way\n")
    code, out, _ = adapterhub("export", tmp_path / "run", "--check", "vllm")
    assert code == 1
    assert "modules_to_save" in out
    code, _, err = adapterhub("export", tmp_path / "run", "--output", tmp_path / "theirs")
    assert code == 2
    assert "already exists" in err


@pytest.fixture
def config_only(tmp_path):
    """A folder with a configuration, and no weights."""
    tiny_models.model("llama", "causal-lm").config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_check_before_training(adapterhub, config_only):
    where = ("--backbone", config_only)
    code, out, err = adapterhub("export", "--check", "vllm", "--method", "lora(rank=16)", *where)
    assert (code, out) == (0, "vllm: nothing in the way\n"), err
    code, out, _ = adapterhub("export", "--check", "vllm", "--method", "dora(rank=64)", *where)
    assert code == 1
    assert "--max-lora-rank 64" in out
    assert "DoRA" in out
    code, out, _ = adapterhub("export", "--check", "peft", "--method", "houlsby", *where)
    assert code == 1
    assert "houlsby: peft has no such method" in out
    code, _, err = adapterhub("export", "--check", "tgi", "--method", "lora", *where)
    assert code == 2
    assert "one of peft, vllm" in err


def test_check_of_a_recipe(adapterhub, config_only, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"backbone: {config_only}\nmethod: prefix\ntask: causal-lm\noutput: out\n"
        "data: {train: train.txt}\n"
    )
    code, out, _ = adapterhub("export", recipe, "--check", "peft")
    assert code == 1
    assert "prefix(positions=true)" in out


def test_nothing_to_do(adapterhub):
    code, _, err = adapterhub("export")
    assert code == 2
    assert "adapterhub export ADAPTER --output DIR" in err
