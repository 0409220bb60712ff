"""Mix the outputs of all layers of a stack at its last layer.

A hook on each layer stores its output; a hook on the last layer passes all outputs to the site
modules there and replaces its own output by theirs, in front of a final norm and every head.
Outputs are stored by layer number, so that a layer that is recomputed (gradient checkpointing)
overwrites its own with an equal one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.slot import Mark, Slot

_MIX = "_adapterhub_mix"
_STATES = "states"


class MixSlot(Slot):
    """Maps the outputs of all layers of a stack to a new output of the last one.

    A forward pass keeps the stack's input, under 0, and the outputs of all layers but the last.
    """

    def __init__(self, depth: int, batch_dim: int, query_stream: tuple[int, str] | None) -> None:
        super().__init__()
        self.query_stream = query_stream
        self.depth = depth
        self.batch_dim = batch_dim

    def forward(self, y: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
        """Mix the layers.

        `y` is the output of the last one, (batch, tokens, d); `kept` has the stack's input and the
        outputs of the layers below, by number.

        Returns:
            The new output, like y.
        """
        states = [kept[number] for number in range(self.depth)]

        def apply(key: str, y: Tensor, *states: Tensor) -> Tensor:
            return self.placed(key)(states, y)  # type: ignore[no-any-return]

        return self.run(apply, y, *states, dim=self.batch_dim)


def mix_slot(anatomy: Anatomy, site: Site) -> MixSlot:
    """Return the slot at the last layer of a stack; create it with its hooks if missing."""
    model = anatomy.model
    last = model.get_submodule(site.host)
    slot = last._modules.get(CHILD)
    if isinstance(slot, MixSlot):
        return slot
    depth = anatomy.depth(site.stack)
    above = site.host.rpartition(".")[0]
    layers = [model.get_submodule(f"{above}.{number}") for number in range(depth)]
    query_stream = None
    if name := anatomy.family.query_stream:
        query_stream = list(inspect.signature(last.forward).parameters).index(name), name
    slot = MixSlot(depth, anatomy.family.batch_dim, query_stream)
    for n, layer in enumerate(layers, start=1):
        slot.patch.hook(Mark, layer, _MIX, (slot, n))
    slot.patch.hook(layers[0].register_forward_pre_hook, keep_input, with_kwargs=True)
    for layer in layers[:-1]:
        slot.patch.hook(layer.register_forward_hook, keep_output)
    slot.patch.hook(last.register_forward_hook, mix_outputs)
    last.add_module(CHILD, slot)
    return slot


def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the input of the stack: the pre-hook of the first layer.

    Raises:
        SiteError: the heads read a second stream, which is not mixed.
    """
    ((slot, _),) = getattr(layer, _MIX)
    if slot.keys:
        if slot.query_stream:
            _refuse_query_stream(args, kwargs, *slot.query_stream)
        slot.keep(_STATES, {0: args[0] if args else kwargs["hidden_states"]})


def _refuse_query_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], number: int, name: str
) -> None:
    """Refuse a call of a layer with a second stream of hidden states."""
    if kwargs.get(name, args[number] if number < len(args) else None) is not None:
        raise SiteError(
            "a mix of layers does not change the stream of hidden states that is read here",
            expected="inputs without target_mapping, which generate passes",
            hint="another method for this model's generate, such as houlsby",
        )


def keep_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Store the output of a layer: the forward hook of all but the last."""
    ((slot, number),) = getattr(layer, _MIX)
    if slot.keys:
        slot.kept(_STATES)[number] = _hidden(output)


def mix_outputs(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Replace the output of the last layer: its forward hook."""
    ((slot, _),) = getattr(layer, _MIX)
    if not slot.keys:
        return output
    computes_again = layer.training and getattr(layer, "gradient_checkpointing", False)
    kept = slot.kept(_STATES) if computes_again else slot.take(_STATES)
    mixed = slot(_hidden(output), kept)
    return mixed if isinstance(output, Tensor) else (mixed, *output[1:])


def _hidden(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]
