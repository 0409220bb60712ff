"""The identity of a backbone: the same for its files and for every way to load them.

tests/attacks/test_other_backbones.py has what it accepts and refuses on every architecture."""

import json
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import adapterhub as ah
from adapterhub.adapters.state import new_state
from adapterhub.backbones import checkpoint, fingerprint
from adapterhub.backbones.checkpoint import named_tensors
from adapterhub.errors import BackboneError
from tests.kit import tiny_models
from tests.kit.own_models import quantize
from tests.kit.selection import long_table

GOLDEN = "v2-25258faf575cb5e72489a612da31c578294c037c79c763397e2e61524cb18f22"
GOLDEN_BODY = "7a45b1b6aa833947ad8eb0ddc667f4dd7dd7bf46c927a9ef9b42184d540e2122"


def saved(architecture, folder, task="classification", **config):
    tiny_models.model(architecture, task, **config).save_pretrained(folder)
    return folder


def test_names_of_2019_and_buffers_of_2020_change_nothing(tmp_path):
    """Checkpoints have `gamma` and `beta`, and constants that the model computes."""
    tensors = load_file(saved("bert", tmp_path, "features") / "model.safetensors")
    expected = fingerprint.identity_of_files(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): t
        for name, t in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["embeddings.position_ids"] = torch.arange(64)
    old["encoder.layer.0.attention.self.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(
        {f"bert.{n}": t for n, t in old.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    found = fingerprint.identity_of_files(tmp_path)
    assert (found.fingerprint, found.parts) == (expected.fingerprint, expected.parts)


def test_the_definition_is_frozen():
    """Adapters of every past release must still match their backbones."""
    size = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 500}
    model = tiny_models.model("bert", "features", **size)
    with torch.no_grad():
        for index, tensor in enumerate(model.parameters()):
            values = (torch.arange(tensor.numel()) * (7 + 2 * index) % 61 - 30) / 256
            tensor.copy_(values.reshape(tensor.shape))
    identity = fingerprint.identity_of_model(
        model, named_tensors(model), vocabulary=fingerprint.Vocabulary(500, 490)
    )
    assert identity.fingerprint == GOLDEN
    assert identity.parts["body"].values == GOLDEN_BODY
    assert sorted(identity.parts) == ["body", "embedding", "pooler"]
    record = json.loads(json.dumps(identity.record()))
    assert fingerprint.BackboneIdentity.from_record(identity.fingerprint, record) == identity


def test_a_quantized_load_has_the_identity_of_its_files(tmp_path):
    expected = fingerprint.identity_of_files(saved("llama", tmp_path, "features"))
    model = quantize(transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float16))
    named = named_tensors(model)
    found = fingerprint.identity_of_model(model, named, origin=tmp_path)
    assert (found.fingerprint, found.parts) == (expected.fingerprint, expected.parts)
    with pytest.raises(BackboneError, match="quantized"):
        fingerprint.identity_of_model(model, named)
    with torch.no_grad():
        model.embed_tokens.weight.add_(1)
    with pytest.raises(BackboneError, match="quantized"):
        fingerprint.identity_of_model(model, named, origin=tmp_path)


def test_equal_files_are_enough(tmp_path, monkeypatch):
    """Of a backbone on the Hub no value is read, only the sha256 of its files, and these once."""
    monkeypatch.setattr(checkpoint, "TICK", 0)
    saved("llama", tmp_path / "a", "features")
    model = transformers.AutoModel.from_pretrained(tmp_path / "a")
    trained, remembered = new_state(model).identity(), fingerprint.remembered

    def only_sha256(files, key, compute):
        assert key == "sha256"
        return remembered(files, key, compute)

    monkeypatch.setattr(fingerprint, "SMALL", 0)
    monkeypatch.setattr(fingerprint, "remembered", only_sha256)
    assert new_state(model).identities(trained).identity(complete=True) == trained


def sparse(folder, layers=24):
    """Write the checkpoint of a Llama with 6 GB of zeros, which take no space."""
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=16384, num_hidden_layers=layers, vocab_size=8
    )
    config.save_pretrained(folder)
    header, end = {}, 0
    for i in range(layers):
        header[f"model.layers.{i}.mlp.up_proj.weight"] = {
            "dtype": "BF16", "shape": [16384, 8192], "data_offsets": [end, end := end + 2**28],
        }  # fmt: skip
    data = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as handle:
        handle.write(len(data).to_bytes(8, "little") + data)
        handle.truncate(8 + len(data) + end)
    return folder


def test_the_fingerprint_reads_a_sample(tmp_path):
    """8 billion parameters take less than 2 s."""
    start = time.process_time()
    assert ah.fingerprint(sparse(tmp_path)).startswith("v2-")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("file", "data", "problem"),
    [
        *(("model.safetensors", data, r"model\.safetensors|no identity") for data in (
            b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x04" + b"\0" * 7 + b"junk"
        )),
        ("model.safetensors", 40_000, "truncated"),
        ("model.safetensors", None, "contains no weights"),
        ("config.json", None, "no configuration"),
    ],
)  # fmt: skip
def test_a_broken_or_missing_file_is_named(file, data, problem, tmp_path):
    path = saved("bert", tmp_path) / file
    whole = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(whole[:-data] if isinstance(data, int) else data)
    with pytest.raises(BackboneError, match=problem):
        ah.fingerprint(tmp_path)


@long_table("architecture", tiny_models.ARCHITECTURES, 4)
def test_it_is_the_same_in_files_and_for_every_task(architecture, tmp_path):
    model = tiny_models.usual_model(architecture)
    expected = fingerprint.function_config(model.config)
    assert json.loads(json.dumps(expected)) == expected
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=7)
    assert fingerprint.function_config(loaded) == expected
    base = tiny_models.model(architecture, "features", **tiny_models.NO_DROPOUT)
    assert fingerprint.config_differences(expected, fingerprint.function_config(base.config)) == []
    assert not {"vocab_size", "pad_token_id", "use_cache"} & expected.keys()
    assert len(expected) > 4


def test_only_fields_that_both_have_are_compared():
    before = {"a": 1, "rope": {"theta": 1.0, "type": "default"}, "old": 3}
    now = {"a": 2, "rope": {"theta": 2.0, "factor": 8}, "new": 4}
    assert fingerprint.config_differences(before, now) == [
        "a: 2, trained with 1",
        "rope.theta: 2.0, trained with 1.0",
    ]


def test_the_fields_that_count():
    """The length of a dynamic rope, options that differ between layers, nested configurations."""
    plain = transformers.LlamaConfig(max_position_embeddings=64)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    assert "max_position_embeddings" not in fingerprint.function_config(plain)
    assert fingerprint.function_config(dynamic)["max_position_embeddings"] == 64
    gemma = fingerprint.function_config(transformers.CONFIG_MAPPING["gemma4_text"]())
    assert (gemma["head_dim"], gemma["per_layer_config"]["05"]) == (256, {"head_dim": 512})
    llava = transformers.LlavaConfig()
    llava.text_config.rms_norm_eps = 0.5
    assert fingerprint.function_config(llava)["text_config"]["rms_norm_eps"] == 0.5


@pytest.fixture
def read(monkeypatch):
    """List whether each reading of a model in memory was a sample."""
    readings = []
    original = fingerprint.LoadedBackbone._digests

    def counted(self, *, sampled):
        readings.append(sampled)
        return original(self, sampled=sampled)

    monkeypatch.setattr(fingerprint.LoadedBackbone, "_digests", counted)
    return readings


CHANGES = {
    "in place": lambda layer: layer.weight[1, 2].add_(1),
    "through data": lambda layer: layer.weight.data[1, 2].add_(1),
    "through numpy": lambda layer: layer.weight.detach().numpy()[1].__iadd__(1),
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight.detach() * 2),
    "other parameter": lambda layer: setattr(
        layer, "weight", nn.Parameter(layer.weight.detach() * 2)
    ),
    "rows moved": lambda layer: layer.weight.data.copy_(layer.weight.roll(1, 0)),
    "columns moved": lambda layer: layer.weight.data.copy_(layer.weight.roll(1, 1)),
}


def layer_of(model):
    return model.bert.encoder.layer[0].output.dense


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_identity(change, read):
    model = tiny_models.usual_model("bert")
    before = new_state(model).identity()
    assert len(read) == 2
    assert new_state(model).identity() == before
    assert len(read) == 2, "read once"
    with torch.no_grad():
        CHANGES[change](layer_of(model))
    after = new_state(model).identity()
    assert after.parts["body"] != before.parts["body"]
    assert len(read) == 4


def test_a_second_load_reads_no_values(read, tmp_path):
    model = tiny_models.usual_model("bert")
    ah.attach(model, "lora", name="a").save(tmp_path / "a")
    ah.load(model, tmp_path / "a", name="b")
    count = len(read)
    ah.load(model, tmp_path / "a", name="c")
    assert len(read) == count
    layer_of(model).weight.data.mul_(2)
    with pytest.raises(ah.AdapterhubError, match="different backbone"):
        ah.load(model, tmp_path / "a", name="d")


def test_large_models_and_other_tensors_are_read_each_time(read, monkeypatch):
    model = tiny_models.usual_model("bert")
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    for _ in range(2):
        new_state(model).identity()
    assert read == [True, True]
