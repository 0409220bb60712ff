"""The slot at a layer, whose modules change the residual stream behind or in front of it.

The last layer of a stack has one slot for these and for a mix of all layers.

The mix: a hook on each layer stores its output. The slot of the last layer passes all outputs to
its site modules and replaces its own output by theirs, in front of a final norm and every head.
Outputs are stored by layer number, so that a recomputed layer (gradient checkpointing) overwrites
its output with an equal one.

Reversible layers do not keep activations. One autograd function over all of them recomputes them in
its backward and computes the gradients of their parameters. Autograd calls this backward only if an
input of the function requires a gradient, unlike the states above frozen embeddings. The layers
also assert training mode, where they record the seeds of their dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.projections import reversible_stack
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.slot import Mark, OutputSlot, Slot, first_input, put_slot
from adapterhub.methods.common.site_module import SiteModule
from adapterhub.patch import Patch


def require_input_gradients(anatomy: Anatomy, patch: Patch) -> None:
    """Make the inputs of reversible layers require gradients if any of their parameters trains."""
    for stack, _ in _reversible(anatomy):
        patch.hook(stack.register_forward_pre_hook, _require_gradient, with_kwargs=True)


def keep_training(anatomy: Anatomy) -> None:
    """Set reversible layers to training mode; their submodules, such as dropout, are unchanged."""
    for _, layers in _reversible(anatomy):
        for path in layers:
            anatomy.model.get_submodule(path).training = True


def is_reversible(anatomy: Anatomy) -> bool:
    """Return whether a backbone has reversible layers."""
    return bool(_reversible(anatomy))


def _reversible(anatomy: Anatomy) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """List the stacks of reversible layers with the paths of the layers."""
    stacks = []
    for paths in anatomy.layers.values():
        stack = reversible_stack(anatomy.model, paths[0]) if paths else None
        stacks += [(stack, paths)] if stack is not None else []
    return stacks


def _require_gradient(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Make the states require a gradient: a forward pre-hook."""
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
        return None
    return tuple(map(_anchored, args)), {name: _anchored(value) for name, value in kwargs.items()}


def _anchored(value: Any) -> Any:
    """Return states, (batch, tokens, d), that require a gradient; other values are unchanged."""
    states = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
    return value.detach().requires_grad_() if states and not value.requires_grad else value


STATES = "states"


class LayerSlot(OutputSlot):
    """Map the output of a layer to a new one.

    Args:
        batch_dim: the dimension of the batch in the layer's output.
        query_stream: the place and name of the layer's argument with a second stream of hidden
            states, if it has one.
    """

    def __init__(self, batch_dim: int, query_stream: tuple[int, str] | None) -> None:
        super().__init__(batch_dim)
        self.query_stream = query_stream
        self.mixed = 0  # the states below that a mix reads, kept by number in a pass

    def placed(self, key: str) -> Any:
        """Return the module with a key."""
        return Slot.placed(self, key)

    def mixes(self) -> bool:
        """Return whether a mix of layers applies in this call."""
        return any(self.sites[key].kind == "mix" for key in self.keys)

    def _states(self, host: nn.Module) -> Sequence[Tensor]:
        """Return the stack's input and the outputs of the layers below, if they are mixed."""
        if not self.mixed or not self.mixes():
            return ()
        computes_again = host.training and getattr(host, "gradient_checkpointing", False)
        kept = self.kept(STATES) if computes_again else self.take(STATES)
        return [kept[number] for number in range(self.mixed)]

    def _change_output(
        self,
        host: nn.Module,
        module: SiteModule,
        site: Site,
        compute: Any,
        reads: tuple[int, ...],
        y: Tensor,
        *inputs: Any,
    ) -> Tensor:
        """Change the output by a module, which may mix the last of the inputs."""
        if site.kind != "mix":
            return super()._change_output(host, module, site, compute, reads, y, *inputs)
        mixed: Tensor = module(inputs[-self.mixed :], y)
        return mixed


def layer_slot(anatomy: Anatomy, host: str) -> LayerSlot:
    """Return the slot at a layer; create it with its hook if missing."""
    layer = anatomy.model.get_submodule(host)
    slot = layer._modules.get(CHILD)
    if isinstance(slot, LayerSlot):
        return slot
    query_stream = None
    if name := anatomy.family.query_stream:
        query_stream = list(inspect.signature(layer.forward).parameters).index(name), name
    slot = LayerSlot(anatomy.family.batch_dim, query_stream)
    # Before other hooks: a mix keeps the new output of a layer.
    change: Any = change_layer
    slot.hook(layer.register_forward_hook, change, prepend=True, with_kwargs=True)
    put_slot(layer, slot)
    return slot


def input_slot(anatomy: Anatomy, host: str) -> LayerSlot:
    """Return the slot at a layer whose modules change its input; create it if missing."""
    slot = layer_slot(anatomy, host)
    if not slot.takes_input:
        slot.takes_input = True
        layer, change = anatomy.model.get_submodule(host), enter_layer
        # Before other hooks: a mix keeps the new input.
        slot.hook(layer.register_forward_pre_hook, change, prepend=True, with_kwargs=True)
    return slot


def enter_layer(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Change the input of a layer: its forward pre-hook."""
    slot = layer._modules[CHILD]
    if not isinstance(slot, LayerSlot) or not slot.keys:
        return None
    if slot.query_stream:
        _refuse_query_stream(args, kwargs, *slot.query_stream)
    if args:
        return (slot.enter(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, kwargs | {name: slot.enter(kwargs[name])}


def change_layer(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Change the output of a layer: its forward hook.

    Raises:
        SiteError: the heads read a second stream, which cannot be changed.
    """
    slot = layer._modules[CHILD]
    if not isinstance(slot, LayerSlot) or not slot.keys:
        return output
    if slot.query_stream:
        _refuse_query_stream(args, kwargs, *slot.query_stream)
    changed = slot(layer, first_input(args, kwargs), hidden(output))
    return changed if isinstance(output, Tensor) else (changed, *output[1:])


def hidden(output: Any) -> Any:
    """Return the hidden states among the outputs of a layer."""
    return output if isinstance(output, Tensor) else output[0]


def _refuse_query_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], number: int, name: str
) -> None:
    """Refuse a call of a layer with a second stream of hidden states."""
    if kwargs.get(name, args[number] if number < len(args) else None) is not None:
        raise SiteError(
            "what changes the output of a layer does not change the stream of hidden states that "
            "is read here",
            expected="inputs without target_mapping, which generate passes",
            hint="another method for this model's generate, such as houlsby",
        )


_MIX = "_adapterhub_mix"


def mix_slot(anatomy: Anatomy, site: Site) -> LayerSlot:
    """Return the slot at the last layer of a stack; make it keep the states below."""
    slot = layer_slot(anatomy, site.host)
    if slot.mixed:
        return slot
    slot.mixed = anatomy.depth(site.stack)
    above = site.host.rpartition(".")[0]
    numbers = range(slot.mixed)
    layers = [anatomy.model.get_submodule(f"{above}.{number}") for number in numbers]
    for n, layer in enumerate(layers, start=1):
        slot.hook(Mark, layer, _MIX, (slot, n))
    slot.hook(layers[0].register_forward_pre_hook, keep_input, with_kwargs=True)
    for layer in layers[:-1]:
        slot.hook(layer.register_forward_hook, keep_output)
    return slot


def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the input of the stack: the pre-hook of the first layer."""
    ((slot, _),) = getattr(layer, _MIX)
    if slot.mixes():
        slot.keep(STATES, {0: first_input(args, kwargs)})


def keep_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Store the output of a layer: the forward hook of all layers but the last."""
    ((slot, number),) = getattr(layer, _MIX)
    if slot.mixes():
        slot.kept(STATES)[number] = hidden(output)
