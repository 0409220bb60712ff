"""How a site module gets into the forward pass: one child module and one hook on its host.

The host may be `Linear`, `Conv1D`, a quantized layer or anything else: it is called, never
replaced. Hooks are plain functions that find their slot through the host, so that a model with
adapters on it can be copied, pickled, moved and compiled.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.hooks.composition import BatchPlan, Step, through

_TAP = "_adapterhub_tap"


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
        self.plan: BatchPlan | None = None
        self.sites: dict[str, Site] = {}
        self.handles: list[RemovableHandle | Mark] = []
        self.tap: str | None = None
        self.sublayer_input: Tensor | None = None

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

    def take_sublayer_input(self) -> Tensor | None:
        """What the tap gave in this forward pass, once."""
        sublayer_input, self.sublayer_input = self.sublayer_input, None
        return sublayer_input

    def placed(self, key: str) -> nn.Module:
        """The module that sits here under a key."""
        module = self._modules[key]
        assert module is not None
        return module


def capture_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The pre-hook of a sublayer's first projection: keeps the sublayer's x for the slots that read
    it."""
    for slot in getattr(module, _TAP):
        if slot.active:
            slot.sublayer_input = args[0]


def tap_sublayer_input(model: nn.Module, slot: Slot, path: str | None) -> None:
    """Let a slot have the input of the module at `path`, which runs before it."""
    if path is None or slot.tap is not None:
        return
    slot.tap = path
    module = model.get_submodule(path)
    slot.handles.append(Mark(module, _TAP, slot))
    # First in line: the sublayer's x is what comes in, not what a module there makes of it.
    slot.handles.append(module.register_forward_pre_hook(capture_input, prepend=True))


def drop_slot(model: nn.Module, host_path: str) -> None:
    """Remove a slot with its hooks: the host is as it was."""
    host = model.get_submodule(host_path)
    slot = host._modules.pop(CHILD)
    assert isinstance(slot, Slot)
    for handle in slot.handles:
        handle.remove()
