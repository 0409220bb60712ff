"""llama.cpp's format of a LoRA: one GGUF file, for `llama-cli --lora FILE`.

    W x + B A x      NAME.lora_a: A, (rank, d_in)    NAME.lora_b: scale B, (d_out, rank)
    E[i] + B A[:, i]      of embeddings:    lora_a: A^T, (n_tokens, rank)    lora_b: (d, rank)

NAME is llama.cpp's name of the weight, such as `blk.0.attn_q.weight`; the package gguf has these
names for each architecture. The scale is in B, and `adapter.lora.alpha` is 0, so llama.cpp does not
scale again. llama.cpp's converter reorders the rows of some weights, and so the rows of B:

    pairs     query and key, of each head: row 2 i + j there = row j d_head / 2 + i here (j < 2)
    heads     fused: [q k v] of each head here, all of q, then k, then v there
    groups    fused: [q ... q k v] of each head of keys here, all of q, then k, then v there

llama.cpp, `convert_hf_to_gguf.py`, `convert_lora_to_gguf.py` and `src/llama-adapter.cpp`,
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from adapterhub.anatomy.backbone import Backbone
from adapterhub.errors import BackboneError, MismatchError, OutputError
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.schema import shorten
from adapterhub.interchange.peft.export_types import ExportSource
from adapterhub.interchange.peft.exporter import ModuleUpdate, low_rank_updates, try_peft

# Names in gguf.MODEL_ARCH by model_type, for models with a known order of rows.
_IN_PAIRS = {
    "llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "granite": "GRANITE",
    "granitemoe": "GRANITE_MOE", "arcee": "ARCEE", "smollm3": "SMOLLM3", "olmo": "OLMO",
}  # fmt: skip
_BY_HEADS = {"gpt_neox": "GPTNEOX", "bloom": "BLOOM"}
_BY_GROUPS = {"falcon": "FALCON"}
_AS_HERE = {
    "apertus": "APERTUS", "cohere": "COMMAND_R", "cohere2": "COHERE2", "ernie4_5": "ERNIE4_5",
    "exaone4": "EXAONE4", "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
    "glm": "CHATGLM", "glm4": "GLM4", "gpt2": "GPT2", "gpt_bigcode": "STARCODER",
    "gpt_oss": "GPT_OSS", "hunyuan_v1_dense": "HUNYUAN_DENSE", "mpt": "MPT", "nemotron": "NEMOTRON",
    "olmo2": "OLMO2", "olmoe": "OLMOE", "phi": "PHI2", "phi3": "PHI3", "phimoe": "PHIMOE",
    "qwen2": "QWEN2", "qwen2_moe": "QWEN2MOE", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE",
    "seed_oss": "SEED_OSS", "stablelm": "STABLELM", "starcoder2": "STARCODER2",
}  # fmt: skip
ARCHITECTURES = _IN_PAIRS | _BY_HEADS | _BY_GROUPS | _AS_HERE
_NOT_THERE = (("falcon", "alibi", True), ("gpt_bigcode", "multi_query", False))
_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


def write_gguf(file: Path, source: ExportSource, name: str, *, overwrite: bool = False) -> None:
    """Write the updates of an adapter as a LoRA of llama.cpp.

    Raises:
        MismatchError: llama.cpp cannot express the adapter; every reason is listed.
        BackboneError: the package gguf is not installed.
        OutputError: the file exists (unless `overwrite`), or cannot be written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise BackboneError(
            "writing GGUF needs the package gguf", hint='pip install "adapterhub[gguf]"'
        )
    backbone = source.anatomy.backbone
    updates, _ = low_rank_updates(source)
    if problems := _problems(source, backbone, updates):
        raise MismatchError(
            "the adapter cannot be exported to llama.cpp",
            offenders=shorten(problems),
            expected=f"a LoRA on a language model of type {', '.join(sorted(ARCHITECTURES))}",
            hint="adapterhub merge, and convert the merged model",
        )
    if file.suffix != ".gguf" or file.is_dir() or (file.exists() and not overwrite):
        raise OutputError(
            f"{file} exists" if file.exists() else f"{file} is not the name of a GGUF file",
            expected="a new file, NAME.gguf",
            hint="overwrite=True, or --overwrite, replaces a file" if file.is_file() else "",
        )
    with tempfile.TemporaryDirectory() as folder, explained(file):
        draft = Path(folder, file.name)
        _write(draft, name, backbone.pretrained.config, updates, _invocation(source))
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, draft.read_bytes())


def _problems(source: ExportSource, backbone: Backbone, hosts: Iterable[str]) -> list[str]:
    """List the features of an adapter with these updates that llama.cpp cannot express."""
    files, problems = try_peft(source)
    model_type, config = backbone.model_type, backbone.config
    if config is None or model_type not in ARCHITECTURES:
        problems.append(f"the order of the rows of a {model_type} is not known")
    else:
        problems += _nameless(hosts, config)
    problems += [
        f"llama.cpp computes no {kind} with {option}={value}"
        for kind, option, value in _NOT_THERE
        if model_type == kind and getattr(config, option) == value
    ]
    if files.kind != "LORA":
        return [*problems, f"{files.kind}: llama.cpp computes only LORA"]
    if files.config.get("use_dora"):
        problems.append("use_dora: llama.cpp does not compute DoRA")
    factors = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
    known = (*factors, ".lora_magnitude_vector")  # the last: use_dora
    others = [name for name in files.tensors if not name.endswith(known)]
    return problems + [f"{n}: llama.cpp reads only the factors of a LoRA" for n in others]


def _nameless(hosts: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """List the updates of weights that are not in llama.cpp's model."""
    names = _names(config)
    weights = {host: names(host) for host in hosts}
    problems = [
        f"{host}: llama.cpp has no such weight" for host, name in weights.items() if not name
    ]
    if _OUTPUT in weights.values() and config.tie_word_embeddings:
        problems.append(
            "the output layer is the embeddings' weight, which llama.cpp has only as embeddings"
        )
    return problems


def _names(config: PreTrainedConfig) -> Callable[[str], str | None]:
    """Return the map to llama.cpp's names of the modules' weights."""
    import gguf

    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    return lambda host: names.get_name(f"{host}.weight", try_suffixes=(".weight",))


def _invocation(source: ExportSource) -> Sequence[int]:
    """Return the tokens that start the updates; empty if they apply to all tokens."""
    sets = {tokens for part in source.parts for tokens in part.module.token_sets}
    return next((tokens.ids for tokens in sets), ())


def _write(
    file: Path,
    name: str,
    config: PreTrainedConfig,
    updates: Mapping[str, ModuleUpdate],
    invocation: Sequence[int],
) -> None:
    import gguf

    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type])
    names = _names(config)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(name)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        if invocation:
            writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, list(invocation))
        for host, update in updates.items():
            weight = str(names(host))
            low, high = (factor.float() for factor in update.tensors.values())
            low = low.T if weight == _EMBEDDINGS else low
            writer.add_tensor(f"{weight}.lora_a", _array(low))
            high = reordered(high * update.scale, weight, config)
            writer.add_tensor(f"{weight}.lora_b", _array(high))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def reordered(high: Tensor, weight: str, config: Any) -> Tensor:
    """Return the rows of B (d_out, rank) in llama.cpp's order of the weight's rows."""
    kind, part = config.model_type, weight.split(".")[-2]
    if kind in _IN_PAIRS and part in _ROTATED:
        halves = high.reshape(getattr(config, _ROTATED[part]), 2, -1, high.shape[-1])
        return halves.transpose(1, 2).reshape(high.shape)
    if part != "attn_qkv" or kind not in _BY_HEADS | _BY_GROUPS:
        return high
    heads = groups = config.num_attention_heads
    if kind in _BY_GROUPS and config.new_decoder_architecture:
        groups = config.num_kv_heads
    elif kind in _BY_GROUPS and config.multi_query:
        groups = 1
    rows = high.reshape(groups, heads // groups + 2, -1, high.shape[-1])
    return torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().numpy()
