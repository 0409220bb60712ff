"""A larger model around a stack with a prompt, such as one that reads pictures for it.

It may count positions, and make masks, before it calls the stack. It counts from inputs, which do
not have the virtual tokens, and from the cache, which has them. So with the first tokens, the mask
of the caller is kept for the stack, which finds padding by it. With later tokens, mask and
positions are extended here, in front of the larger model: all that is computed from them, and from
the cache, is then as long as the cache.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.hooks.prompt_inputs import PromptedInputs, past_length
from adapterhub.hooks.prompt_slot import OUTER, OuterInputs, PromptSlot
from adapterhub.hooks.slot import Mark

_AROUND = "_adapterhub_prompt_inside"
_TEXT = {"input_ids", "attention_mask", "position_ids", "past_key_values"}


def watch_around(model: PreTrainedModel, host: str, slot: PromptSlot) -> None:
    """Extend the inputs of the modules around a stack, down from the model.

    Args:
        model: the model.
        host: the path of the stack; a stack that is the base model has none around it that counts.
        slot: the slot at the stack.
    """
    if model.config.is_encoder_decoder or model.get_submodule(host) is model.base_model:
        return
    parts = host.split(".") if host else []
    for end in range(len(parts)):
        module = model.get_submodule(".".join(parts[:end]))
        if set(inspect.signature(module.forward).parameters) >= _TEXT:
            slot.patch.hook(Mark(module, _AROUND, slot))
            slot.patch.hook(module.register_forward_pre_hook(extend_around, with_kwargs=True))
            slot.patch.hook(module.register_forward_hook(forget_around, always_call=True))


def extend_around(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep the caller's mask, or extend the inputs that follow a cache: a forward pre-hook."""
    names = tuple(inspect.signature(module.forward).parameters)
    values = dict(zip(names, args, strict=False)) | kwargs
    for slot in getattr(module, _AROUND, ()):
        outer: OuterInputs | None = slot.kept(OUTER)
        if slot.keys and outer is None:  # else a module around this one did it
            slot.keep(OUTER, _extended(slot, values))
            slot.keep(_AROUND, module)
    return (), values


def _extended(slot: PromptSlot, values: dict[str, Any]) -> OuterInputs:
    if past_length(values.get("past_key_values")):
        PromptedInputs(values, slot).extend_mask_and_positions()
        return OuterInputs(extended=True)
    mask = values.get("attention_mask")
    plain = isinstance(mask, Tensor) and mask.ndim == 2
    return OuterInputs(mask if plain else None, values.get("position_ids") is not None)


def forget_around(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forget what was kept for a pass, also one that failed: a forward hook."""
    for slot in getattr(module, _AROUND, ()):
        if slot.kept(_AROUND) is module:
            slot.take(_AROUND)
            slot.take(OUTER)
