"""How a site module gets into the forward pass: one child module and one hook on its host.

The host may be `Linear`, `Conv1D`, a quantized layer or anything else: it is called, never
replaced. Hooks are plain functions that find their slot through the host, so that a model with
adapters on it can be copied, pickled, moved and compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapterhub.backbones.anatomy import CHILD, Site

_TAP = "_adapterhub_tap"


class Mark:
    """An attribute on a module, by which a hook there finds its slot; `remove` takes it off."""

    def __init__(self, module: nn.Module, name: str, value: list[Any]) -> None:
        # In a list, the slot does not become a second child, under a second state-dict key.
        self.module, self.name = module, name
        setattr(module, name, value)

    def remove(self) -> None:
        """The module is as it was."""
        delattr(self.module, self.name)


class Slot(nn.Module):
    """The one child of a host: the site modules of every adapter that sits there, and who is
    active."""

    def __init__(self) -> None:
        super().__init__()
        self.active: tuple[str, ...] = ()
        self.sites: dict[str, Site] = {}
        self.handles: list[RemovableHandle | Mark] = []

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

    def placed(self, key: str) -> nn.Module:
        """The module that sits here under a key."""
        module = self._modules[key]
        assert module is not None
        return module


class OutputSlot(Slot):
    """Sits at a projection: each active module maps the host's input x and output y to a new y."""

    def __init__(self) -> None:
        super().__init__()
        self.tap: str | None = None
        self.tapped: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, tokens, d_in), y: (batch, tokens, d_out) of the host -> y' like y."""
        sublayer_x, self.tapped = self.tapped, None
        for key in self.active:
            site, module = self.sites[key], self.placed(key)
            source = sublayer_x if site.tap else x
            y = module(source, y) if site.part is None else _on_part(module, source, y, site.part)
        return y


def _on_part(module: Any, x: Tensor | None, y: Tensor, part: tuple[int, int]) -> Tensor:
    start, stop = part
    pieces = (y[..., :start], module(x, y[..., start:stop]), y[..., stop:])
    return torch.cat([piece for piece in pieces if piece.shape[-1]], dim=-1)


def call_slot(host: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
    """The forward hook of a projection."""
    slot = host._modules[CHILD]
    return slot(args[0], y) if slot is not None and slot.active else y


def fill_tap(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The pre-hook of a sublayer's first projection: keeps the sublayer's x for its output slot."""
    (slot,) = getattr(module, _TAP)
    if slot.active:
        slot.tapped = args[0]


def output_slot(model: nn.Module, site: Site) -> OutputSlot:
    """The slot at a site's host, made if this is its first module, with the tap that the site
    needs."""
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, OutputSlot):
        slot = OutputSlot()
        host.add_module(CHILD, slot)
        slot.handles.append(host.register_forward_hook(call_slot))
    if site.tap and slot.tap is None:
        slot.tap = site.tap
        tap = model.get_submodule(site.tap)
        slot.handles.append(Mark(tap, _TAP, [slot]))
        slot.handles.append(tap.register_forward_pre_hook(fill_tap))
    return slot


def drop_slot(model: nn.Module, host_path: str) -> None:
    """Remove a slot with its hooks: the host is as it was."""
    host = model.get_submodule(host_path)
    slot = host._modules.pop(CHILD)
    assert isinstance(slot, Slot)
    for handle in slot.handles:
        handle.remove()
