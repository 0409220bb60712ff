"""`adapterhub export`."""

import pytest

from adapterhub.adapters import export
from adapterhub.interchange.peft import exporter
from tests.kit import tiny_models
from tests.kit.session import refused, succeeded
from tests.kit.tiny_adapters import write_language_model, write_noisy

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_a_run_is_exported_to_peft(trained, adapterhub, tmp_path):
    succeeded(adapterhub("export", trained, "--output", tmp_path / "theirs"))
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    code, out, _ = adapterhub("export", trained, "--check", "peft")
    assert (code, out) == (0, "peft: no problems; outputs equal with random weights\n")
    code, out, _ = adapterhub("export", trained, "--check", "vllm")
    assert code == 1
    assert "BertForSequenceClassification: vLLM serves LoRA on" in out
    refused(adapterhub("export", trained, "--output", tmp_path / "theirs"), "already exists")


@pytest.fixture
def config_only(tmp_path):
    """A folder with a configuration, and no weights."""
    tiny_models.model("llama", "causal-lm").config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_check_before_training(adapterhub, config_only, tmp_path):
    """Of a method, and of a recipe."""
    where = ("--backbone", config_only)
    code, out, err = adapterhub("export", "--check", "vllm", "--method", "lora(rank=16)", *where)
    assert (code, out) == (0, "vllm: no problems; outputs equal with random weights\n"), err
    code, out, _ = adapterhub("export", "--check", "vllm", "--method", "lora(rank=64)", *where)
    assert code == 1
    assert "--max-lora-rank 64" in out
    words = ("export", "--check", "vllm", "--method", "dora(rank=64)", *where)
    succeeded(adapterhub(*words), "converted to a LoRA of rank 16")
    code, out, _ = adapterhub("export", "--check", "peft", "--method", "houlsby", *where)
    assert code == 1
    assert "houlsby: peft has no such method" in out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"backbone: {config_only}\nmethod: prefix\ntask: causal-lm\noutput: out\n"
        "data: {train: train.txt}\n"
    )
    code, out, _ = adapterhub("export", recipe, "--check", "peft")
    assert (code, "prefix(positions=true)" in out) == (1, True)


def test_an_adapter_is_exported_to_vllm(adapterhub, tmp_path):
    backbone, adapter, output = tmp_path / "llama", tmp_path / "noisy", tmp_path / "out"
    write_language_model(backbone, "llama")
    write_noisy(adapter, backbone, "dora(rank=2)")
    where = ("export", adapter, "--to", "vllm", "--output", output)
    refused(
        adapterhub(*where, "--max-lora-rank", "8"), "as a LoRA of rank 8, noisy loses", "--max-lost"
    )
    assert not output.exists()
    out = succeeded(adapterhub(*where, "--max-lora-rank", "8", "--max-lost", "1"))
    told, note, serve = out.splitlines()
    assert told == f"{output}: noisy for vLLM, a LoRA of rank 8"
    assert note.startswith("- converted to a LoRA of rank 8, which loses up to ")
    assert serve.startswith("vllm serve ")
    assert serve.endswith(f" --enable-lora --max-lora-rank 8 --lora-modules noisy={output}")
    files = {path.name for path in output.iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def test_check_compares_outputs(adapterhub, config_only, monkeypatch):
    where = ("--check", "peft", "--method", "lora", "--backbone", config_only)
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "target_options", lambda *_: {"target_modules": ["o_proj"]})
        code, out, _ = adapterhub("export", *where)
    assert (code, out.splitlines()[-1]) == (1, "peft: 1 problem")
    monkeypatch.setattr(export, "peft_is_installed", lambda: False)
    code, out, _ = adapterhub("export", *where)
    assert (code, out) == (0, "peft: no problems; outputs not compared, peft is missing\n")
