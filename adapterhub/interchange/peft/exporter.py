"""Adapters of ours in the format of peft.

One checkpoint of peft is of one kind, with whole modules beside it: the task head, and whatever
else of the backbone was trained. What has no counterpart there is refused, all of it at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.load import task_kind
from adapterhub.errors import ConfigError, MismatchError
from adapterhub.files.schema import shorten
from adapterhub.interchange.peft.files import TASK_TYPES, Kind, PeftFiles, neutral
from adapterhub.interchange.peft.prompts import (
    TENSOR,
    prefix_problems,
    prefix_sites,
    prompt_problems,
)
from adapterhub.interchange.peft.targets import ends_with, modules_of
from adapterhub.interchange.peft.updates import joined_update, pattern_options
from adapterhub.methods._base import Method
from adapterhub.methods.dora import DoRALayer
from adapterhub.methods.ia3 import InputScale, OutputScale
from adapterhub.methods.lora import LoRALayer
from adapterhub.methods.pissa import PiSSALayer
from adapterhub.methods.prefix import Prefix, PrefixKeyValues, SkippedPositions
from adapterhub.methods.prompt import VirtualTokens
from adapterhub.methods.rslora import RsLoRA

NEW_TOKENS = "new tokens: their rows, and the tokenizer that has them, are not exported to peft"


@dataclass(frozen=True)
class ExportedModule:
    """One module of an adapter at its site."""

    method: Method
    site: Site
    module: nn.Module


@dataclass(frozen=True)
class ExportSource:
    """What is exported: the modules at sites, backbone parameters that the adapter has its own
    values of (by every path that they have), the task head, the backbone's name, and whether the
    adapter has new tokens."""

    anatomy: Anatomy
    parts: Sequence[ExportedModule]
    changed: Sequence[tuple[tuple[str, ...], Tensor]]
    head: Mapping[str, nn.Module]
    backbone: str | None = None
    revision: str | None = None
    tokens: bool = False


@dataclass
class _Export:
    source: ExportSource
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return modules_of(self.source.anatomy.model)

    def aim(self, paths: Iterable[str]) -> None:
        """Name exactly these modules as targets."""
        self.targets = sorted(paths)
        self.config["target_modules"] = exact_names(self.targets, self.modules)
        turned = any(isinstance(self.modules[path], Conv1D) for path in self.targets)
        self.config["fan_in_fan_out"] = turned


def check_format(name: str) -> None:
    """Refuse a format that is not known.

    Raises:
        ConfigError: it is not.
    """
    if name != "peft":
        raise ConfigError(f"adapters cannot be exported to {name!r}", expected="peft")


def to_peft(source: ExportSource) -> PeftFiles:
    """The adapter as peft's configuration and tensors.

    Raises:
        MismatchError: peft cannot express it; every reason is listed.
    """
    files, problems = try_peft(source)
    if problems:
        raise MismatchError(
            "the adapter cannot be exported to peft",
            offenders=shorten(problems),
            expected="one of lora and its siblings, ia3, norms, a prompt, or a prefix, with a head",
            hint="adapter.save(...) keeps everything",
        )
    return files


def try_peft(source: ExportSource) -> tuple[PeftFiles, list[str]]:
    """The adapter in the form of peft as far as that goes, and why not, where it cannot."""
    export = _Export(source)
    kinds = {_kind_of_part(part) for part in source.parts} - {None}
    export.problems += _strangers(source)
    kind = min((k for k in kinds if k), default=None) or _kind_without_parts(export)
    if len(kinds) > 1:
        export.problems.append(
            f"one checkpoint of peft holds one of {', '.join(sorted(map(str, kinds)))}"
        )
    if kind in _EXPORTERS and kinds:
        _EXPORTERS[kind](export)
    _export_changed(export, kind)
    _export_head(export)
    export.config |= {
        "task_type": TASK_TYPES.get(task_kind(source.anatomy.model) or ""),
        "base_model_name_or_path": source.backbone,
        "revision": source.revision,
    }
    config = neutral(kind) | export.config | {"peft_type": kind}
    return PeftFiles(kind, config, export.tensors), export.problems


_KINDS: Mapping[type[nn.Module], Kind] = {
    LoRALayer: "LORA",
    DoRALayer: "LORA",
    PiSSALayer: "LORA",
    OutputScale: "IA3",
    InputScale: "IA3",
    VirtualTokens: "PROMPT_TUNING",
    PrefixKeyValues: "PREFIX_TUNING",
    SkippedPositions: "PREFIX_TUNING",
}


def _kind_of_part(part: ExportedModule) -> Kind | None:
    return _KINDS.get(type(part.module))


def _strangers(source: ExportSource) -> list[str]:
    names = sorted({p.method.name for p in source.parts if _kind_of_part(p) is None})
    found = [f"{name}: peft has no such method" for name in names]
    return found + [NEW_TOKENS] * source.tokens


def _kind_without_parts(export: _Export) -> Kind:
    """Norms alone have a kind of their own; other parameters go beside another method only."""
    modules = export.modules
    holders = {path.rpartition(".")[0] for paths, _ in export.source.changed for path in paths}
    norms = [
        h for h in holders if (w := getattr(modules[h], "weight", None)) is not None and w.ndim == 1
    ]
    if not export.source.parts:
        if not holders:
            export.problems.append("peft has no method that trains the task head alone")
        elif len(norms) < len(holders):
            others = sorted(holders.difference(norms))
            export.problems.append(
                f"peft trains whole parameters only beside another method: {', '.join(others[:3])}"
                + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            )
    return "LN_TUNING"


def exact_names(paths: Sequence[str], modules: Mapping[str, Any]) -> list[str]:
    """Names that end exactly these paths: the last parts where they are enough, else the paths."""
    short = sorted({path.rpartition(".")[2] for path in paths})
    hit = {path for path in modules if ends_with(path, short)}
    return short if hit == set(paths) else sorted(paths)


def _export_updates(export: _Export) -> None:
    by_host: dict[str, list[ExportedModule]] = {}
    for part in export.source.parts:
        if _kind_of_part(part) == "LORA":
            by_host.setdefault(part.site.host, []).append(part)
    parts = [part for group in by_host.values() for part in group]
    rooted = all(isinstance(part.method, RsLoRA) for part in parts)
    decomposed = {isinstance(part.module, DoRALayer) for part in parts}
    if len(decomposed) > 1:
        export.problems.append("peft takes DoRA for all updates of a checkpoint, or for none")
    sizes: dict[str, tuple[int, float]] = {}
    for host, group in by_host.items():
        pieces = [(p.site, p.module) for p in group]
        update = joined_update(export.modules[host], pieces)
        if update is None:
            export.problems.append(f"{host}: two DoRA updates of one weight cannot be joined")
            continue
        for name, tensor in update.tensors.items():
            export.tensors[f"{host}.{name}"] = tensor
        sizes[host] = (update.rank, update.scale)
    export.aim(by_host)
    dropouts = {getattr(part.method, "dropout", 0.0) for part in parts}
    export.config |= pattern_options(sizes, rooted) | {
        "use_dora": True in decomposed,
        "lora_dropout": max(dropouts),
        "bias": "none",
        "init_lora_weights": True,
    }


def _export_scales(export: _Export) -> None:
    scales: dict[tuple[str, bool], Tensor] = {}
    for part in export.source.parts:
        module, site = part.module, part.site
        if not isinstance(module, OutputScale):
            continue
        at_input = isinstance(module, InputScale)
        if site.part is None:
            scale = module.scale.detach()
        else:
            whole = torch.ones(_width(export.modules[site.host]), device=module.scale.device)
            scale = (
                module.scale.detach() if at_input else site.part.write(whole, module.scale.detach())
            )
        key = (site.host, at_input)
        scales[key] = scales[key] * scale if key in scales else scale
    hosts = {host for host, _ in scales}
    inputs = sorted(host for host, at_input in scales if at_input)
    both = [host for host, at_input in scales if at_input and (host, False) in scales]
    export.problems += [f"{host}: peft rescales the input or the output, not both" for host in both]
    for (host, at_input), scale in scales.items():
        export.tensors[f"{host}.ia3_l"] = scale[None] if at_input else scale[:, None]
    export.aim(hosts)
    # As a list these would match the ends of other targets, so it is one regular expression.
    export.config["feedforward_modules"] = "|".join(map(re.escape, inputs)) if inputs else []


def _width(module: nn.Module) -> int:
    return int(getattr(module, "nf", 0) or getattr(module, "out_features", 0))


def _export_prompt(export: _Export) -> None:
    prompts = [p for p in export.source.parts if isinstance(p.module, VirtualTokens)]
    table = torch.cat([p.module.prompt.detach() for p in prompts])  # type: ignore[operator]
    export.problems += prompt_problems(export.source.anatomy)
    export.tensors[TENSOR] = table
    export.config |= _prompt_options(export, len(table), table.shape[1]) | {
        "prompt_tuning_init": "RANDOM"
    }


def _prompt_options(export: _Export, length: int, width: int) -> dict[str, Any]:
    config = export.source.anatomy.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "num_virtual_tokens": length,
        "token_dim": width,
        "num_transformer_submodules": 1,
        "num_attention_heads": heads,
        "num_layers": config.num_hidden_layers,
    }


def _export_prefix(export: _Export) -> None:
    parts = [p for p in export.source.parts if isinstance(p.module, PrefixKeyValues)]
    anatomy = export.source.anatomy
    export.problems += prefix_problems(anatomy)
    by_site = {part.site.id: part for part in parts}
    wanted = [site.id for site in prefix_sites(anatomy)]
    if set(by_site) != set(wanted) or len(by_site) < len(parts):
        export.problems.append("prefix: in peft every self-attention has exactly one")
    if len(anatomy.stacks) == 2:
        export.problems.append("prefix: peft gives layer i behind an encoder that of layer 2 i")
    if not all(isinstance(p.method, Prefix) and p.method.positions is True for p in parts):
        export.problems.append(
            "prefix: in peft tokens count their positions behind it, as with prefix(positions=true)"
        )
    if not export.problems:
        table = torch.stack([by_site[i].module.prefix.detach() for i in wanted])  # type: ignore[operator]
        length, width = table.shape[2:]
        export.tensors[TENSOR] = table.permute(2, 0, 1, 3).reshape(length, -1)
        export.config |= _prompt_options(export, length, width) | {"prefix_projection": False}


_EXPORTERS: Mapping[str, Callable[[_Export], None]] = {
    "LORA": _export_updates,
    "IA3": _export_scales,
    "PROMPT_TUNING": _export_prompt,
    "PREFIX_TUNING": _export_prefix,
}


def _export_changed(export: _Export, kind: Kind) -> None:
    """Parameters that the adapter has its own values of: as norms, biases, or whole modules."""
    own = {path: value.detach() for paths, value in export.source.changed for path in paths}
    if kind == "LORA" and all(path.endswith(".bias") for path in own):
        for path, value in own.items():
            module, _, name = path.rpartition(".")
            layer = ".base_layer" if module in export.targets else ""
            export.tensors[f"{module}{layer}.{name}"] = value
        if own:
            export.config["bias"] = "all"
        return
    holders = sorted({path.rpartition(".")[0] for path in own})
    export.problems += [
        f"{h}: both updated and trained whole" for h in holders if h in export.targets
    ]
    alone = not export.source.parts
    for holder in holders:
        inner = ".ln_tuning_layers" if alone else ""
        for name, value in export.modules[holder].named_parameters(recurse=False):
            tensor = own.get(f"{holder}.{name}", value.detach())
            export.tensors[f"{holder}{inner}.{name}"] = tensor
    if alone and holders:
        export.aim(holders)
        del export.config["fan_in_fan_out"]
    else:
        export.problems += _ambiguous(export, holders)
        export.config["modules_to_save"] = holders


def _ambiguous(export: _Export, names: Sequence[str]) -> list[str]:
    """peft saves every module whose path ends with a name."""
    paths = export.modules
    more = {n: [p for p in paths if p.endswith(n) and p not in names] for n in names}
    shared = [n for n in names if sum(paths[p] is paths[n] for p in paths) > 1]
    return [f"{n}: peft would save {hit[0]} too" for n, hit in more.items() if hit] + [
        f"{n}: it is in several places of the model, peft replaces it in one" for n in shared
    ]


def _export_head(export: _Export) -> None:
    names = sorted(export.source.head)
    export.problems += _ambiguous(export, names)
    for name in names:
        for key, value in export.source.head[name].state_dict().items():
            export.tensors[f"{name}.{key}"] = value
    if names:
        export.config["modules_to_save"] = [*export.config.get("modules_to_save", []), *names]
