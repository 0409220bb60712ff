"""Compiled layers: compile the layers of a backbone with torch.compile (`train.compile`).

Each layer is compiled separately, with the hooks and modules of its adapters. Equal layers share
one compilation; a whole model would be compiled layer by layer. The numbers of rows and tokens are
symbolic, so that batches of all lengths share the compilation too. The rest of the model is not
compiled.

Before the first step, and when a stage begins, the loss, gradients and outputs of one batch are
computed with and without compilation. If they differ, or a layer cannot be compiled, nothing is
compiled and one line reports the reason. The generated code depends on the sizes of the batch that
a layer is compiled for. That batch is always the first of the run, with and without padding, so
that a resumed run computes the same bytes.

Liger kernels (`train.liger`), through the integration that transformers has for its Trainer.

The backward passes of some kernels overwrite tensors saved by the forward pass. An adapter that
saved the same tensor would get a wrong gradient, and autograd would not detect it. Like every
speedup, the kernels are therefore tried first. Liger's losses are left out: `head_loss` computes
the loss where the head is frozen.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import Engine
from adapterhub.loop.processes import process_count
from adapterhub.loop.speedups import NotUsed, Speedup, Trial, Undo, first_reason, in_one_line
from adapterhub.recipe.recipe import RunOptions, TrainOptions

LIGER_OFF = "train.liger=false"
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
            hint=f'pip install "adapterhub[liger]", or {LIGER_OFF}',
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
        self.model, self.model_type = adapter.model, adapter.backbone.model_type
        self.trial, self.count = trial, 0

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
            raise NotUsed(f"it has none for {self.model_type}")
        return partial(_restore, changes)

    def said(self) -> str:
        """Report the number of modules with kernels."""
        return f"{self.count} modules compute by Liger's kernels; {LIGER_OFF} for their own"


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


BACKEND = "inductor"
OFF = "train.compile=false"
_VARIANTS = 64  # per layer: with and without gradients or mask, one row, one token, ...
_COMPILED = "_compiled_call_impl"  # called by torch.nn.Module instead of forward and hooks


def compiled_layers(
    adapter: Adapter,
    options: RunOptions,
    trial: Callable[[], Trial],
    note: Callable[[str], None],
) -> CompiledLayers | None:
    """Return the layers of a model to compile, or None if compilation is off."""
    if not options.compile:
        return None
    reasons = {
        "train.gradient_checkpointing=true computes layers again": options.gradient_checkpointing,
        "several processes train": process_count() > 1,
        "the head changes between steps": bool(adapter.heads),
        "the backbone has no layers": not any(adapter.anatomy.layers.values()),
    }
    if reason := first_reason(reasons):
        note(f"train.compile=true has no effect: {reason}")
        return None
    return CompiledLayers(adapter, trial(), note)


@contextmanager
def _settings(sizes: str) -> Iterator[None]:
    """Apply the compiler settings for batches of these sizes inside the context."""
    import torch._inductor.config
    import torch.compiler.config
    import torch.fx.experimental._config

    dynamo: Any = torch._dynamo.config
    with ExitStack() as stack:
        # Floats that are not symbolic, such as LoRA's scale, need one compilation instead of two.
        stack.enter_context(dynamo.patch(recompile_limit=_VARIANTS, specialize_float=True))
        # Equal numbers of rows and tokens in the first batch do not imply square batches.
        fx: Any = torch.fx.experimental._config
        stack.enter_context(fx.patch(use_duck_shape=False))
        # Dropout draws the same numbers as without compilation.
        inductor: Any = torch._inductor.config
        stack.enter_context(inductor.patch(fallback_random=True))
        # The cache would return code generated for other sizes.
        cache: Any = torch.compiler.config
        stack.enter_context(cache.patch(cache_key_tag=sizes))
        yield


class CompiledLayers(Speedup):
    """The layers of one model."""

    refusal = "layers are not compiled"

    def __init__(self, adapter: Adapter, trial: Trial, note: Callable[[str], None]) -> None:
        self.trial, self.sizes, self.note = trial, trial.sizes(), note
        model: nn.Module = adapter.model
        paths = [path for stack in adapter.anatomy.layers.values() for path in stack]
        self.layers = list({id(m): m for m in map(model.get_submodule, paths)}.values())
        self.used, self.failed, self.tried = False, "", False
        self.action, self.start = "", 0.0

    def patch(self, engine: Engine) -> Undo | None:
        """Compile the layers that are active now."""
        # A layer with a replaced forward does not compute what its class does.
        layers = [layer for layer in self.layers if "forward" not in vars(layer)]
        if self.failed or not layers:
            return None
        self.action = f"compiling {len(layers)} layer{'s' * (len(layers) > 1)}"
        self.start, self.tried = perf_counter(), False
        with ExitStack() as stack:
            stack.enter_context(_settings(self.sizes))
            stack.callback(self._restore)
            for layer in layers:
                layer.__dict__[_COMPILED] = self._compiled(layer)
            return stack.pop_all().close

    def said(self) -> str:
        """Report the compilation time."""
        if self.failed or not self.used:
            raise NotUsed(self.failed or "they are called with a cache, or with one row")
        self.tried, seconds = True, perf_counter() - self.start
        count = self.action.removeprefix("compiling ")
        return f"{count} compiled in {seconds:.0f} s; {OFF} computes them as they are"

    def _fail(self, reason: str) -> None:
        """Turn compilation off from now on; the trial reports the reason itself."""
        self._restore()
        if self.tried and not self.failed:
            self.note(f"{self.refusal}: {reason}")
        self.failed = reason

    def _restore(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop(_COMPILED, None)

    def _compiled(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the function to call instead of a layer with its hooks."""
        call_impl: Any = layer._call_impl
        compiled: Any = torch.compile(call_impl, backend=BACKEND, dynamic=True, fullgraph=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.failed and _is_usual(*args, *kwargs.values()):
                self.used = True
                try:
                    return compiled(*args, **kwargs)
                except torch._dynamo.exc.TorchDynamoException as error:  # nothing is computed yet
                    self._fail(in_one_line(error))
            return call_impl(*args, **kwargs)

        return call


def _is_usual(*arguments: Any) -> bool:
    """Return whether a call of a layer is compiled.

    A cache grows with each generated token. Calls with one row or one token would need a separate
    compilation at some point in the run.
    """
    if any(isinstance(value, Cache) for value in arguments):
        return False
    states = next((value for value in arguments if isinstance(value, Tensor)), None)
    return states is not None and 1 not in states.shape[:2]
