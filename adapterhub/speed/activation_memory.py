"""Activation memory: the tensors saved for the backward pass, extrapolated from small batches.

Every tensor that autograd saves is counted once; tensors of the model are not counted. A batch of B
rows of T tokens takes

    p(T) + B q(T)      bytes

with polynomials p and q of degree 2. p covers the trained parameters in the compute dtype and
relative positions; the quadratic term of q is attention without a fused kernel. Both are measured
on this model, method and attention implementation. They are exact for any B and T if sizes follow
the polynomials. With gradient checkpointing, the inputs of all layers are kept, and all saved
tensors of one layer at a time.

The logits of a language model, with their fp32 loss, take another LOGIT_BYTES each. Temporary
buffers within single operations are not counted. On a CPU, freed buffers leave gaps between the
saved tensors, so that the process grows by up to HEAP times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adapterhub.adapters.adapter import Adapter
from adapterhub.anatomy.backbone import device_of
from adapterhub.backbones.probe import probe_batch
from adapterhub.loop.engine import recompute
from adapterhub.tasks.common.batches import model_inputs

LOGIT_BYTES = 12.5  # measured: transformers keeps two fp32 copies, and their gradient
HEAP = 1.5  # measured with glibc: 1.5 with lora, 1.2 with full, for 16 and 64 rows of 64 tokens
LONGEST = 24  # tokens per row of the small batches


def activation_bytes(
    adapter: Adapter, rows: int, tokens: int, recomputed: bool = False, offloaded: bool = False
) -> int:
    """Predict the bytes saved for the backward pass of a batch, without its logits.

    The model is not changed. `recomputed`: with gradient checkpointing; `offloaded`: also with the
    inputs of all layers but one in host memory.
    """
    with _train_mode(adapter):
        total = _extrapolated(adapter, rows, tokens, recomputed=False)
        if recomputed:
            inputs, layers = _extrapolated(adapter, rows, tokens, recomputed=True), _layers(adapter)
            total = (inputs / layers if offloaded else inputs) + (total - inputs) / layers
    return round(total)


def evaluation_bytes(adapter: Adapter, rows: int, tokens: int) -> int:
    """Estimate the peak bytes of evaluating a batch, without its logits: the bytes of one layer."""
    with _train_mode(adapter):
        total = _extrapolated(adapter, rows, tokens, recomputed=False)
    return round(total / _layers(adapter))


def logit_bytes(adapter: Adapter, tokens: int) -> int:
    """Count the bytes of a language model's logits and their loss; 0 for other models."""
    has_logits = adapter.backbone.output_embedding is not None
    vocabulary = adapter.backbone.text_config.vocab_size if has_logits else 0
    return round(LOGIT_BYTES * tokens * vocabulary)


def _layers(adapter: Adapter) -> int:
    with recompute(adapter.model, True) as layers:
        return len(layers.layers) if layers else 1


@contextmanager
def _train_mode(adapter: Adapter) -> Iterator[None]:
    modes = {module: module.training for module in adapter.model.modules()}
    adapter.train_mode()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _extrapolated(adapter: Adapter, rows: int, tokens: int, recomputed: bool) -> float:
    longest = min(tokens, LONGEST)
    lengths = sorted({max(1, longest // 3), max(1, 2 * longest // 3), longest})
    one_row = {length: saved_bytes(adapter, 1, length, recomputed) for length in lengths}
    two_rows = {length: saved_bytes(adapter, 2, length, recomputed) for length in lengths}
    per_row = {length: two_rows[length] - one_row[length] for length in lengths}
    return _polynomial(one_row, tokens) + (rows - 1) * _polynomial(per_row, tokens)


def _polynomial(points: dict[int, int], at: int) -> float:
    """Evaluate the polynomial of lowest degree through `points` (Lagrange)."""
    return sum(
        value * math.prod((at - other) / (x - other) for other in points if other != x)
        for x, value in points.items()
    )


def saved_bytes(adapter: Adapter, rows: int, tokens: int, recomputed: bool = False) -> int:
    """Measure the bytes that autograd saves for a batch of random tokens."""
    batch = probe_batch(adapter.backbone.pretrained, rows=rows, tokens=tokens)
    return _saved(adapter, batch, recomputed)


def batch_bytes(
    adapter: Adapter,
    batch: Callable[[Sequence[int]], Mapping[str, Tensor]],
    recomputed: bool,
    rows: int,
) -> int:
    """Measure the bytes that autograd saves for a batch of copies of the first row."""
    device = device_of(adapter.model)
    inputs = {name: t.to(device) for name, t in model_inputs(batch([0] * rows)).items()}
    with _train_mode(adapter):
        return _saved(adapter, inputs, recomputed)


def _saved(adapter: Adapter, inputs: Mapping[str, Any], recomputed: bool) -> int:
    model = adapter.model
    model_tensors = (*model.parameters(), *model.buffers())
    model_storages = {s.data_ptr() for tensor in model_tensors for s in _storages(tensor)}
    saved: dict[int, torch.UntypedStorage] = {}

    def record(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            if storage.data_ptr() not in model_storages:
                saved[storage.data_ptr()] = storage  # kept alive, so that addresses are not reused
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    device = device_of(model)
    gpus = [device] if device is not None and device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=gpus),
        torch.enable_grad(),
        recompute(model, recomputed) as layers,
    ):
        if layers:
            layers.apply()
        with hooks:
            outputs = model(**inputs)
    del outputs
    return sum(storage.nbytes() for storage in saved.values())


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor; for a torchao tensor, the storages of its inner tensors."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()
