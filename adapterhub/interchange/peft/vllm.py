"""Subset of peft checkpoints that vLLM serves, and the LoRA form that all its releases accept.

    y + (alpha / r) B A x      one r and one alpha for all modules, no other tensors

Factors of a smaller rank are padded with zeros. Where scales differ, each is multiplied into its B.

Updates of routed experts have one of two forms, depending on vLLM's class of the model, which reads
checkpoints in the same form. With `is_3d_moe_weight` they are stacked as in peft's files; otherwise
there is a LoRA for each module of the checkpoint:

    mlp.experts.base_layer (gate and up), mlp.experts (down)
    mlp.experts.7.gate_proj, mlp.experts.7.up_proj, mlp.experts.7.down_proj

An adapted layer has all of them; those without an update are zero.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.sites import Site
from adapterhub.interchange.peft.experts import (
    WRAPPER,
    Factors,
    StoredModule,
    flattened,
    is_of_experts,
    parameter_path,
    stored_modules,
)
from adapterhub.interchange.peft.export_types import ExportSource
from adapterhub.interchange.peft.exporter import (
    ModuleUpdate,
    held_weights,
    low_rank_tensors,
    low_rank_updates,
    pattern_options,
    try_peft,
)
from adapterhub.interchange.peft.files import PeftFiles

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
DEFAULT_RANK = 16


def try_vllm(
    source: ExportSource, max_rank: int = DEFAULT_RANK, *, stacked: bool | None = None
) -> tuple[PeftFiles, list[str]]:
    """Return a LoRA in the form for vLLM, as far as possible, and the unsupported features.

    Args:
        source: the adapter.
        max_rank: the server's `--max-lora-rank`.
        stacked: the form of experts in the checkpoint, if vLLM does not define it. By default the
            form that `save_pretrained` writes.
    """
    files, problems = try_peft(source)
    updates = at_one_rank(low_rank_updates(source)[0])
    if updates and files.kind == "LORA":
        factors = _experts(source, updates)
        packed = low_rank_tensors(source, updates)
        tensors = {name: t for name, t in files.tensors.items() if name not in packed}
        tensors |= low_rank_tensors(source, updates, held=False)
        options = pattern_options(updates, rooted=False)
        options |= {"rank_pattern": None, "alpha_pattern": None}  # empty by now
        stacks = stacks_experts(type(source.anatomy.model).__name__)
        modules = [] if stacks or (stacks is None and stacked) else _modules(source, factors)
        if modules:
            tensors |= _by_module(modules, factors)
            leaves = {name.rpartition(".")[2] for name, _ in modules}
            options["target_modules"] = sorted({*files.config["target_modules"], *leaves})
            options["target_parameters"] = None
        else:
            tensors |= _stacked(factors)
        files = replace(files, config={**files.config, **options}, tensors=tensors)
        problems = problems + _held_problems(source, stacked=not modules)
    return files, problems + vllm_problems(files, source.anatomy.backbone, max_rank)


def _experts(source: ExportSource, updates: Mapping[str, ModuleUpdate]) -> dict[Site, Factors]:
    """Return A and B of each expert weight in the adapted modules; zeros without an update.

    (experts, rank, d_in) and (experts, d_out, rank)
    """
    adapted = {site.host for site in held_weights(source).values() if is_of_experts(site)}
    factors: dict[Site, Factors] = {}
    for site in source.anatomy.sites.values():
        if site.held is None or not is_of_experts(site) or site.host not in adapted:
            continue
        if update := updates.get(parameter_path(site)):
            factors[site] = update.tensors["lora_A.weight"], update.tensors["lora_B.weight"]
        else:
            count, rank = site.held.experts or 1, next(iter(updates.values())).rank
            low = torch.zeros(count, rank, site.d_in)
            factors[site] = low, torch.zeros(count, site.d_out, rank)
    return factors


def _modules(
    source: ExportSource, factors: Mapping[Site, Factors]
) -> list[tuple[str, StoredModule]]:
    """Return the modules of a checkpoint that expert weights are stacked from; [] if none."""
    stored = stored_modules(source.anatomy) if factors else {}
    return [(name, module) for name, module in stored.items() if module.site in factors]


def _by_module(
    modules: Iterable[tuple[str, StoredModule]], factors: Mapping[Site, Factors]
) -> dict[str, Tensor]:
    """Return a LoRA for each module of the checkpoint."""
    tensors: dict[str, Tensor] = {}
    for name, part in modules:
        low, high = factors[part.site]
        tensors[f"{name}.lora_A.weight"] = low[part.expert]
        tensors[f"{name}.lora_B.weight"] = high[part.expert, part.start : part.stop]
    return tensors


_STACKED = {"gate_up": WRAPPER, "down": ""}


def _stacked(factors: Mapping[Site, Factors]) -> dict[str, Tensor]:
    """Return the matrices of all experts of a layer, without other projections."""
    tensors: dict[str, Tensor] = {}
    for site, pair in factors.items():
        if (wrapper := _STACKED.get(_projection(site))) is not None:
            for factor, matrix in zip("AB", flattened(*pair), strict=True):
                tensors[f"{site.host}{wrapper}.lora_{factor}.weight"] = matrix
    return tensors


def _projection(site: Site) -> str:
    return site.role.rpartition(".")[2]


def _held_problems(source: ExportSource, stacked: bool) -> list[str]:
    """List the weights that hosts multiply by themselves and where vLLM does not support LoRA."""
    places = {
        f"{site.stack}.{site.role}"
        for site in held_weights(source).values()
        if not is_of_experts(site) or (stacked and _projection(site) not in _STACKED)
    }
    return [f"{place}: vLLM has no LoRA there" for place in sorted(places)]


def at_one_rank(updates: Mapping[str, ModuleUpdate]) -> dict[str, ModuleUpdate]:
    """Return equivalent updates with one rank, the largest, and one scale."""
    rank = max((update.rank for update in updates.values()), default=0)
    scales = {update.scale for update in updates.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    return {host: _padded(update, rank, scale) for host, update in updates.items()}


def _padded(update: ModuleUpdate, rank: int, scale: float) -> ModuleUpdate:
    low, high = (update.tensors[f"lora_{factor}.weight"] for factor in "AB")
    missing = rank - update.rank
    if update.scale != scale:  # equal scales leave the factors bit-identical
        high = high * (update.scale / scale)
    tensors = {
        "lora_A.weight": F.pad(low, (0, 0, 0, missing)),
        "lora_B.weight": F.pad(high, (0, missing)),
    }
    return ModuleUpdate({**update.tensors, **tensors}, rank, scale)


def architecture_problems(backbone: Backbone) -> list[str]:
    """Return the reason why vLLM cannot serve LoRA on a model, if any.

    The registry of models of an installed vLLM is used. Without vLLM, decoders pass: vLLM runs
    unregistered ones with transformers' code, with LoRA.
    """
    name = backbone.name
    if backbone.is_encoder_decoder or not backbone.generates:
        return [f"{name}: vLLM serves LoRA on decoders that generate"]
    return [] if is_served(name) is not False else [f"{name}: the installed vLLM has no LoRA on it"]


def is_served(architecture: str) -> bool | None:
    """Return whether the installed vLLM serves LoRA on a class of models.

    None: vLLM is not installed, or lacks its own class and would run transformers' class.
    """
    if (cls := _class_in_vllm(architecture)) is None:
        return None
    from vllm.model_executor.models import supports_lora

    return bool(supports_lora(cls))


def stacks_experts(architecture: str) -> bool | None:
    """Return whether the installed vLLM accepts updates of stacked experts; None as `is_served`."""
    cls = _class_in_vllm(architecture)
    return None if cls is None else bool(getattr(cls, "is_3d_moe_weight", False))


def _class_in_vllm(architecture: str) -> Any:
    """Return the model class of the installed vLLM; None if it does not exist."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.model_executor.models import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        return None
    return ModelRegistry.models[architecture].load_model_cls()


def vllm_problems(files: PeftFiles, backbone: Backbone, max_rank: int = DEFAULT_RANK) -> list[str]:
    """List the reasons why vLLM would refuse the adapter or compute different results.

    vLLM serves LoRA on decoders, at ranks up to `--max-lora-rank`, which accepts a few values. Some
    releases use one scale for all modules, and none supports biases, DoRA or `modules_to_save`.
    Sources: its LoRA configuration, its reader of peft's options and its notes on models,
    https://docs.vllm.ai/en/latest/models/supported_models.html and
    https://docs.vllm.ai/en/latest/features/lora.html (2026).

    `max_rank` is the server's `--max-lora-rank`.
    """
    config, problems = files.config, architecture_problems(backbone)
    if files.kind != "LORA":
        return [*problems, f"{files.kind}: vLLM serves only LORA"]
    ranks = {config.get("r", 0), *(config.get("rank_pattern") or {}).values()}
    if max(ranks) > max_rank:
        fitting = next((r for r in RANKS if r >= max(ranks)), None)
        remedy = f"serve with --max-lora-rank {fitting}" if fitting else f"at most {RANKS[-1]}"
        problems.append(f"rank {max(ranks)}: more than the server's {max_rank}; {remedy}")
    if config.get("use_dora"):
        problems.append("use_dora: vLLM does not serve DoRA")
    if config.get("alora_invocation_tokens"):
        problems.append("alora_invocation_tokens: vLLM would apply the update to all tokens")
    if config.get("bias", "none") != "none":
        problems.append("bias: vLLM does not support trained biases")
    if saved := config.get("modules_to_save"):
        problems.append(f"modules_to_save: vLLM does not support it, here {', '.join(saved)}")
    return problems
