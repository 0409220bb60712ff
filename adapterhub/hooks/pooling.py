"""The task head reads pooled token states: one vector of each row, instead of the model's choice.

A hook on the base model replaces its last hidden state by the pooled vector at every position, and
its pooler's output by that vector. Whatever the head of a transformers class reads (the first
token, the last one, the pooler's output) is then the pooled vector, and no class is named here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.backbones.pooling import POOLS, pooling_in_training
from adapterhub.errors import SiteError
from adapterhub.hooks.slot import Mark, Slot, drop_slot, put_slot

_POOLING = "_adapterhub_pooling_slot"
_MASK = "mask"
_SITE = "head.pooling"


class Pool(nn.Module):
    """Pools the token states of each row; padding is left out.

    Args:
        how: cls (the first token), mean, last or max.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the pooled vector of each row at each of its positions.

        `states`: (batch, tokens, d); `mask`: (batch, tokens), false at padding.
        """
        if states.stride(1) == 0:  # pooled by an adapter below this one
            return states
        pooled = POOLS[self.how](states.float(), mask).to(states.dtype)
        return pooled.unsqueeze(1).expand_as(states)


class PoolingSlot(Slot):
    """The poolings of the active adapters, on the model as a whole.

    Args:
        names: the parameters of the model's `forward`, in order.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Pool the rows of the adapters that have a pooling.

        `states`: (batch, tokens, d); `mask`: (batch, tokens), false at padding.
        """

        def apply(key: str, states: Tensor, mask: Tensor) -> Tensor:
            pooled: Tensor = self.placed(key)(states, mask)
            return pooled

        return self.run(apply, states, mask)

    def first(self, vector: Tensor, states: Tensor) -> Tensor:
        """Replace the vectors of rows that are pooled by the states at their first position.

        `vector`: the output of the model's own pooler, (batch, d); `states`: the pooled states,
        (batch, tokens, d).
        """
        return self.run(lambda key, vector, states: states[:, 0], vector, states)


def _keep_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the mask of a call: a pre-hook of the model."""
    slot = model._modules.get(CHILD)
    if isinstance(slot, PoolingSlot) and slot.keys:  # else another thread has removed it
        values = dict(zip(slot.names, args, strict=False)) | kwargs
        slot.keep(_MASK, (values.get("attention_mask"),))


def _pool_output(base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Pool the output of the base model: its forward hook."""
    slots: list[PoolingSlot] = getattr(base, _POOLING, [])  # none: another thread has removed it
    kept = slots[0].take(_MASK) if slots else None
    if kept is None or not slots[0].keys:  # the base model was called alone, for its hidden states
        return output
    slot = slots[0]
    states = output[0]
    pooled = slot(states, _mask_of(kept[0], states))
    if isinstance(output, tuple):
        vector: Any = output[1] if len(output) > 1 else None
        has_pooler = isinstance(vector, Tensor) and vector.dim() == 2
        return (pooled, slot.first(vector, pooled), *output[2:]) if has_pooler else (
            pooled, *output[1:]
        )  # fmt: skip
    output["last_hidden_state"] = pooled
    if output.get("pooler_output") is not None:
        output["pooler_output"] = slot.first(output["pooler_output"], pooled)
    return output


def _mask_of(mask: Tensor | None, states: Tensor) -> Tensor:
    """Return the mask of a call as booleans, (batch, tokens).

    Raises:
        SiteError: the mask is not one of tokens.
    """
    if mask is None:
        return states.new_ones(states.shape[:2], dtype=torch.bool)
    if mask.dim() == 3:  # (batch, choices, tokens) of multiple choice
        mask = mask.flatten(0, 1)
    if mask.shape != states.shape[:2]:
        raise SiteError(
            f"the token states have shape {list(states.shape[:2])}, the mask {list(mask.shape)}",
            expected="an attention_mask of (batch, tokens), and a backbone that keeps all tokens",
            hint="pooling=model, the pooling of the transformers class",
        )
    return mask.bool()


@dataclass(eq=False)
class HeadPooling:
    """The pooling in front of one adapter's head; `key` is its name in the slot."""

    model: PreTrainedModel = field(repr=False)
    base: nn.Module = field(repr=False)
    how: str
    key: str

    def inject(self) -> None:
        """Add the pooling to the model, inactive."""
        slot = self.model._modules.get(CHILD)
        if not isinstance(slot, PoolingSlot):
            slot = PoolingSlot(tuple(inspect.signature(self.model.forward).parameters))
            put_slot(self.model, slot)
            slot.patch.hook(self.model.register_forward_pre_hook, _keep_mask, with_kwargs=True)
            slot.patch.hook(Mark, self.base, _POOLING, slot)
            slot.patch.hook(self.base.register_forward_hook, _pool_output)
        slot.add(self.key, Site(_SITE, "head", None, "pooling", "mix", "", 0, 0), Pool(self.how))

    def eject(self) -> None:
        """Remove the pooling from the model."""
        for slot in self.slots():
            slot.remove(self.key)
            if not slot.sites:
                drop_slot(self.model, "")

    def slots(self) -> Iterator[PoolingSlot]:
        """Yield the slot that has the pooling."""
        slot = self.model._modules[CHILD]
        assert isinstance(slot, PoolingSlot)
        yield slot


def head_pooling(anatomy: Anatomy, how: str | None, key: str) -> HeadPooling | None:
    """Return the pooling for a head; None for that of the model's class.

    `how` is cls, mean, last or max; "model" or None for that of the class.

    Raises:
        SiteError: the model has no head that reads one vector of each text.
    """
    if how not in POOLS:
        return None
    if not anatomy.head() or len(anatomy.stacks) > 1:
        raise SiteError(
            f"pooling={how} needs a task head on one stack of layers",
            expected="a model for classification, regression or multiple choice that is not an "
            "encoder-decoder",
            hint="pooling=model, the pooling of the model's class",
        )
    return HeadPooling(anatomy.model, anatomy.model.get_submodule(anatomy.base_path), how, key)


def default_pooling(anatomy: Anatomy) -> str | None:
    """Return the pooling that the backbone was trained with; None if that of its class is equal."""
    trained = pooling_in_training(anatomy.model)
    return None if len(anatomy.stacks) > 1 or trained == _of_class(anatomy) else trained


def _of_class(anatomy: Anatomy) -> str | None:
    """Return what the head of a class reads, with padding on the right; None if it is unknown."""
    if anatomy.family.query_stream or bypassed(anatomy):
        return None
    return "last" if "decoder" in anatomy.stacks else "cls"


def bypassed(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of modules of the base model that no head reads behind a pooling."""
    base = anatomy.model.get_submodule(anatomy.base_path)
    return (anatomy.path("pooler"),) if getattr(base, "pooler", None) else ()
