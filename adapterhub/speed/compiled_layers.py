"""Compiled layers: torch.compile translates the layers of a backbone (`train.compile`).

Each layer is compiled by itself, with the hooks and modules of adapters in it: equal layers share
one compilation, where a whole model would be translated layer by layer. Rows and tokens are
symbols, so that batches of all lengths share it too. The rest of the model computes as ever.

Before the first step, and when a stage begins, loss, gradients and outputs of one batch are
computed both ways. Where they are not equal, or a layer cannot be compiled, nothing is compiled
and one line says why. The generated code depends on the sizes of the batch that a layer is compiled
for: that is always the first of the run, with and without padding, so that a resumed run computes
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from adapterhub.adapters.adapter import Adapter
from adapterhub.loop.engine import Engine
from adapterhub.loop.processes import process_count
from adapterhub.loop.speedups import NotUsed, Speedup, Trial, Undo, first_reason, in_one_line
from adapterhub.recipe.options import RunOptions

BACKEND = "inductor"
OFF = "train.compile=false"
_VARIANTS = 64  # of one layer: with and without gradients or mask, one row, one token, ...
_COMPILED = "_compiled_call_impl"  # what torch.nn.Module calls in place of forward and hooks


def compiled_layers(
    adapter: Adapter,
    options: RunOptions,
    trial: Callable[[], Trial],
    note: Callable[[str], None],
) -> CompiledLayers | None:
    """Return the layers of a model to compile, if they are to be."""
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
    """Set inside what the compiler may assume, for batches of these sizes."""
    import torch._inductor.config
    import torch.compiler.config
    import torch.fx.experimental._config

    dynamo: Any = torch._dynamo.config
    with ExitStack() as stack:
        # A float that is no symbol, such as LoRA's scale, is compiled in one pass instead of two.
        stack.enter_context(dynamo.patch(recompile_limit=_VARIANTS, specialize_float=True))
        # As many rows as tokens in the first batch do not mean that all batches are square.
        fx: Any = torch.fx.experimental._config
        stack.enter_context(fx.patch(use_duck_shape=False))
        # Dropout draws the numbers that it draws where it is not compiled.
        inductor: Any = torch._inductor.config
        stack.enter_context(inductor.patch(fallback_random=True))
        # Its cache would return code that was generated for other sizes.
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
        """Compile the layers that are computed now."""
        # A layer whose own forward was replaced does not compute what its class does.
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
        """Return how long compiling took."""
        if self.failed or not self.used:
            raise NotUsed(self.failed or "they are called with a cache, or with one row")
        self.tried, seconds = True, perf_counter() - self.start
        count = self.action.removeprefix("compiling ")
        return f"{count} compiled in {seconds:.0f} s; {OFF} computes them as they are"

    def _fail(self, reason: str) -> None:
        """Compile nothing from now on; in a trial, `said` tells why."""
        self._restore()
        if self.tried and not self.failed:
            self.note(f"{self.refusal}: {reason}")
        self.failed = reason

    def _restore(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop(_COMPILED, None)

    def _compiled(self, layer: nn.Module) -> Callable[..., Any]:
        """Return what is called in place of a layer with its hooks."""
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

    A cache grows with each token that is generated. One row, or one token, would be compiled apart,
    at some time in the run.
    """
    if any(isinstance(value, Cache) for value in arguments):
        return False
    states = next((value for value in arguments if isinstance(value, Tensor)), None)
    return states is not None and 1 not in states.shape[:2]
