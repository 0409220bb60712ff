"""llama.cpp's format of a LoRA: one GGUF file, for `llama-cli --lora FILE`.

    W x + B A x      NAME.lora_a: A, (rank, d_in)    NAME.lora_b: scale B, (d_out, rank)

NAME is what llama.cpp calls the weight, such as `blk.0.attn_q.weight`. The scale is in B, and
`adapter.lora.alpha` is 0, for which llama.cpp does not scale again. Llama's query and key
projections have their rows in pairs there, one pair for each rotary frequency, and here in halves:

    row 2 i + j of a head there = row j d_head / 2 + i here      j in {0, 1}

llama.cpp, `convert_lora_to_gguf.py` and `src/llama-adapter.cpp`,
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from adapterhub.errors import BackboneError, MismatchError, OutputError
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.schema import shorten
from adapterhub.interchange.peft.export_types import ExportSource
from adapterhub.interchange.peft.exporter import ModuleUpdate, low_rank_updates, try_peft

ARCHITECTURES = {"llama": "LLAMA"}  # by model_type: those whose order of rows is known here
_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


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
    config = source.anatomy.model.config
    if problems := _problems(source, config):
        raise MismatchError(
            "the adapter cannot be exported to llama.cpp",
            offenders=shorten(problems),
            expected=f"a LoRA on a language model of type {', '.join(ARCHITECTURES)}",
            hint="adapterhub merge, and convert the merged model",
        )
    if file.suffix != ".gguf" or file.is_dir() or (file.exists() and not overwrite):
        raise OutputError(
            f"{file} exists" if file.exists() else f"{file} is not the name of a GGUF file",
            expected="a new file, NAME.gguf",
            hint="overwrite=True, or --overwrite, replaces a file" if file.is_file() else "",
        )
    updates, _ = low_rank_updates(source)
    with tempfile.TemporaryDirectory() as folder, explained(file):
        draft = Path(folder, file.name)
        _write(draft, name, config, updates, _invocation(source))
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, draft.read_bytes())


def _problems(source: ExportSource, config: PreTrainedConfig) -> list[str]:
    files, problems = try_peft(source)
    if config.model_type not in ARCHITECTURES:
        problems.append(f"the order of the rows of a {config.model_type} is not known")
    if files.kind != "LORA":
        return [*problems, f"{files.kind}: llama.cpp computes only LORA"]
    if files.config.get("use_dora"):
        problems.append("use_dora: llama.cpp does not compute DoRA")
    known = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")  # the last: use_dora
    others = [name for name in files.tensors if not name.endswith(known)]
    return problems + [f"{n}: llama.cpp reads only the factors of a LoRA" for n in others]


def _invocation(source: ExportSource) -> Sequence[int]:
    """Return the tokens from which on the updates apply; none: to all tokens."""
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
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(name)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        if invocation:
            writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, list(invocation))
        for host, update in updates.items():
            weight = names.get_name(f"{host}.weight", try_suffixes=(".weight",))
            if weight is None:
                raise MismatchError(
                    "the adapter cannot be exported to llama.cpp",
                    offenders=[f"{host} has no name there"],
                )
            low, high = (update.tensors[f"lora_{factor}.weight"].float() for factor in "AB")
            writer.add_tensor(f"{weight}.lora_a", _array(low))
            writer.add_tensor(
                f"{weight}.lora_b", _array(in_pairs(high * update.scale, weight, config))
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def in_pairs(high: Tensor, weight: str, config: Any) -> Tensor:
    """Return the rows of B in llama.cpp's order; those of other projections are as they were."""
    heads = next((f for part, f in _ROTATED.items() if f".{part}." in weight), None)
    if heads is None:
        return high
    halves = high.reshape(getattr(config, heads), 2, -1, high.shape[-1])
    return halves.transpose(1, 2).reshape(high.shape)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().numpy()
