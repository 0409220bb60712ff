"""What vLLM serves of a peft checkpoint, and the form of a LoRA that every release of it takes.

    y + (alpha / r) B A x      one r and one alpha for all modules, no other tensors

Factors of a smaller rank are padded with zeros. Where scales differ, each is multiplied into its B.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace

import torch.nn.functional as F
from transformers import PreTrainedModel

from adapterhub.interchange.peft.export_types import ExportSource
from adapterhub.interchange.peft.exporter import (
    ModuleUpdate,
    low_rank_updates,
    pattern_options,
    try_peft,
)
from adapterhub.interchange.peft.files import PeftFiles

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
DEFAULT_RANK = 16


def try_vllm(source: ExportSource, max_rank: int = DEFAULT_RANK) -> tuple[PeftFiles, list[str]]:
    """Return a LoRA in the form for vLLM, as far as possible, and what vLLM does not serve.

    `max_rank` is the server's `--max-lora-rank`.
    """
    files, problems = try_peft(source)
    updates = at_one_rank(low_rank_updates(source)[0])
    if updates and files.kind == "LORA":
        tensors = {
            f"{host}.{name}": tensor
            for host, update in updates.items()
            for name, tensor in update.tensors.items()
        }
        options = pattern_options(updates, rooted=False)
        options |= {"rank_pattern": None, "alpha_pattern": None}  # empty by now
        files = replace(
            files, config={**files.config, **options}, tensors={**files.tensors, **tensors}
        )
    return files, problems + vllm_problems(files, source.anatomy.model, max_rank)


def at_one_rank(updates: Mapping[str, ModuleUpdate]) -> dict[str, ModuleUpdate]:
    """Return updates with the largest of their ranks and one scale, which compute the same."""
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


def architecture_problems(model: PreTrainedModel) -> list[str]:
    """Return the reason why vLLM serves no LoRA on a model, if there is one.

    An installed vLLM is asked for its registry of models. Without one, decoders pass: vLLM runs
    those that it has no class for by transformers' code, with LoRA.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder or not model.can_generate():
        return [f"{name}: vLLM serves LoRA on decoders that generate"]
    return [] if is_served(name) is not False else [f"{name}: the installed vLLM has no LoRA on it"]


def is_served(architecture: str) -> bool | None:
    """Return whether the installed vLLM serves LoRA on a class of models.

    None: vLLM is not installed, or has no class of its own for it, and would run transformers'.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.model_executor.models import ModelRegistry, supports_lora

    if architecture not in ModelRegistry.get_supported_archs():
        return None
    return bool(supports_lora(ModelRegistry.models[architecture].load_model_cls()))


def vllm_problems(
    files: PeftFiles, model: PreTrainedModel, max_rank: int = DEFAULT_RANK
) -> list[str]:
    """List the reasons why vLLM would refuse the adapter or compute something else.

    vLLM serves LoRA on decoders, at ranks up to `--max-lora-rank`, which accepts a few values. Some
    releases use one scale for all modules, and none supports biases, DoRA or `modules_to_save`.
    Sources: its LoRA configuration, its reader of peft's options and its notes on models,
    https://docs.vllm.ai/en/latest/models/supported_models.html and
    https://docs.vllm.ai/en/latest/features/lora.html (2026).

    `max_rank` is the server's `--max-lora-rank`.
    """
    config, problems = files.config, architecture_problems(model)
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
