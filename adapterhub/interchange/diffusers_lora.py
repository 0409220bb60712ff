"""LoRA files of diffusers' pipelines, and of kohya's scripts: one safetensors file each.

    diffusers   unet.mid_block.....to_q.lora_A.weight      alpha and rank in the file's metadata
    kohya       lora_unet_mid_block_..._to_q.lora_down.weight, .lora_up.weight, .alpha

Older forms are read by diffusers' own conversions, which support the forms of many tools. A missing
alpha equals the rank. Kohya's names for a Flux follow its authors' code, where the projections of
an attention are one. Tensors that diffusers would not read are not written.

diffusers, `loaders/lora_pipeline.py`, https://github.com/huggingface/diffusers; kohya-ss,
`networks/lora.py`, https://github.com/kohya-ss/sd-scripts.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from adapterhub.anatomy.backbone import PipelineParts
from adapterhub.anatomy.projections import out_features
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.task_models import TEXT_TO_IMAGE
from adapterhub.errors import BackboneError, FileError, MismatchError, OutputError
from adapterhub.files import schema
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.schema import shorten
from adapterhub.interchange.checkpoint_files import read_tensor_file
from adapterhub.interchange.kohya_lora import is_of_scripts, read_scripts
from adapterhub.interchange.peft.export_types import ExportSource
from adapterhub.interchange.peft.exporter import try_peft
from adapterhub.interchange.peft.files import (
    MAX_CONFIG_BYTES,
    PeftFiles,
    neutral,
    option_problems,
)
from adapterhub.interchange.peft.importer import from_peft
from adapterhub.interchange.peft.targets import Targets
from adapterhub.interchange.pipeline_files import FILE, file_in
from adapterhub.interchange.translation import CheckpointInfo, ImportedAdapter

STYLES = ("diffusers", "kohya")
_METADATA = "lora_adapter_metadata"
_KOHYA = {"unet": "unet", "transformer": "unet", "text_encoder_2": "te2"}
# Blocks of a Flux, by the names of its authors: the module there, or the one that contains it, and
# its place inside.
_FLUX_BLOCKS = {"transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks"}
_FLUX_BLOCK = re.compile(rf"transformer\.({'|'.join(_FLUX_BLOCKS)})\.(\d+)\.(.+)")
_FLUX = {
    "double_blocks": {
        "norm1.linear": ("img_mod_lin", 0),
        "norm1_context.linear": ("txt_mod_lin", 0),
        **{f"attn.to_{role}": ("img_attn_qkv", n) for n, role in enumerate("qkv")},
        **{f"attn.add_{role}_proj": ("txt_attn_qkv", n) for n, role in enumerate("qkv")},
        "attn.to_out.0": ("img_attn_proj", 0),
        "attn.to_add_out": ("txt_attn_proj", 0),
        "ff.net.0.proj": ("img_mlp_0", 0),
        "ff.net.2": ("img_mlp_2", 0),
        "ff_context.net.0.proj": ("txt_mlp_0", 0),
        "ff_context.net.2": ("txt_mlp_2", 0),
    },
    "single_blocks": {
        "norm.linear": ("modulation_lin", 0),
        **{f"attn.to_{role}": ("linear1", n) for n, role in enumerate("qkv")},
        "proj_mlp": ("linear1", 3),
        "proj_out": ("linear2", 0),
    },
}
_BY_AUTHORS = {  # names that diffusers reads only in this form
    "unet.add_embedding.linear_1": "label_emb.0.0",
    "unet.add_embedding.linear_2": "label_emb.0.2",
}
_PROJECTION = "text_projection"
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<what>A|B)\.weight")
_OF_LORA = re.compile(r".+\.lora_((A|B)\.weight|magnitude_vector)")
_OLD = re.compile(  # before diffusers used peft: ....attn1.processor.to_q_lora.down.weight
    r"(?P<path>.+?)(?:\.processor)?(?:\.(?P<projection>to_[qkv]|to_out))?"
    r"[._]lora(?:_linear_layer)?\.(?P<what>down|up)\.weight"
)
_OF_CLIP = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
_OF_UNET = {"to_out": "to_out.0"}
_NOT_CONVERTED = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
_OPTIONS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")


def diffusers_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Describe the file as a LoRA of an image pipeline; it does not record which one."""
    return CheckpointInfo(task=TEXT_TO_IMAGE)


def import_diffusers(
    folder: Path, anatomy: Anatomy, *, allow_pickle: bool = False, head: bool = True
) -> ImportedAdapter:
    """Import the LoRA file in a folder for the parts of a pipeline.

    `allow_pickle` and `head` change nothing: the file is a safetensors file without a head.

    Raises:
        BackboneError: diffusers is not installed.
        FileError: the file is damaged.
        MismatchError: the adapter is not for a pipeline, or does not fit this one.
    """
    parts, file = anatomy.backbone.module, file_in(folder)
    assert file is not None
    if not isinstance(parts, PipelineParts):
        raise MismatchError(
            f"{file.name} is a LoRA of a pipeline of diffusers",
            expected="load(pipe, FOLDER), with the pipeline itself",
        )
    stored = read_tensor_file(folder, file.name, "", most=anatomy.most_bytes(), places=(".alpha",))
    tensors, alphas = _converted(stored, parts, file.name)
    config = _config(tensors, alphas, _recorded(file, parts), parts)
    imported = from_peft(PeftFiles("LORA", config, tensors), anatomy, folder.name)
    return replace(imported, format="diffusers")


def _converted(
    stored: Mapping[str, Tensor], parts: PipelineParts, file: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors of a file by peft's names, and its alphas by module."""
    if importlib.util.find_spec("diffusers") is None:
        raise BackboneError(
            "reading LoRA files of pipelines needs diffusers",
            hint='pip install "adapterhub[diffusers]"',
        )
    if not _reads_files(parts):
        raise MismatchError(
            f"{file} cannot be read: diffusers has no LoRA files of a {parts.kind.__name__}",
            expected="a folder that adapter.save(FOLDER) wrote",
        )
    if is_of_scripts(stored, parts):
        return read_scripts(stored, parts, file)
    return _by_diffusers(stored, parts, file)


def _by_diffusers(
    stored: Mapping[str, Tensor], parts: PipelineParts, file: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Convert a file with diffusers' own conversion; return as `_converted`."""
    if scales := sorted(name for name in stored if name.endswith(".dora_scale")):
        raise MismatchError(
            f"{file} has magnitudes of DoRA, which the conversion of diffusers leaves out",
            offenders=shorten(scales),
            expected=f"a LoRA of a {parts.kind.__name__}",
            hint="merge it with the program that wrote it",
        )
    if lost := _lost_alphas(stored):
        raise MismatchError(
            f"{file} has alphas that the conversion of diffusers loses",
            offenders=shorten(lost),
            expected="alphas that are the ranks there",
        )
    options = {"unet_config": parts["unet"].config} if "unet" in parts else {}
    try:
        # Some classes always return alphas, some on request, and others never.
        converted = parts.kind.lora_state_dict(dict(stored), return_alphas=True, **options)
    except _NOT_CONVERTED as error:
        raise FileError(
            f"diffusers cannot convert {file}: {type(error).__name__}: {str(error)[:300]}",
            expected=f"a LoRA of a {parts.kind.__name__}",
        ) from None
    state, network_alphas = converted if isinstance(converted, tuple) else (converted, None)
    state = {_with_part(name, parts): tensor for name, tensor in state.items()}
    of_scripts = sorted(name for name in state if name.startswith("lora_"))
    if of_scripts:
        raise MismatchError(
            f"{file} has the names of kohya's scripts, which diffusers does not convert for a "
            f"{parts.kind.__name__}",
            offenders=shorten(of_scripts),
            expected=f"tensors of {', '.join(parts)}, as save_lora_weights writes them",
        )
    if others := sorted({name.partition(".")[0] for name in state} - {*parts}):
        raise MismatchError(
            f"{file} is for parts that this pipeline does not have",
            offenders=shorten(others),
            expected=f"tensors of {', '.join(parts)}",
        )
    if not state:
        raise MismatchError(
            f"{file} has no tensors that diffusers reads for a {parts.kind.__name__}",
            offenders=shorten(sorted(stored)),
            expected=f"tensors of {', '.join(parts)}, as save_lora_weights writes them",
        )
    by_name = {**{n: t for n, t in state.items() if n.endswith(".alpha")}, **(network_alphas or {})}
    tensors = {_renamed(n, parts): t for n, t in state.items() if not n.endswith(".alpha")}
    alphas: dict[str, float] = {}
    for name, alpha in by_name.items():
        renamed = _renamed(name.removesuffix(".alpha"), parts)
        match = _KEY.fullmatch(renamed)
        alphas[match["path"] if match else renamed] = float(alpha)
    return tensors, alphas


def _reads_files(parts: PipelineParts) -> bool:
    """Return whether diffusers supports LoRA files for the class of a pipeline."""
    return hasattr(parts.kind, "lora_state_dict")


def _read_parts(parts: PipelineParts) -> set[str]:
    """Return the parts that diffusers reads from a LoRA file.

    Their class names them in an attribute, such as `transformer_name`, or in an option for writing
    files, and they have a method for it.
    """
    named = {getattr(parts.kind, name) for name in dir(parts.kind) if name.endswith("_name")}
    written = inspect.signature(parts.kind.save_lora_weights).parameters
    return {
        name
        for name, part in parts.items()
        if name in named or f"{name}_lora_layers" in written
        if hasattr(part, "load_lora_adapter") or hasattr(part, "load_adapter")
    }


def _lost_alphas(stored: Mapping[str, Tensor]) -> list[str]:
    """Return the alphas of a Flux's last layer that change its scale."""
    alphas = [name for name in stored if "final_layer" in name and name.endswith(".alpha")]
    lows = {name: stored.get(f"{name.removesuffix('.alpha')}.lora_down.weight") for name in alphas}
    return [name for name, low in lows.items() if low is not None and stored[name] != len(low)]


def _with_part(name: str, parts: PipelineParts) -> str:
    """Return a tensor's name with its part, which conversions for a Flux sometimes omit."""
    first = name.partition(".")[0]
    inside = "transformer" in parts and first not in parts
    return f"transformer.{name}" if inside and hasattr(parts["transformer"], first) else name


def _recorded(file: Path, parts: PipelineParts) -> dict[str, dict[str, Any]]:
    """Return peft's options of each part in the metadata of a file; they are untrusted.

    Raises:
        FileError: they are not options of a LoRA, or not supported.
    """
    with safe_open(file, "np") as opened:
        text = (opened.metadata() or {}).get(_METADATA, "{}")
    tree, problems = schema.parse_object(text.encode(), MAX_CONFIG_BYTES)
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in tree.items():
        part, _, option = name.partition(".")
        if part in parts:
            by_part.setdefault(part, {})[option] = value
    problems += [
        line for part, own in by_part.items() for line in option_problems("LORA", own, part)
    ]
    if problems:
        raise FileError(f"the metadata of {file.name} cannot be used", offenders=shorten(problems))
    return by_part


def _renamed(name: str, parts: PipelineParts) -> str:
    """Return a tensor's name in peft's form, with current module names."""
    part, _, inside = name.partition(".")
    if not hasattr(parts[part], "text_model"):
        inside = inside.removeprefix("text_model.")
    if match := _OLD.fullmatch(inside):
        projection = match["projection"]
        text = part.startswith("text_encoder")
        last = (_OF_CLIP if text else _OF_UNET).get(projection or "", projection)
        path = f"{match['path']}.{last}" if last else match["path"]
        inside = f"{path}.lora_{'A' if match['what'] == 'down' else 'B'}.weight"
    return f"{part}.{inside}"


def _config(
    tensors: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    recorded: Mapping[str, Mapping[str, Any]],
    parts: PipelineParts,
) -> dict[str, Any]:
    """Return peft's options: rank and alpha of each module, which the file may not record.

    All scales are alpha / rank.
    """
    options = {part: {**neutral("LORA"), **own} for part, own in recorded.items()}
    targets = {part: Targets(own, parts[part]) for part, own in options.items()}
    ranks: dict[str, int] = {}
    scaled: dict[str, float] = {}
    for name, tensor in tensors.items():
        if not (match := _KEY.fullmatch(name)) or match["what"] != "A":
            continue
        path, rank = match["path"], len(tensor)
        part, _, inside = path.partition(".")
        alpha = alphas.get(path)
        if alpha is None and (own := options.get(part)) is not None:
            alpha = targets[part].value_at(own["alpha_pattern"], inside, own["lora_alpha"])
            alpha *= rank**0.5 if own["use_rslora"] else 1
        ranks[path], scaled[path] = rank, float(rank if alpha is None else alpha)
    rank = max(ranks.values(), default=1)
    return {
        **neutral("LORA"),
        "r": rank,
        "lora_alpha": float(rank),
        "use_dora": any("lora_magnitude_vector" in name for name in tensors),
        "rank_pattern": {re.escape(path): each for path, each in ranks.items()},
        "alpha_pattern": {re.escape(path): each for path, each in scaled.items()},
        "target_modules": sorted(ranks),
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "revision": None,
    }


def write_diffusers(
    folder: Path, source: ExportSource, style: str, *, overwrite: bool = False
) -> None:
    """Write the updates of an adapter of a pipeline as a LoRA file, in a folder.

    Raises:
        MismatchError: the adapter is not of a pipeline, or such a file cannot express it.
        OutputError: the file exists (unless `overwrite`), or cannot be written.
    """
    hint = "adapterhub convert ADAPTER --output FOLDER, and export that: it is a LoRA"
    files, problems = try_peft(source)
    parts = source.anatomy.backbone.module
    if not isinstance(parts, PipelineParts):
        problems.append("it is not of a pipeline: attach(pipe, ...)")
    elif not _reads_files(parts):
        problems.append(f"diffusers reads no LoRA files for a {parts.kind.__name__}")
    else:
        read, name = _read_parts(parts), parts.kind.__name__
        unread = dict.fromkeys(path.partition(".")[0] for path in _paths(files))
        problems += [
            f"{part}: diffusers reads none from a LoRA file of a {name}"
            for part in unread
            if part not in read
        ]
    if files.kind != "LORA":
        problems.append(f"{files.kind}: these files contain LoRAs")
    elif style == "kohya" and files.config.get("use_dora"):
        problems.append("DORA: diffusers leaves the magnitudes out of kohya's files")
        hint = 'adapter.export(FOLDER, format="diffusers"), which has them'
    else:
        problems += [
            f"{name.removesuffix('.lora_magnitude_vector')}: diffusers leaves the magnitudes of "
            "DoRA out at text encoders"
            for name in files.tensors
            if name.startswith("text_encoder") and name.endswith("_vector")
        ]
        others = [name for name in files.tensors if not _OF_LORA.fullmatch(name)]
        problems += [f"{name}: no update of a projection or convolution" for name in others]
    if problems:
        raise MismatchError(
            f"the adapter cannot be exported to {style}",
            offenders=shorten(problems),
            expected="a LoRA on a pipeline of diffusers",
            hint=hint,
        )
    file = folder / FILE
    if file.exists() and not overwrite:
        raise OutputError(f"{file} exists", hint="overwrite=True, or --overwrite, replaces it")
    assert isinstance(parts, PipelineParts)
    kohya = style == "kohya"
    tensors, metadata = _as_kohya(files, parts) if kohya else _as_diffusers(files)
    with explained(file):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, save({n: t.contiguous() for n, t in tensors.items()}, metadata))


def _as_diffusers(files: PeftFiles) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors under their names, and the options of each part as metadata."""
    recorded: dict[str, Any] = {}
    targets = list(dict.fromkeys(_paths(files)))
    for part in dict.fromkeys(path.partition(".")[0] for path in targets):
        inside = [path.partition(".")[2] for path in targets if path.startswith(f"{part}.")]
        own = {name: files.config[name] for name in _OPTIONS}
        for name in ("rank_pattern", "alpha_pattern"):
            escaped = re.escape(f"{part}.")
            own[name] = {
                pattern.removeprefix(escaped): value
                for pattern, value in files.config[name].items()
                if pattern.startswith(escaped)
            }
        own["target_modules"] = inside
        recorded |= {f"{part}.{name}": value for name, value in own.items()}
    tensors = {_known_form(name, targets): tensor for name, tensor in files.tensors.items()}
    return tensors, {"format": "pt", _METADATA: json.dumps(recorded)}


def _known_form(name: str, targets: list[str]) -> str:
    """Return a tensor's name in a form that diffusers recognizes.

    diffusers infers the form of a text encoder's tensors from its attention. Without attention
    tensors, it reads the older names.
    """
    part = name.partition(".")[0]
    if not part.startswith("text_encoder") or (match := _KEY.fullmatch(name)) is None:
        return name
    own = [path for path in targets if path.startswith(f"{part}.")]
    if any(path.endswith(tuple(_OF_CLIP.values())) for path in own):
        return name
    way = "down" if match["what"] == "A" else "up"
    return f"{match['path']}.lora_linear_layer.{way}.weight"


def _as_kohya(files: PeftFiles, parts: PipelineParts) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors under kohya's names, with an alpha for each module.

    All have one rank and alpha: diffusers 0.42 treats other values in attention as the most
    frequent one. Lower ranks are padded with zeros, and different scales are multiplied into the
    second factor. Missing parts of projections that are one there are also zeros.

    Raises:
        MismatchError: diffusers would not read all of them.
    """
    files = replace(files, tensors={**files.tensors, **_told(files)})
    paths = list(dict.fromkeys(_paths(files)))
    rank = max(len(files.tensors[f"{path}.lora_A.weight"]) for path in paths)
    scales = {path: _scale(files.config, path) for path in paths}
    common = scales[paths[0]] if len(set(scales.values())) == 1 else 1.0
    fused: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    sizes: dict[str, dict[int, int]] = {}
    for path in paths:
        low, high = (files.tensors[f"{path}.lora_{side}.weight"] for side in "AB")
        more = rank - len(low)
        high = high if scales[path] == common else high * (scales[path] / common)
        low = torch.cat([low, low.new_zeros(more, *low.shape[1:])])
        high = torch.cat([high, high.new_zeros(len(high), more, *high.shape[2:])], dim=1)
        name, place, others = _kohya_name(path, parts)
        fused.setdefault(name, {})[place] = low, high
        sizes[name] = others
    tensors: dict[str, Tensor] = {}
    for name, factors in fused.items():
        low, high = _fused(factors, sizes[name])
        tensors |= {f"{name}.lora_down.weight": low, f"{name}.lora_up.weight": high}
        tensors[f"{name}.alpha"] = torch.tensor(common * len(low))
    _check_read(tensors, paths, parts)
    return tensors, {"format": "pt"}


def _told(files: PeftFiles) -> dict[str, Tensor]:
    """Return zeros that let diffusers infer the form of a text encoder's attention.

    It looks for an update of an output projection; without one, it does not read the others.
    """
    tensors: dict[str, Tensor] = {}
    paths = list(dict.fromkeys(_paths(files)))
    for part in ("text_encoder", "text_encoder_2"):
        own = [path for path in paths if path.startswith(f"{part}.") and "self_attn." in path]
        if own and not any(path.endswith(".out_proj") for path in own):
            low, high = (files.tensors[f"{own[0]}.lora_{side}.weight"] for side in "AB")
            path = f"{own[0].rpartition('.')[0]}.out_proj"
            tensors |= {f"{path}.lora_A.weight": low * 0, f"{path}.lora_B.weight": high * 0}
    return tensors


def _kohya_name(path: str, parts: PipelineParts) -> tuple[str, int, dict[int, int]]:
    """Return kohya's name of a module, its place in it, and the sizes of all with that name."""
    part, _, inside = path.partition(".")
    block = _FLUX_BLOCK.fullmatch(path) if parts.kind.__name__.startswith("Flux") else None
    if block is not None:
        own = _FLUX[kind := _FLUX_BLOCKS[block[1]]]
        if block[3] in own:
            name, place = own[block[3]]
            stem = path.removesuffix(block[3])
            sizes = {
                n: out_features(parts.get_submodule(f"{stem}{other}"))
                for other, (whole, n) in own.items()
                if whole == name
            }
            return f"lora_unet_{kind}_{block[2]}_{name}", place, sizes
    inside = _BY_AUTHORS.get(path, inside)
    if part.startswith("text_encoder") and not inside.startswith(("text_model.", _PROJECTION)):
        inside = f"text_model.{inside}"  # the structure of CLIP when the names were chosen
    several = "unet" not in parts or "text_encoder_2" in parts
    short = {"text_encoder": "te1" if several else "te", **_KOHYA}.get(part, part)
    return f"lora_{short}_{inside.replace('.', '_')}", 0, {0: 0}


def _fused(
    factors: Mapping[int, tuple[Tensor, Tensor]], sizes: Mapping[int, int]
) -> tuple[Tensor, Tensor]:
    """Join the factors of several updates of one input: a block for each."""
    if len(sizes) == 1:
        return factors[0]
    one, _ = next(iter(factors.values()))
    lows, highs = [], []
    for place, size in sorted(sizes.items()):
        low, high = factors.get(place, (torch.zeros_like(one), one.new_zeros(size, len(one))))
        lows.append(low)
        highs.append(high)
    return torch.cat(lows), torch.block_diag(*highs)  # type: ignore[no-untyped-call]


def _check_read(tensors: Mapping[str, Tensor], paths: list[str], parts: PipelineParts) -> None:
    """Refuse tensors that diffusers' own conversion would not read."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # it scales some in place
    try:
        converted, _ = _by_diffusers(copies, parts, "the file")
    except FileError as error:
        problems = [str(error)]
    except MismatchError as error:
        problems = [*error.offenders]
    else:
        read = {match["path"] for name in converted if (match := _KEY.fullmatch(name))}
        problems = [path for path in paths if path not in read]
        problems += _unknown_forms(tensors, parts)
    if problems:
        raise MismatchError(
            f"diffusers would not read kohya's names of a {parts.kind.__name__}",
            offenders=shorten(problems),
            expected="modules whose names its conversion has",
            hint='adapter.export(FOLDER, format="diffusers")',
        )


def _unknown_forms(tensors: Mapping[str, Tensor], parts: PipelineParts) -> list[str]:
    """Return the parts with tensors whose form diffusers cannot infer.

    For a text encoder, it infers the form from the names, mainly of its attention.
    """
    from diffusers.utils import state_dict_utils

    forms: Any = state_dict_utils
    problems = []
    options = {"unet_config": parts["unet"].config} if "unet" in parts else {}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # it scales some in place
    converted = parts.kind.lora_state_dict(copies, return_alphas=True, **options)
    state = converted[0] if isinstance(converted, tuple) else converted
    for part in ("text_encoder", "text_encoder_2"):
        own = {name: t for name, t in state.items() if name.startswith(f"{part}.")}
        try:
            named = forms.convert_state_dict_to_diffusers(own) if own else {}
            named = forms.convert_state_dict_to_peft(named) if own else {}
            problems += [name for name in named if not _KEY.fullmatch(name)]
        except ValueError as error:
            problems.append(f"{part}: {error}")
    return problems


def _scale(config: Mapping[str, Any], path: str) -> float:
    rank = config["rank_pattern"].get(re.escape(path), config["r"])
    alpha = config["alpha_pattern"].get(re.escape(path), config["lora_alpha"])
    return float(alpha / (rank**0.5 if config["use_rslora"] else rank))


def _paths(files: PeftFiles) -> list[str]:
    return [match["path"] for name in files.tensors if (match := _KEY.fullmatch(name))]
