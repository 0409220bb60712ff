"""LoRA files of kohya's scripts and of LyCORIS for a U-Net and its text encoders.

    lora_unet_..._to_q.lora_down.weight, .lora_up.weight      factors of a module
    ....lora_mid.weight                                       a kernel between them (LoCon)
    ....alpha                                                 the scale is alpha / rank
    ....dora_scale                                            magnitudes of DoRA

Names are the modules' names with each point replaced by _. diffusers' own conversion omits
`dora_scale` and loses some alphas, so files are read here by the names of the pipeline's modules.
Each tensor is read, or listed in the error.

https://github.com/kohya-ss/sd-scripts, `networks/lora.py`; LyCORIS, `lycoris/modules/locon.py`,
https://github.com/KohakuBlueleaf/LyCORIS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.backbone import PipelineParts
from adapterhub.errors import FileError, MismatchError
from adapterhub.files.schema import shorten

_PREFIXES = {
    "unet": ("lora_unet_",),
    "text_encoder": ("lora_te_", "lora_te1_"),
    "text_encoder_2": ("lora_te2_",),
}
_STARTS = tuple(prefix for prefixes in _PREFIXES.values() for prefix in prefixes)
_OF_AUTHORS = (  # names of a U-Net's modules in the code of its authors, by diffusers' names
    (r"(.*_resnets_\d+_)conv1", r"\1in_layers_2"),
    (r"(.*_resnets_\d+_)conv2", r"\1out_layers_3"),
    (r"(.*_resnets_\d+_)time_emb_proj", r"\1emb_layers_1"),
    (r"(.*_resnets_\d+_)conv_shortcut", r"\1skip_connection"),
    (r"(.*_downsamplers_\d+_)conv", r"\1op"),
    (r"conv_in", "input_blocks_0_0"),
    (r"conv_out", "out_2"),
    (r"time_embedding_linear_1", "time_embed_0"),
    (r"time_embedding_linear_2", "time_embed_2"),
    (r"add_embedding_linear_1", "label_emb_0_0"),
    (r"add_embedding_linear_2", "label_emb_0_2"),
)
_BLOCKS = {"input_blocks": "down_blocks", "middle_block": "mid_block", "output_blocks": "up_blocks"}
_BLOCK = re.compile(
    r"^lora_unet_(input_blocks|middle_block|output_blocks)_(?=(\d+_)?(resnets|attentions|\w+samplers)_)"
)
_LOW, _HIGH, _MID = "lora_down.weight", "lora_up.weight", "lora_mid.weight"
_ALPHA, _DORA = "alpha", "dora_scale"
_READ = {_LOW, _HIGH, _MID, _ALPHA, _DORA}
_OTHERS = {  # other methods of LyCORIS, by the start of a tensor's name
    "hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT", "boft_": "BOFT", "a1": "GLoRA", "a2": "GLoRA",
    "b1": "GLoRA", "b2": "GLoRA", "diff": "a full update", "w_norm": "a norm", "b_norm": "a norm",
    "on_input": "(IA)^3", "weight": "(IA)^3", "bias_": "a sparse update",
}  # fmt: skip


def is_of_scripts(stored: Mapping[str, Tensor], parts: PipelineParts) -> bool:
    """Return whether tensors have the names of kohya's scripts, for the parts of a U-Net."""
    return "unet" in parts and bool(stored) and all(n.startswith(_STARTS) for n in stored)


def read_scripts(
    stored: Mapping[str, Tensor], parts: PipelineParts, file: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors of a file by peft's names, and its alphas by module.

    Raises:
        FileError: tensors of a module are missing, or of other shapes.
        MismatchError: tensors match no module of the pipeline, or belong to another method.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _mapped(stored, parts, file).items():
        module, _, rest = name.partition(".")
        groups.setdefault(module, {})[rest] = tensor
    modules = dict(_names(parts))
    _refuse(groups, modules, file)
    tensors: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    decomposed = any(_DORA in own for own in groups.values())
    for name, own in groups.items():
        path, problems = modules[name], list(_problems(own, parts.get_submodule(modules[name])))
        if problems:
            raise FileError(
                f"{file} has tensors that do not fit {path}",
                offenders=[f"{name}: {problem}" for problem in problems],
                expected="the factors of an update of its weight, as kohya's scripts write them",
            )
        low, high = _factors(own)
        tensors |= {f"{path}.lora_A.weight": low, f"{path}.lora_B.weight": high}
        alphas[path] = float(own[_ALPHA]) if _ALPHA in own else float(len(low))
        if decomposed:
            host = parts.get_submodule(path)
            scale = own.get(_DORA, _norms(host, low, high, alphas[path]))
            shape = (1, -1, *[1] * (low.dim() - 2)) if low.dim() > 2 else (-1,)
            tensors[f"{path}.lora_magnitude_vector"] = scale.reshape(shape)
    return tensors, alphas


def _mapped(stored: Mapping[str, Tensor], parts: PipelineParts, file: str) -> Mapping[str, Tensor]:
    """Return the tensors with the blocks of a U-Net numbered as in diffusers."""
    from diffusers.loaders import lora_conversion_utils

    conversions: Any = lora_conversion_utils
    mapped = conversions._maybe_map_sgm_blocks_to_diffusers
    try:
        renamed: dict[str, Tensor] = mapped(dict(stored), parts["unet"].config)
    except (LookupError, ValueError) as error:
        raise FileError(
            f"{file} has blocks that the U-Net of a {parts.kind.__name__} does not have: {error}",
            expected="a LoRA of this kind of pipeline",
        ) from None
    if lost := sorted({*stored} - {*renamed}) if len(renamed) < len(stored) else []:
        raise MismatchError(
            f"{file} mixes the names of a U-Net's authors with those of diffusers",
            offenders=shorten(lost),
            expected="one of both",
        )
    return {_BLOCK.sub(_of_diffusers, name): tensor for name, tensor in renamed.items()}


def _of_diffusers(match: re.Match[str]) -> str:
    """Return the beginning of a name with the block of diffusers."""
    return f"lora_unet_{_BLOCKS[match[1]]}_"


def _names(parts: PipelineParts) -> Iterator[tuple[str, str]]:
    """Yield the names of a module in such files, with its path."""
    for part, prefixes in _PREFIXES.items():
        for path, module in parts[part].named_modules() if part in parts else ():
            if not isinstance(getattr(module, "weight", None), Tensor):
                continue
            name = path.replace(".", "_")
            names = [name]
            if part == "unet":
                names += [re.sub(p, to, name) for p, to in _OF_AUTHORS if re.fullmatch(p, name)]
            elif not path.startswith(("text_model.", "text_projection")):
                names.append(f"text_model_{name}")  # the structure of CLIP when names were chosen
            yield from ((f"{p}{each}", f"{part}.{path}") for p in prefixes for each in names)


def _refuse(
    groups: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, str], file: str
) -> None:
    """Refuse tensors that are not read.

    Raises:
        MismatchError: tensors match no module of the pipeline, or belong to another method.
    """
    others = {
        f"{name}.{rest}": next((m for start, m in _OTHERS.items() if rest.startswith(start)), "")
        for name, own in groups.items()
        for rest in own
        if rest not in _READ
    }
    if others:
        methods = sorted({method for method in others.values() if method})
        raise MismatchError(
            f"{file} has tensors that are not read"
            + (f", of {', '.join(methods)}" if methods else ""),
            offenders=shorten(sorted(others)),
            expected="LoRA, LoCon or DoRA: lora_down, lora_up, lora_mid, alpha, dora_scale",
            hint="LyCORIS merges such a file into the pipeline's weights",
        )
    if lost := sorted({*groups} - {*modules}):
        raise MismatchError(
            f"{file} has updates of modules that this pipeline does not have",
            offenders=shorten(lost),
            expected="a LoRA of this kind of pipeline",
        )
    twice: dict[str, list[str]] = {}
    for name in groups:
        twice.setdefault(modules[name], []).append(name)
    if doubled := [" and ".join(names) for names in twice.values() if len(names) > 1]:
        raise MismatchError(
            f"{file} has two updates of one module",
            offenders=shorten(doubled),
            expected="one of each",
        )


def _problems(own: Mapping[str, Tensor], host: nn.Module) -> Iterator[str]:
    """Yield the problems of a module's tensors."""
    if missing := [name for name in (_LOW, _HIGH) if name not in own]:
        yield f"no {' and no '.join(missing)}"
        return
    weight = host.weight
    assert isinstance(weight, Tensor)
    low, high, mid = own[_LOW], own[_HIGH], own.get(_MID)
    rank = len(low) if mid is None else len(mid)
    inside = weight.shape[1:] if mid is None else (weight.shape[1], *[1] * (weight.dim() - 2))
    if _ALPHA in own and own[_ALPHA].numel() != 1:
        yield f"alpha: {list(own[_ALPHA].shape)}, expected a number"
    if low.numel() == 0 or low.dim() < 2 or high.dim() < 2:
        yield f"{_LOW}: {list(low.shape)}, {_HIGH}: {list(high.shape)}, expected matrices"
        return
    if not _same(low.shape[1:], inside):
        yield f"{_LOW}: {list(low.shape)}, expected {[len(low), *inside]}"
    if mid is not None and (
        mid.dim() != weight.dim() or mid.shape[1:] != (len(low), *weight.shape[2:])
    ):
        yield f"{_MID}: {list(mid.shape)}, expected {[rank, len(low), *weight.shape[2:]]}"
    if not _same(high.shape, (len(weight), rank)):
        yield f"{_HIGH}: {list(high.shape)}, expected {[len(weight), rank]}"
    scale = own.get(_DORA)
    if scale is not None and not _same(scale.shape, (len(weight),)):
        yield (
            f"{_DORA}: {list(scale.shape)}, expected {[len(weight), 1]}: magnitudes of inputs "
            "(wd_on_output=False) are not read"
        )


def _same(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal, up to ones at the end."""
    longest = max(len(shape), len(expected))
    ones = [(*each, *[1] * (longest - len(each))) for each in (shape, expected)]
    return ones[0] == ones[1]


def _factors(own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the two factors of an update; a kernel between them becomes a part of the first."""
    low, high = own[_LOW].float(), own[_HIGH].float()
    if (mid := own.get(_MID)) is not None:
        low = torch.einsum("rs...,si->ri...", mid.float(), low.flatten(1))
    return low, high


def _norms(host: nn.Module, low: Tensor, high: Tensor, alpha: float) -> Tensor:
    """Return magnitudes that reduce DoRA to LoRA, for modules that lack them in a file."""
    weight = host.weight
    assert isinstance(weight, Tensor)
    update = (high.flatten(1) @ low.flatten(1)) * (alpha / len(low))
    norms: Tensor = torch.linalg.vector_norm(
        weight.detach().float().cpu().flatten(1) + update, dim=1
    )
    return norms
