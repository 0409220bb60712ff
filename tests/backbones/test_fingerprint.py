"""The fingerprint of a backbone: the same for its files and for every way to load them."""

from __future__ import annotations

import json
import time

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.backbones.fingerprint import RUN, RUNS, fingerprint_of, sampled_runs
from adapterhub.errors import BackboneError

GOLDEN = "bf16-d36bf62e0032fb21fe25ab3b45d44a1b1e4e7ab7903e9b964d90ac7f59d006c2"


def of_model(model):
    """Read the fingerprint from an adapter's manifest."""
    return (
        ah.attach(model, "lora" if model.dtype == torch.float64 else "full")
        .manifest()
        .backbone.fingerprint
    )


def saved(architecture, folder, task="classification", **config):
    tiny_models.model(architecture, task, **config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_the_files_and_each_load_of_them_agree(architecture, tmp_path):
    """It is the same for every transformers class and dtype, and differs for other weights."""
    tiny_models.usual_model(architecture).save_pretrained(tmp_path)
    expected = ah.fingerprint(tmp_path)
    auto = transformers.AutoModel
    assert of_model(tiny_models.usual_model(architecture)) == expected, "never saved"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = auto.from_pretrained(tmp_path, dtype=dtype)
        assert of_model(model) == expected, dtype
    assert ah.fingerprint(saved_again(architecture, tmp_path / "other")) != expected


CASTS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "half-float": lambda model: model.half().float(),
    "half-bfloat16": lambda model: model.half().bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_a_cast_in_memory_is_the_same_backbone(architecture, cast, tmp_path):
    """And other weights that are cast in memory are another one."""
    tiny_models.usual_model(architecture).save_pretrained(tmp_path / "a")
    expected = ah.fingerprint(tmp_path / "a")
    auto = transformers.AutoModel
    assert of_model(CASTS[cast](auto.from_pretrained(tmp_path / "a"))) == expected
    other = auto.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        other.get_input_embeddings().weight[0] += 1.0
    assert of_model(CASTS[cast](other)) != expected


def saved_again(architecture, folder):
    tiny_models.usual_model(architecture, seed=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_checkpoints_in_other_dtypes(stored, tmp_path):
    model = tiny_models.model("llama", "causal-lm").to(stored)
    model.save_pretrained(tmp_path)
    expected = ah.fingerprint(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert of_model(loaded) == expected, dtype


@pytest.mark.parametrize("task", ["features", "classification", "masked-lm", "tagging"])
def test_every_model_class_of_a_checkpoint_has_its_fingerprint(task, backbone):
    labels = ["a", "b"] if task in ("classification", "tagging") else []
    model, _ = ah.load_backbone(str(backbone), task=task, labels=labels)
    assert of_model(model) == ah.fingerprint(backbone)


def test_shards_and_torch_files_are_the_same_checkpoint(tmp_path):
    """The model is wide enough for its tensors to be sampled."""
    model = tiny_models.model("bert", "features", hidden_size=128, intermediate_size=512)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    (tmp_path / "torch").mkdir()
    torch.save(model.state_dict(), tmp_path / "torch" / "pytorch_model.bin")
    (tmp_path / "legacy").mkdir()
    path = tmp_path / "legacy" / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    expected = of_model(model)
    for folder in ("one", "many", "torch", "legacy"):
        assert ah.fingerprint(tmp_path / folder) == expected, folder


def test_other_weights_of_the_same_shape_are_another_backbone(tmp_path):
    tensors = load_file(saved("bert", tmp_path) / "model.safetensors")
    names = [n for n in tensors if ".layer.0." in n or "word_embeddings" in n]
    assert len(names) > 10
    expected = ah.fingerprint(tmp_path)
    for name in names:
        changed = {**tensors, name: tensors[name] * 1.01 + 0.01}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        assert ah.fingerprint(tmp_path) != expected, name
    swapped = {swap_layers(n): t for n, t in tensors.items()}
    save_file(swapped, tmp_path / "model.safetensors", {"format": "pt"})
    assert ah.fingerprint(tmp_path) != expected


def swap_layers(name):
    return name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")


def test_renamed_modules_change_nothing():
    """An adapter saved with one transformers version loads with another that renamed modules."""
    named = list(tiny_models.model("llama", "features").named_parameters())
    renamed = [(n.replace("self_attn", "attention").replace("mlp", "ffn"), t) for n, t in named]
    assert renamed != named
    assert fingerprint_of(renamed) == fingerprint_of([(f"model.{n}", t) for n, t in named])


def test_heads_poolers_and_buffers_are_excluded():
    named = dict(tiny_models.model("bert", "features").named_parameters())
    more = {
        "classifier.0.weight": torch.ones(3, 4),
        "encoder.layer.0.attention.rotary_emb.inv_freq": torch.ones(4),
        "h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "pooler.dense.weight": torch.ones(2, 2),
    }
    assert fingerprint_of({**named, **more}.items()) == fingerprint_of(named.items())


def test_the_definition_is_frozen():
    """Adapters of every past release must still match their backbones."""
    whole = ((torch.arange(24.0) * 7 % 31) - 15).reshape(4, 6) / 16
    wide = ((torch.arange(70 * 90) * 37 % 61) - 30).reshape(70, 90) / 256
    named = [("encoder.layer.0.q.weight", whole), ("encoder.layer.1.q.weight", wide),
             ("embeddings.word_embeddings.weight", wide.T), ("pooler.weight", whole)]  # fmt: skip
    assert fingerprint_of(named) == GOLDEN
    assert sampled_runs(RUN * RUNS) == [(0, RUN * RUNS)]
    assert sampled_runs(10**9)[0] == (0, RUN)
    assert sampled_runs(10**9)[-1] == (10**9 - RUN, RUN)


def test_a_modified_half_precision_model_is_another_backbone(tmp_path):
    """Weights may change in memory after loading, by a merge or by training."""
    expected = ah.fingerprint(saved("llama", tmp_path, "features"))
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float16)
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert of_model(model) != expected


class Codes(torch.nn.Linear):
    """A linear layer with codes as its weight, as in quantized layers."""

    def __init__(self, host):
        super().__init__(host.in_features, host.out_features, bias=False)
        codes = host.weight.detach().mul(100).to(torch.int8).reshape(-1, 1)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)


def quantize(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Codes(child))
    return model


def test_a_quantized_load_has_the_fingerprint_of_its_files(tmp_path):
    expected = ah.fingerprint(saved("llama", tmp_path, "features"))
    model = quantize(transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float16))
    named = list(model.named_parameters())
    assert fingerprint_of(named, tmp_path) == expected
    with pytest.raises(BackboneError, match="quantized"):
        fingerprint_of(named)
    with torch.no_grad():
        model.embed_tokens.weight.add_(1)
    with pytest.raises(BackboneError, match="quantized"):
        fingerprint_of(named, tmp_path)


def test_only_the_sampled_bytes_are_read(tmp_path, monkeypatch):
    """An 8B checkpoint takes less than 2 s; this one is a sparse file of 6 GB."""
    header, end = {}, 0
    for i in range(24):
        header[f"model.layers.{i}.mlp.up_proj.weight"] = {
            "dtype": "BF16", "shape": [8192, 16384], "data_offsets": [end, end := end + 2**28],
        }  # fmt: skip
    data = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as handle:
        handle.write(len(data).to_bytes(8, "little") + data)
        handle.truncate(8 + len(data) + end)
    start = time.process_time()
    assert ah.fingerprint(tmp_path).startswith("bf16-")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x04" + b"\0" * 7 + b"junk"]
)
def test_a_broken_file_is_named(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(BackboneError, match=r"model\.safetensors|no identity"):
        ah.fingerprint(tmp_path)


def test_a_truncated_file_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(BackboneError, match="contains no weights"):
        ah.fingerprint(tmp_path)
    path = saved("bert", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40_000])
    with pytest.raises(BackboneError, match="truncated"):
        ah.fingerprint(tmp_path)


def test_attached_adapters_do_not_change_the_fingerprint():
    model = tiny_models.model("bert")
    before = of_model(model)
    ah.attach(model, "mam", name="more")
    assert find_state(model).fingerprint() == before
