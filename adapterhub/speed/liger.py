"""Liger kernels (`train.liger`), through the integration that transformers has for its Trainer.

The backward passes of some kernels overwrite tensors saved by the forward pass. An adapter that
saved the same tensor would get a wrong gradient, and autograd would not detect it. Like every
speedup, the kernels are therefore tried first. Liger's losses are left out: `head_loss` computes
the loss where the head is frozen.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import Engine
from adapterhub.loop.processes import process_count
from adapterhub.loop.speedups import NotUsed, Speedup, Trial, Undo, first_reason, in_one_line
from adapterhub.recipe.options import RunOptions, TrainOptions

OFF = "train.liger=false"
_WITHOUT_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
_ABSENT = object()


def check_installed(options: TrainOptions) -> None:
    """Check that Liger can be imported, if it is enabled.

    Raises:
        ConfigError: Liger is not installed.
    """
    if options.liger and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "train.liger=true needs liger-kernel, which is not installed",
            hint=f'pip install "adapterhub[liger]", or {OFF}',
        )


def liger_kernels(
    adapter: Adapter,
    options: RunOptions,
    trial: Callable[[], Trial],
    note: Callable[[str], None],
) -> LigerKernels | None:
    """Return the Liger kernels, if they are enabled."""
    if not options.liger:
        return None
    reasons = {
        "several processes train": process_count() > 1,
        "the head changes between steps": bool(adapter.heads),
    }
    if reason := first_reason(reasons):
        note(f"train.liger=true has no effect: {reason}")
        return None
    return LigerKernels(adapter, trial())


class LigerKernels(Speedup):
    """Liger kernels in one model; while active, other models of its class may use them too."""

    refusal = "Liger's kernels are not used"

    def __init__(self, adapter: Adapter, trial: Trial) -> None:
        self.model, self.trial, self.count = adapter.model, trial, 0

    def patch(self, engine: Engine) -> Undo:
        """Let Liger patch the model, its classes and their source modules."""
        from transformers.integrations.liger import apply_liger_kernel

        before = [(owner, dict(vars(owner))) for owner in _owners(self.model)]
        try:
            apply_liger_kernel(self.model, _WITHOUT_LOSS)
        except Exception as error:  # of Liger
            _restore(_changes(before))
            raise NotUsed(in_one_line(error)) from error
        changes = _changes(before)
        self.count = len({id(owner) for owner, _, _ in changes if isinstance(owner, nn.Module)})
        if not self.count:
            _restore(changes)
            raise NotUsed(f"it has none for {self.model.config.model_type}")
        return partial(_restore, changes)

    def said(self) -> str:
        """Report the number of modules with kernels."""
        return f"{self.count} modules compute by Liger's kernels; {OFF} for their own"


def _owners(model: nn.Module) -> list[Any]:
    """Return the objects that Liger may change: modules, their classes and source modules."""
    modules = list(model.modules())
    bases = {base for module in modules for base in type(module).__mro__}
    classes = [base for base in bases if base.__module__.startswith("transformers.models.")]
    return [*modules, *classes, *(sys.modules[name] for name in {c.__module__ for c in classes})]


def _changes(before: list[tuple[Any, dict[str, Any]]]) -> list[tuple[Any, str, Any]]:
    """Return the changed attributes: owner, name and previous value."""
    return [
        (owner, name, old.get(name, _ABSENT))
        for owner, old in before
        for name in {*old, *vars(owner)}
        if old.get(name, _ABSENT) is not vars(owner).get(name, _ABSENT)
    ]


def _restore(changes: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in changes:
        if isinstance(owner, type):
            delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)
        elif value is _ABSENT:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = value
