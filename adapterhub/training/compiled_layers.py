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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from adapterhub.adapters.adapter import Adapter
from adapterhub.status import doing
from adapterhub.tasks._losses import model_inputs
from adapterhub.training.batching import Batch
from adapterhub.training.engine import LossOfBatch
from adapterhub.training.options import RunOptions
from adapterhub.training.processes import process_count
from adapterhub.training.replay_check import evaluating

BACKEND = "inductor"
OFF = "train.compile=false"
_VARIANTS = 64  # of one layer: with and without gradients or mask, one row, one token, ...
_COMPILED = "_compiled_call_impl"  # what torch.nn.Module calls in place of forward and hooks
_SEED = 0
Results: TypeAlias = Mapping[str, Tensor | None]


class TriedBatch(NamedTuple):
    """What is compared: a batch of training, one of evaluation if there is one, and the loss."""

    train: Batch
    evaluation: Batch | None
    loss: LossOfBatch

    def sizes(self) -> str:
        """Return the sizes of the batches."""
        batches = [batch for batch in (self.train, self.evaluation) if batch is not None]
        return str([{n: tuple(t.shape) for n, t in batch.items()} for batch in batches])


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
        self.adapter, self.tried, self.note = adapter, tried, note
        self.model: nn.Module = adapter.model
        paths = [path for stack in adapter.anatomy.layers.values() for path in stack]
        self.layers = list({id(m): m for m in map(self.model.get_submodule, paths)}.values())
        self.device = adapter.model.device
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
        half = self.adapter.model.dtype != torch.float32
        exact = not half and not torch.is_autocast_enabled(self.device.type)
        calls = [(layer, self._compiled(layer)) for layer in layers]
        for compute in self._computations():
            self.undo()
            expected = self._seeded(compute)
            for layer, call in calls:
                layer.__dict__[_COMPILED] = call
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the compiler reads what is deprecated
                    found = self._seeded(compute)
            except RuntimeError as error:
                return _reason_of(error)
            difference = _difference(expected, found, 1e-3 if exact else 0.05)
            if self.refused or difference:
                return difference
        return None if self.used else "they are called with a cache, or with one row"

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
                    self._refuse(_reason_of(error))
            return call_impl(*args, **kwargs)

        return call

    def _computations(self) -> Iterator[Callable[[], Results]]:
        """Yield what is computed both ways."""
        for batch in with_and_without_padding(self.tried.train):
            yield partial(self._trained, batch)
        for batch in with_and_without_padding(self.tried.evaluation or {}):
            yield partial(self._evaluated, batch)

    def _seeded(self, compute: Callable[[], Results]) -> Results:
        """Compute with random numbers that are always the same."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(_SEED)
            return compute()

    def _trained(self, batch: Batch) -> Results:
        """Return the loss of a batch, and the gradients."""
        trained = {n: t for n, t in self.adapter.tensors().items() if t.requires_grad}
        with torch.enable_grad():
            loss = self.tried.loss(self._run(batch), self._moved(batch))
            if loss is None:
                return {}
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {"the loss": loss.detach(), **dict(zip(trained, gradients, strict=True))}

    def _evaluated(self, batch: Batch) -> Results:
        """Return the outputs of a batch, as an evaluation computes them."""
        if not batch:
            return {}
        with evaluating(self.model), torch.inference_mode():
            output = self._run(batch)
        return {
            f"the {name} of evaluations": value
            for name, value in output.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _run(self, batch: Batch) -> Any:
        return self.model(**model_inputs(self._moved(batch)))

    def _moved(self, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


def with_and_without_padding(batch: Batch) -> list[Batch]:
    """Return a batch as if no row, and as if the first row were padded, if it has a mask.

    A mask that hides nothing is left out by transformers, and layers are compiled without it.
    """
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim > 3 or mask.shape[-1] < 2:  # 3: the choices of multiple choice
        return [batch]
    full = torch.ones_like(mask)
    padded = full.clone()
    padded[0, ..., -1] = 0
    return [{**batch, "attention_mask": each} for each in (full, padded)]


def _is_usual(*arguments: Any) -> bool:
    """Return whether a call of a layer is compiled.

    A cache grows with each token that is generated. One row, or one token, would be compiled apart,
    at some time in the run.
    """
    if any(isinstance(value, Cache) for value in arguments):
        return False
    states = next((value for value in arguments if isinstance(value, Tensor)), None)
    return states is not None and 1 not in states.shape[:2]


def _difference(expected: Results, found: Results, tolerance: float) -> str | None:
    """Return what differs between two results; None if nothing does."""
    sizes = [float(t.float().norm()) for t in expected.values() if t is not None]
    for name, tensor in expected.items():
        other = found.get(name)
        if (tensor is None) != (other is None):
            return f"{name} would have no gradient"
        if tensor is None or other is None:
            continue
        # A tensor whose gradient is nearly zero has rounding errors as large as itself.
        most = tolerance * max(float(tensor.float().norm()), 1e-3 * max(sizes))
        if not float((tensor.float() - other.float()).norm()) <= most:
            return f"{name} would be different"
    return None


def _reason_of(error: BaseException) -> str:
    """Return the beginning of an error of torch, which has many lines, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])
