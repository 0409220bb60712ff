"""How a site module gets into the forward pass: one child module and one hook on its host.

The host may be `Linear`, `Conv1D`, a quantized layer or anything else: it is called, never
replaced. Hooks are plain functions that find their slot through the host, so that a model with
adapters on it can be copied, pickled, moved and compiled.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapterhub.backbones.anatomy import CHILD, STREAM, Site, Stream
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.composition import Plan, Step, through

_TAP = "_adapterhub_tap"
_STREAM = "_adapterhub_stream"


class Mark:
    """An entry in a list on a module, by which a hook there finds its slots; `remove` takes it
    off, and the list with the last one."""

    def __init__(self, module: nn.Module, name: str, entry: Any) -> None:
        # In a list, the slot does not become a second child, under a second state-dict key.
        self.module, self.name, self.entry = module, name, entry
        module.__dict__.setdefault(name, []).append(entry)

    def remove(self) -> None:
        """The module is as it was."""
        entries = getattr(self.module, self.name)
        entries.remove(self.entry)
        if not entries:
            delattr(self.module, self.name)


class Slot(nn.Module):
    """The one child of a host: the site modules of every adapter that sits there, and who is
    active."""

    def __init__(self) -> None:
        super().__init__()
        self.active: tuple[str, ...] = ()
        self.plan: Plan | None = None
        self.sites: dict[str, Site] = {}
        self.handles: list[RemovableHandle | Mark] = []
        self.tap: str | None = None
        self.tapped: Tensor | None = None

    def add(self, key: str, site: Site, module: nn.Module) -> None:
        """Let a module sit here, inactive."""
        self.add_module(key, module)
        self.sites[key] = site

    def remove(self, key: str) -> None:
        """Take a module away."""
        self.switch(key, on=False)
        del self._modules[key], self.sites[key]

    def switch(self, key: str, on: bool) -> None:
        """Make a module active, as the last in line, or inactive."""
        self.active = tuple(k for k in self.active if k != key) + ((key,) if on else ())

    def run(self, step: Step, y: Tensor, *others: Any, dim: int = 0) -> Tensor:
        """y' of y: the active modules in line, or as the plan says. `step(key, y, *others)` applies
        one of them; `others` are tensors of the same rows along `dim`."""
        if self.plan is not None:
            return self.plan.run(step, y, others, dim, self.where())
        return through(self.active, y, lambda key, y: step(key, y, *others))

    def where(self) -> str:
        """The site, for messages."""
        return next(iter(self.sites.values())).id

    def take_tapped(self) -> Tensor | None:
        """What the tap gave in this forward pass, once."""
        tapped, self.tapped = self.tapped, None
        return tapped

    def placed(self, key: str) -> nn.Module:
        """The module that sits here under a key."""
        module = self._modules[key]
        assert module is not None
        return module


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
        sublayer_x = self.take_tapped()
        residual, self.residual = self.residual, None

        def apply(
            key: str, y: Tensor, x: Tensor, sublayer_x: Tensor | None, residual: Tensor | None
        ) -> Tensor:
            site, module = self.sites[key], self.placed(key)
            if _changes_input(module):
                return y
            source = sublayer_x if site.tap else x
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


def fill_tap(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The pre-hook of a sublayer's first projection: keeps the sublayer's x for the slots that read
    it."""
    for slot in getattr(module, _TAP):
        if slot.active:
            slot.tapped = args[0]


def tap_input(model: nn.Module, slot: Slot, path: str | None) -> None:
    """Let a slot have the input of the module at `path`, which runs before it."""
    if path is None or slot.tap is not None:
        return
    slot.tap = path
    module = model.get_submodule(path)
    slot.handles.append(Mark(module, _TAP, slot))
    # First in line: the sublayer's x is what comes in, not what a module there makes of it.
    slot.handles.append(module.register_forward_pre_hook(fill_tap, prepend=True))


def fill_stream(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The pre-hook of the module that the residual stream enters: keeps it for an output slot."""
    for slot in getattr(module, _STREAM):
        if slot.active:
            slot.residual = args[0]


def _join_stream(model: nn.Module, slot: OutputSlot, stream: Stream) -> None:
    """Let a slot have the residual stream, and the norms behind its sublayer."""
    norms = (stream.norm, stream.postnorm)
    slot.around = [None if path is None else model.get_submodule(path) for path in norms]
    if stream.tap is not None:
        module = model.get_submodule(stream.tap)
        slot.handles.append(Mark(module, _STREAM, slot))
        slot.handles.append(module.register_forward_pre_hook(fill_stream, prepend=True))


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
    tap_input(model, slot, site.tap)
    if site.stream and _reads(module) in STREAM and not slot.around:
        _join_stream(model, slot, site.stream)
    return slot


def drop_slot(model: nn.Module, host_path: str) -> None:
    """Remove a slot with its hooks: the host is as it was."""
    host = model.get_submodule(host_path)
    slot = host._modules.pop(CHILD)
    assert isinstance(slot, Slot)
    for handle in slot.handles:
        handle.remove()
