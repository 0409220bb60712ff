"""The slot at a projection or sublayer: maps its host's input and output to a new output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD, STREAM, Site, Stream
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.hooks.slot import Mark, Slot, tap_sublayer_input

_STREAM = "_adapterhub_stream"


class OutputSlot(Slot):
    """Sits at a projection: each active module maps the host's input x and output y to a new y,
    or, where it says so, x to a new x."""

    def __init__(self, batch_dim: int = 0) -> None:
        super().__init__()
        self.takes_input = False
        self.batch_dim = batch_dim
        self.around: list[nn.Module | None] = []  # in a list, norms are not children
        self.residual: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, d_in), the host's input -> x' like x."""
        return self.run(self._apply_before, x, dim=self.batch_dim)

    def _apply_before(self, key: str, x: Tensor) -> Tensor:
        module = self.placed(key)
        changed: Tensor = module(x) if _changes_input(module) else x
        return changed

    def forward(self, host: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, tokens, d_in), y: (batch, tokens, d_out) of the host -> y' like y."""
        sublayer_x = self.take_sublayer_input()
        residual, self.residual = self.residual, None

        def apply(
            key: str, y: Tensor, x: Tensor, sublayer_x: Tensor | None, residual: Tensor | None
        ) -> Tensor:
            site, module = self.sites[key], self.placed(key)
            if _changes_input(module):
                return y
            source = sublayer_x if site.input_host else x
            if _reads(module) in STREAM:
                source = x if residual is None else residual
                source = self._block(source, y) if _reads(module) == "block" else source
            reads = getattr(module, "reads_weight", False)
            more = (read_weight(host, site.part), read_bias(host, site.part)) if reads else ()
            if site.part is None:
                return module(source, y, *more)  # type: ignore[no-any-return]
            return site.part.write(y, module(source, site.part.read(y), *more))

        return self.run(apply, y, x, sublayer_x, residual, dim=self.batch_dim)

    def _block(self, residual: Tensor, y: Tensor) -> Tensor:
        """What the layer goes on with behind this sublayer: norm(r + postnorm(y))."""
        norm, postnorm = self.around
        total: Tensor = residual + (y if postnorm is None else postnorm(y))
        return total if norm is None else norm(total)


def _reads(module: nn.Module) -> str:
    return str(getattr(module, "reads", "input"))


def _changes_input(module: nn.Module) -> bool:
    return getattr(module, "changes_input", False)


def call_slot(host: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
    """The forward hook of a projection."""
    slot = host._modules[CHILD]
    return slot(host, args[0], y) if slot is not None and slot.active else y


def call_slot_before(host: nn.Module, args: tuple[Any, ...]) -> Any:
    """The pre-hook of a projection whose input changes."""
    slot = host._modules[CHILD]
    return (slot.enter(args[0]), *args[1:]) if isinstance(slot, OutputSlot) else args


def capture_residual(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The pre-hook of the module that the residual stream enters: keeps it for an output slot."""
    for slot in getattr(module, _STREAM):
        if slot.active:
            slot.residual = args[0]


def _join_stream(model: nn.Module, slot: OutputSlot, stream: Stream) -> None:
    """Let a slot have the residual stream, and the norms behind its sublayer."""
    norms = (stream.norm, stream.postnorm)
    slot.around = [None if path is None else model.get_submodule(path) for path in norms]
    if stream.input_host is not None:
        module = model.get_submodule(stream.input_host)
        slot.handles.append(Mark(module, _STREAM, slot))
        slot.handles.append(module.register_forward_pre_hook(capture_residual, prepend=True))


def output_slot(model: nn.Module, site: Site, module: nn.Module, batch_dim: int = 0) -> OutputSlot:
    """The slot at a site's host, made if this is its first module, with the hooks that the site and
    the module need."""
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, OutputSlot):
        slot = OutputSlot(batch_dim)
        host.add_module(CHILD, slot)
        slot.handles.append(host.register_forward_hook(call_slot))
    if _changes_input(module) and not slot.takes_input:
        slot.takes_input = True
        slot.handles.append(host.register_forward_pre_hook(call_slot_before))
    tap_sublayer_input(model, slot, site.input_host)
    if site.stream and _reads(module) in STREAM and not slot.around:
        _join_stream(model, slot, site.stream)
    return slot
