"""Virtual tokens enter a stack as embeddings in front of the caller's tokens, and leave with its
output.

A pre-hook on the stack turns `input_ids` into embeddings, puts the prompt in front and widens the
mask, the positions and the token types; a hook on its output takes the virtual positions off again,
so that the caller sees outputs of the length that it sent. Where a decoder attends to the stack,
they stay for it, as in Lester et al. 2021, and its mask is widened instead. With a KV cache the
prompt enters once, with the first tokens. In a batch padded on the left it stands in front of the
padding, which a sliding attention window counts.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.backbones.anatomy import CHILD, Anatomy, Site
from adapterhub.slots import Slot

_PROMPT = "_adapterhub_prompt"
_SEQUENCES = ("last_hidden_state", "hidden_states")
_ENCODER_SEQUENCES = ("encoder_last_hidden_state", "encoder_hidden_states")


class PromptSlot(Slot):
    """Sits at a stack: each active module gives virtual tokens."""

    def __init__(self, names: tuple[str, ...], padding_idx: int | None, strips: bool) -> None:
        super().__init__()
        self.names = names
        self.padding_idx = padding_idx
        self.strips = strips
        self.tokens = 0
        self.added = 0

    def forward(self) -> Tensor:
        """The virtual tokens of all active prompts: (length, d)."""
        return torch.cat([self.placed(key)() for key in self.active])


def prompt_slot(anatomy: Anatomy, site: Site) -> PromptSlot:
    """The slot at a stack, made with its hooks if this is its first prompt."""
    model = anatomy.model
    root = model.get_submodule(site.host)
    slot = root._modules.get(CHILD)
    if isinstance(slot, PromptSlot):
        return slot
    names = tuple(inspect.signature(root.forward).parameters)
    feeds_decoder = site.stack == "encoder" and "decoder" in anatomy.stacks
    padding_idx = root.config.pad_token_id if anatomy.family.positions_from_padding else None  # type: ignore[union-attr]
    slot = PromptSlot(names, padding_idx, strips=not feeds_decoder)  # type: ignore[arg-type]
    slot.handles.append(root.register_forward_pre_hook(add_prompt, with_kwargs=True))
    slot.handles.append(root.register_forward_hook(strip_prompt))
    if feeds_decoder:
        decoder = model.get_submodule(anatomy.path(anatomy.stacks["decoder"].root))
        slot.handles.append(_watch(decoder, slot, widen_encoder_mask))
        slot.handles.append(_watch_output(model, slot, strip_encoder_output))
    if body := anatomy.stacks[site.stack].body:
        slot.handles.append(_watch_output(root.get_submodule(body), slot, strip_body))
    root.add_module(CHILD, slot)
    return slot


def _watch(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_output(module: nn.Module, slot: PromptSlot, hook: Any) -> Any:
    setattr(module, _PROMPT, [slot])
    return module.register_forward_hook(hook)


def _past_length(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def add_prompt(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pre-hook of a stack: prompt in front, mask, positions and token types widened."""
    slot = root._modules[CHILD]
    if not isinstance(slot, PromptSlot) or not slot.active:
        return None
    inputs = dict(zip(slot.names[: len(args)], args, strict=True)) | kwargs
    prompt = slot()
    length = len(prompt)
    slot.added = 0 if _past_length(inputs.get("past_key_values")) else length
    if inputs.get("attention_mask") is not None:
        inputs["attention_mask"] = F.pad(inputs["attention_mask"], (length, 0), value=1)
    _shift_positions(inputs, slot, length)
    if slot.added:
        _put_in_front(root, inputs, slot, prompt)
    return (), inputs


def _put_in_front(
    root: nn.Module, inputs: dict[str, Any], slot: PromptSlot, prompt: Tensor
) -> None:
    tokens = inputs.pop("input_ids", None)
    embeds = inputs.get("inputs_embeds")
    if embeds is None:
        embeds = root.get_input_embeddings()(tokens)  # type: ignore[operator]
    prompt = prompt.to(embeds.dtype).expand(len(embeds), -1, -1)
    slot.tokens = embeds.shape[1]
    inputs["inputs_embeds"] = torch.cat([prompt, embeds], dim=1)
    if inputs.get("token_type_ids") is not None:
        inputs["token_type_ids"] = F.pad(inputs["token_type_ids"], (prompt.shape[1], 0))


def _shift_positions(inputs: dict[str, Any], slot: PromptSlot, length: int) -> None:
    positions = inputs.get("position_ids")
    first = 0
    if slot.padding_idx is not None:
        first = slot.padding_idx + 1
        if positions is None and inputs.get("input_ids") is not None:
            real = inputs["input_ids"].ne(slot.padding_idx).long()
            positions = real.cumsum(1) * real + slot.padding_idx
    if positions is None:
        return
    shifted = torch.where(positions < first, positions, positions + length)
    if slot.added:
        virtual = torch.arange(first, first + length, device=positions.device)
        shifted = torch.cat([virtual.expand(len(shifted), -1), shifted], dim=1)
    inputs["position_ids"] = shifted


def strip_prompt(root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of a stack: the virtual positions leave its output."""
    slot = root._modules[CHILD]
    assert isinstance(slot, PromptSlot)
    added, slot.added = slot.added, 0
    return _strip(output, _SEQUENCES, slot.tokens) if added and slot.strips else output


def strip_body(body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of what a root pools: the pooler reads the caller's first token, not a virtual
    one."""
    (slot,) = getattr(body, _PROMPT)
    return _strip(output, _SEQUENCES, slot.tokens) if slot.added and slot.strips else output


def widen_encoder_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pre-hook of a decoder: its mask over the encoder covers the virtual tokens there."""
    (slot,) = getattr(decoder, _PROMPT)
    states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
    if slot.active and states is not None and mask is not None:
        kwargs["encoder_attention_mask"] = F.pad(
            mask, (states.shape[1] - mask.shape[1], 0), value=1
        )
    return args, kwargs


def strip_encoder_output(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of an encoder-decoder: the encoder's virtual positions leave the final output."""
    (slot,) = getattr(model, _PROMPT)
    if not slot.active or isinstance(output, tuple):
        return output
    states = output.get("encoder_last_hidden_state")
    if states is None:
        return output
    return _strip(output, _ENCODER_SEQUENCES, states.shape[1] - len(slot()))


def _strip(output: Any, names: tuple[str, ...], tokens: int) -> Any:
    """Keep the last `tokens` positions; what is that short already stays as it is."""
    if isinstance(output, tuple):
        return (output[0][:, -tokens:], *output[1:])
    for name in names:
        value = output.get(name)
        if isinstance(value, tuple):
            output[name] = tuple(v[:, -tokens:] for v in value)
        elif value is not None:
            output[name] = value[:, -tokens:]
    return output


def forget_prompt(model: PreTrainedModel) -> None:
    """Remove what prompt slots left on the modules that they watched."""
    for module in model.modules():
        if _PROMPT in module.__dict__:
            delattr(module, _PROMPT)
