"""The outputs of all layers of a stack meet at its last one.

A hook on each layer keeps what the layer gave, one on the last layer hands all of it to the site
modules there and puts what they return in the place of its output: below a final norm, and so below
every head. What a layer gave is kept under the layer's number, so that a layer which computes again
(gradient checkpointing) replaces its own output by an equal one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.hooks.slot import Mark, Slot

_MIX = "_adapterhub_mix"


class MixSlot(Slot):
    """Sits at the last layer of a stack: each active module maps the states of all layers to one.

    `states` are those of the layers under it, the stack's input first: depth tensors.
    """

    def __init__(self, depth: int, batch_dim: int) -> None:
        super().__init__()
        self.depth = depth
        self.batch_dim = batch_dim
        self.states: dict[int, Tensor] = {}

    def forward(self, y: Tensor) -> Tensor:
        """y: (batch, tokens, d), the output of the last layer -> y' like y."""
        states = [self.states[number] for number in range(self.depth)]

        def apply(key: str, y: Tensor, *states: Tensor) -> Tensor:
            return self.placed(key)(states, y)  # type: ignore[no-any-return]

        return self.run(apply, y, *states, dim=self.batch_dim)

    def __getstate__(self) -> dict[str, Any]:
        # What one forward pass left has a graph, and cannot be copied.
        return self.__dict__ | {"states": {}}


def mix_slot(anatomy: Anatomy, site: Site) -> MixSlot:
    """The slot at the last layer of a stack, made with its hooks if this is its first module."""
    model = anatomy.model
    last = model.get_submodule(site.host)
    slot = last._modules.get(CHILD)
    if isinstance(slot, MixSlot):
        return slot
    depth = anatomy.depth(site.stack)
    slot = MixSlot(depth, anatomy.family.batch_dim)
    above = site.host.rpartition(".")[0]
    layers = [model.get_submodule(f"{above}.{number}") for number in range(depth)]
    slot.handles += [Mark(layer, _MIX, (slot, n)) for n, layer in enumerate(layers, start=1)]
    slot.handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    slot.handles += [layer.register_forward_hook(keep_output) for layer in layers[:-1]]
    slot.handles.append(last.register_forward_hook(mix_outputs))
    last.add_module(CHILD, slot)
    return slot


def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The pre-hook of the first layer."""
    ((slot, _),) = getattr(layer, _MIX)
    if slot.active:
        slot.states[0] = args[0] if args else kwargs["hidden_states"]


def keep_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The hook of every layer but the last."""
    ((slot, number),) = getattr(layer, _MIX)
    if slot.active:
        slot.states[number] = _hidden(output)


def mix_outputs(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hook of the last layer."""
    ((slot, _),) = getattr(layer, _MIX)
    if not slot.active:
        return output
    mixed = slot(_hidden(output))
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        slot.states.clear()  # else the layer computes again, from these
    return mixed if isinstance(output, Tensor) else (mixed, *output[1:])


def _hidden(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]
