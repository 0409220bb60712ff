"""A LoRA in a GGUF file: its updates, with rows in llama.cpp's order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError, MismatchError, OutputError

gguf = pytest.importorskip("gguf")
EVERYWHERE = "sites=['attn.*', 'ffn.*']"


def updates_in(file: Path, model) -> dict[str, torch.Tensor]:
    """Read the update of each weight as transformers reads a weight of a GGUF file."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    reader = gguf.GGUFReader(file)
    tensors = {each.name: torch.tensor(each.data.copy()) for each in reader.tensors}
    processor = LlamaTensorProcessor(config=model.config.to_dict())
    found = {}
    for name in [each.removesuffix(".lora_a") for each in tensors if each.endswith(".lora_a")]:
        delta = (tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]).numpy()
        if ".attn_q." in name or ".attn_k." in name:
            heads = model.config.num_attention_heads, model.config.num_key_value_heads
            delta = processor._reverse_permute_weights(delta, *heads[: 1 + (".attn_k." in name)])
        found[name] = torch.tensor(delta)
    return found


@pytest.mark.parametrize(
    "spec",
    [
        "lora(rank=3, alpha=5)",
        f"lora(rank=2, {EVERYWHERE})",
        "rslora(rank=4)",
        "pissa(rank=2)",
        "lora(ranks={'attn.q': 3, 'attn.v': 1}, sites=[attn.q, attn.v])",
        ["lora(rank=2)", "rslora(rank=1, sites=[attn.k])"],
    ],
    ids=str,
)
def test_the_file_has_the_updates_that_merging_adds(spec, tmp_path):
    model = tiny_models.model("llama", "causal-lm")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapter = ah.attach(model, spec, name="a")
    tiny_models.scramble(adapter)
    adapter.export(tmp_path / "a.gguf", format="gguf")
    found = updates_in(tmp_path / "a.gguf", model)
    ah.merge(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    changed = 0
    for path, weight in model.state_dict().items():
        delta = weight - before[path]
        name = names.get_name(path, try_suffixes=(".weight",))
        if name in found:
            torch.testing.assert_close(found[name], delta, atol=1e-5, rtol=1e-4)
            changed += 1
        else:
            assert not delta.any(), path
    assert changed == len(found) > 0


def test_the_metadata_are_those_of_an_adapter(tmp_path):
    model = tiny_models.model("llama", "causal-lm")
    ah.attach(model, "lora", name="a").export(tmp_path / "a.gguf", format="gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    found = {name: field.contents() for name, field in fields.items() if "." in name}
    expected = {"general.architecture": "llama", "general.type": "adapter", "general.name": "a"}
    expected |= {"adapter.type": "lora", "adapter.lora.alpha": 0.0}
    assert found.items() >= expected.items()


@pytest.mark.parametrize(
    ("architecture", "spec", "reason"),
    [
        ("llama", "dora", "DoRA"),
        ("llama", "ia3", "IA3"),
        ("llama", "pfeiffer", "pfeiffer"),
        ("llama", ["lora", "norms"], "norm"),
        ("gpt2", "lora", "gpt2"),
    ],
    ids=str,
)
def test_what_llama_cpp_cannot_compute_is_refused(architecture, spec, reason, tmp_path):
    model = tiny_models.model(architecture, "causal-lm")
    adapter = ah.attach(model, spec, name="a")
    with pytest.raises(MismatchError, match=reason):
        adapter.export(tmp_path / "a.gguf", format="gguf")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_on_request(tmp_path):
    model, file = tiny_models.model("llama", "causal-lm"), tmp_path / "a.gguf"
    adapter = ah.attach(model, "lora", name="a")
    adapter.export(file, format="gguf")
    with pytest.raises(OutputError, match=r"a\.gguf exists"):
        adapter.export(file, format="gguf")
    adapter.export(file, format="gguf", overwrite=True)
    with pytest.raises(OutputError, match="not the name of a GGUF file"):
        adapter.export(tmp_path / "folder", format="gguf")
    with pytest.raises(ConfigError, match="cannot be exported to 'ggml'"):
        adapter.export(file, format="ggml")
