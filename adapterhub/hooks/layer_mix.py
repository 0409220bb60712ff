"""Mix the outputs of all layers of a stack at its last layer.

A hook on each layer stores its output; the slot of the last layer passes all outputs to the site
modules there and replaces its own output by theirs, in front of a final norm and every head.
Outputs are stored by layer number, so that a layer that is recomputed (gradient checkpointing)
overwrites its own with an equal one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.hooks.layer_output import STATES, LayerSlot, hidden, layer_slot
from adapterhub.hooks.slot import Mark, first_input

_MIX = "_adapterhub_mix"


def mix_slot(anatomy: Anatomy, site: Site) -> LayerSlot:
    """Return the slot at the last layer of a stack; let it keep the states below if it does not."""
    slot = layer_slot(anatomy, site.host)
    if slot.mixed:
        return slot
    slot.mixed = anatomy.depth(site.stack)
    above = site.host.rpartition(".")[0]
    numbers = range(slot.mixed)
    layers = [anatomy.model.get_submodule(f"{above}.{number}") for number in numbers]
    for n, layer in enumerate(layers, start=1):
        slot.patch.hook(Mark, layer, _MIX, (slot, n))
    slot.patch.hook(layers[0].register_forward_pre_hook, keep_input, with_kwargs=True)
    for layer in layers[:-1]:
        slot.patch.hook(layer.register_forward_hook, keep_output)
    return slot


def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the input of the stack: the pre-hook of the first layer."""
    ((slot, _),) = getattr(layer, _MIX)
    if slot.mixes():
        slot.keep(STATES, {0: first_input(args, kwargs)})


def keep_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Store the output of a layer: the forward hook of all but the last."""
    ((slot, number),) = getattr(layer, _MIX)
    if slot.mixes():
        slot.kept(STATES)[number] = hidden(output)
