"""What the backward pass keeps of a batch: counted in forward passes over small ones.

Each tensor that autograd saves counts once, and those of the model not at all. Of B rows of T
tokens they take

    p(T) + B q(T)      bytes

p and q are polynomials of degree 2: p has the trained parameters in the dtype of the computation
and relative positions, q what attention keeps without a fused kernel. All is counted as this model,
this method and this attention compute it, and it is exact for any B and T as far as sizes follow
the polynomials. With gradient checkpointing the inputs of the layers are kept, and all of one layer
at a time.

Logits of a language model with their loss in fp32 add LOGIT_BYTES each. What single operations need
for their own time is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.probe import probe_batch
from adapterhub.backbones.weights import device_of
from adapterhub.training.gradient_checkpointing import recompute

LOGIT_BYTES = 12.5  # measured: transformers keeps them in fp32, twice, and their gradient
LONGEST = 24  # tokens of a row of the small batches


def activation_bytes(adapter: Adapter, rows: int, tokens: int, recomputed: bool = False) -> int:
    """What the backward pass will keep of a batch. The model is left as it was."""
    model = adapter.model
    modes = {module: module.training for module in model.modules()}
    adapter.train_mode()
    try:
        kept = _extrapolated(adapter, rows, tokens, False)
        if recomputed:
            with recompute(model, True) as layers:
                count = len(layers.layers) if layers else 1
            inputs = _extrapolated(adapter, rows, tokens, True)
            kept = inputs + (kept - inputs) / count
    finally:
        for module, mode in modes.items():
            module.training = mode
    scores = model.get_output_embeddings() is not None
    vocabulary = model.config.get_text_config().vocab_size if scores else 0
    return round(kept + LOGIT_BYTES * rows * tokens * vocabulary)


def _extrapolated(adapter: Adapter, rows: int, tokens: int, recomputed: bool) -> float:
    last = min(tokens, LONGEST)
    sizes = sorted({max(1, last // 3), max(1, 2 * last // 3), last})
    one, two = (
        {size: saved_bytes(adapter, batch, size, recomputed) for size in sizes} for batch in (1, 2)
    )
    each = {size: two[size] - one[size] for size in sizes}
    return _through(one, tokens) + (rows - 1) * _through(each, tokens)


def _through(points: dict[int, int], at: int) -> float:
    """The polynomial of the least degree through these points (Lagrange)."""
    return sum(
        value * math.prod((at - other) / (x - other) for other in points if other != x)
        for x, value in points.items()
    )


def saved_bytes(adapter: Adapter, rows: int, tokens: int, recomputed: bool = False) -> int:
    """What autograd saves of a batch of random tokens, in bytes."""
    model, kept = adapter.model, {}
    own = (*model.parameters(), *model.buffers())
    known = {storage.data_ptr() for tensor in own for storage in _storages(tensor)}

    def keep(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage  # alive, so that no other takes its place
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
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
            outputs = model(**probe_batch(model, rows=rows, tokens=tokens))
    del outputs
    return sum(storage.nbytes() for storage in kept.values())


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Where the numbers of a tensor lie: of torchao's, those of the tensors that it wraps."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()
