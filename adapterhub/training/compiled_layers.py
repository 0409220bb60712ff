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

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from adapterhub.adapters.adapter import Adapter
from adapterhub.status import doing
from adapterhub.training.both_ways import BothWays, TriedBatch, in_one_line
from adapterhub.training.options import RunOptions
from adapterhub.training.processes import process_count

BACKEND = "inductor"
OFF = "train.compile=false"
_VARIANTS = 64  # of one layer: with and without gradients or mask, one row, one token, ...
_COMPILED = "_compiled_call_impl"  # what torch.nn.Module calls in place of forward and hooks


@contextmanager
def compiled_layers(
    adapter: Adapter,
    options: RunOptions,
    batches: Callable[[], TriedBatch],
    note: Callable[[str], None],
    entered: Callable[[], None],
) -> Iterator[Callable[[], None]]:
    """Yield a function to call whenever other tensors train; inside, layers may be compiled.

    Args:
        adapter: the adapter that trains.
        options: the training options.
        batches: returns the batches that are computed both ways.
        note: gets a line for the user.
        entered: called by that function first, while nothing is compiled.
    """
    reason = _reason_against(adapter, options)
    if reason is not None:
        if options.compile:
            note(f"train.compile=true has no effect: {reason}")
        yield entered
        return
    tried = batches()
    with _settings(tried.sizes()):
        layers = CompiledLayers(adapter, tried, note)
        try:
            yield partial(layers.enter, entered)
        finally:
            layers.undo()


def _reason_against(adapter: Adapter, options: RunOptions) -> str | None:
    """Return why nothing is compiled; None if layers may be."""
    reasons = {
        "it is off": not options.compile,
        "train.gradient_checkpointing=true computes layers again": options.gradient_checkpointing,
        "several processes train": process_count() > 1,
        "the head changes between steps": bool(adapter.heads),
        "the backbone has no layers": not any(adapter.anatomy.layers.values()),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@contextmanager
def _settings(sizes: str) -> Iterator[None]:
    """Set inside what the compiler may assume, for batches of these sizes."""
    import torch._inductor.config
    import torch.compiler.config
    import torch.fx.experimental._config

    dynamo: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    with ExitStack() as stack:
        # A float that is no symbol, such as LoRA's scale, is compiled in one pass instead of two.
        stack.enter_context(dynamo.patch({limit: _VARIANTS, "specialize_float": True}))
        # As many rows as tokens in the first batch do not mean that all batches are square.
        fx: Any = torch.fx.experimental._config
        stack.enter_context(fx.patch(use_duck_shape=False))
        # Dropout draws the numbers that it draws where it is not compiled.
        inductor: Any = torch._inductor.config
        stack.enter_context(inductor.patch(fallback_random=True))
        if hasattr(torch.compiler.config, "cache_key_tag"):
            # Its cache would return code that was generated for other sizes.
            cache: Any = torch.compiler.config
            stack.enter_context(cache.patch(cache_key_tag=sizes))
        yield


class CompiledLayers:
    """The layers of one model, compiled from `enter` until `undo`."""

    def __init__(self, adapter: Adapter, tried: TriedBatch, note: Callable[[str], None]) -> None:
        self.both_ways, self.note = BothWays(adapter, tried), note
        model: nn.Module = adapter.model
        paths = [path for stack in adapter.anatomy.layers.values() for path in stack]
        self.layers = list({id(m): m for m in map(model.get_submodule, paths)}.values())
        self.refused = self.used = False

    def enter(self, entered: Callable[[], None]) -> None:
        """Compile the layers that are computed now, if that changes nothing.

        Args:
            entered: decides which these are; called while nothing is compiled.
        """
        self.undo()
        entered()
        # A layer whose own forward was replaced does not compute what its class does.
        layers = [layer for layer in self.layers if "forward" not in vars(layer)]
        if self.refused or not layers:
            return
        start = time.perf_counter()
        count = f"{len(layers)} layer{'s' * (len(layers) > 1)}"
        with doing(f"compiling {count}"):
            reason = self._try_out(layers)
        if reason is not None:
            self._refuse(reason)
        if self.refused:
            return
        seconds = time.perf_counter() - start
        self.note(f"{count} compiled in {seconds:.0f} s; {OFF} computes them as they are")

    def undo(self) -> None:
        """Let the layers compute as ever."""
        for layer in self.layers:
            layer.__dict__.pop(_COMPILED, None)

    def _refuse(self, reason: str) -> None:
        self.undo()
        if not self.refused:
            self.note(f"layers are not compiled: {reason}")
        self.refused = True

    def _try_out(self, layers: Sequence[nn.Module]) -> str | None:
        """Compile, and compute each batch both ways; return why it stays as it is, if they differ.

        The layers are compiled at the end, unless there is a reason not to.
        """
        calls = [(layer, self._compiled(layer)) for layer in layers]

        def compiled() -> None:
            for layer, call in () if self.refused else calls:
                layer.__dict__[_COMPILED] = call

        different = self.both_ways.difference(self.undo, compiled)
        unused = None if self.used else "they are called with a cache, or with one row"
        return different or unused

    def _compiled(self, layer: nn.Module) -> Callable[..., Any]:
        """Return what is called in place of a layer with its hooks."""
        call_impl: Any = layer._call_impl
        compiled: Any = torch.compile(call_impl, backend=BACKEND, dynamic=True, fullgraph=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.refused and _is_usual(*args, *kwargs.values()):
                self.used = True
                try:
                    return compiled(*args, **kwargs)
                except torch._dynamo.exc.TorchDynamoException as error:  # nothing is computed yet
                    self._refuse(in_one_line(error))
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
