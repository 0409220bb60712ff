"""Whether another library can take an adapter, before anything is trained or even downloaded."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from adapterhub.attachment import place
from adapterhub.errors import AdapterhubError, ConfigError, did_you_mean
from adapterhub.interchange.peft_out import try_peft
from adapterhub.interchange.vllm import DEFAULT_RANK, vllm_problems
from adapterhub.methods.spec import Spec, parse

TARGETS = ("peft", "vllm")


def blocking(
    model: PreTrainedModel, method: Spec, target: str, *, max_rank: int = DEFAULT_RANK
) -> list[str]:
    """Every feature of a method on a model that keeps `target` (peft or vllm) from taking it.

    The model may be without weights (`skeleton`). It is left as it was.

    Raises:
        ConfigError: an unknown target, method or option.
    """
    if target not in TARGETS:
        raise ConfigError(
            f"nothing is known of {target!r}{did_you_mean(target, TARGETS)}",
            expected=f"one of {', '.join(TARGETS)}",
        )
    methods = parse(method)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(model.device):
            adapter = place(model, methods, f"check for {target}")
    except ConfigError:
        raise
    except AdapterhubError as error:  # the method does not even fit the backbone
        return ["; ".join([error.problem, *error.offenders])]
    try:
        files, found = try_peft(adapter.source())
    finally:
        adapter.detach()
    return found + (vllm_problems(files, model, max_rank) if target == "vllm" else [])
