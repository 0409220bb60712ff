"""The fingerprint: the identity of a backbone by its weights, from a model or from its files.

    fingerprint = sha256(sorted set of "layer shape digest" of the tensors that count)
    digest = sha256(16 runs of 256 values, evenly spaced, rounded to bfloat16, little-endian)

What counts is what every model class of a checkpoint holds: vectors and matrices inside the layers,
and token embeddings. Poolers, final norms, position tables and heads do not: `AutoModel` and
`AutoModelForCausalLM` differ in them. Nor do experts, which transformers fuses when it loads, and
buffers. Of a name only the first number counts, the layer: a renamed module changes nothing, two
layers that changed places do. Tied copies are one line.

Rounded, fp32 and bf16 loads of one checkpoint agree with it, whatever it is stored in. A load in
fp16, or a quantized one, has lost what it takes: its identity is read from the files that it came
from, if what is left of it is what these files give.

A tensor of up to 4,096 values is read whole. Runs rather than single values, so that a file needs
16 reads a tensor: 8 billion parameters take less than 2 s.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from adapterhub.backbones.checkpoint import pick, stored_tensors
from adapterhub.backbones.weights import is_sharded, whole
from adapterhub.errors import BackboneError

RUNS, RUN = 16, 256
EXACT = (torch.float32, torch.bfloat16, torch.float64)
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:word_embeddings?|embed_tokens|wte|shared|tokens_embed|embed_in|tok_embeddings)\.weight$"
)
# The first are fused or renamed on loading, the rest are heads and buffers.
_NOT_COUNTED = re.compile(
    r"(?:^|\.)(?:experts?|rotary_emb|masked_bias)\.|\.(?:inv_freq|masked_bias|position_ids)$"
    r"|^(?:classifier|score|cls|lm_head|qa_outputs)\."
)


def fingerprint_of(named: Iterable[tuple[str, Tensor]], origin: Path | None = None) -> str:
    """The identity of a model by its parameters' names and values, in any order.

    `origin` is the folder that they were loaded from, if that is known.

    Raises:
        BackboneError: the weights are quantized and have no origin, or nothing counts.
    """
    counted = [(w, t) for name, t in named if (w := _place(name, t.shape)) is not None]
    # Quantized values have other shapes and codes; what is left of them has to do.
    held = [(place, t) for place, t in counted if _has_values(t)]
    lines = {f"{place} {tensor_digest(pick(whole(t), runs(t.numel())))}" for place, t in held}
    exact = len(held) == len(counted) and all(t.dtype in EXACT for _, t in held)
    if not exact and origin is not None:
        stored = _stored_lines(origin)
        if lines <= {line for pair in stored for line in pair}:
            return _identity({line for line, _ in stored})
    if len(held) < len(counted):
        raise BackboneError(
            "the weights are quantized, and not those of a checkpoint that is known",
            expected="a model as load_backbone or from_pretrained gave it",
            hint="load_backbone(FOLDER or HUB ID), and change its weights before quantizing them",
        )
    return _identity(lines)


def fingerprint_of_files(folder: Path) -> str:
    """The identity of the checkpoint in a folder; only the values that are sampled are read.

    Raises:
        BackboneError: there is no checkpoint, or it is broken.
    """
    return _identity({line for line, _ in _stored_lines(folder)})


def _has_values(tensor: Tensor) -> bool:
    codes = hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor)
    return tensor.is_floating_point() and not tensor.is_meta and not codes


def _identity(lines: set[str]) -> str:
    if not lines:
        raise BackboneError("a backbone without layers or token embeddings has no identity")
    return f"bf16-{hashlib.sha256(chr(10).join(sorted(lines)).encode()).hexdigest()}"


def _stored_lines(folder: Path) -> list[tuple[str, str]]:
    """For each tensor its line, and the line that it gives after a load in fp16."""
    pairs = []
    for name, shape, read in stored_tensors(folder):
        if (place := _place(name, shape)) is not None:
            values = read(runs(math.prod(shape)))
            half = values.half() if values.is_floating_point() else values
            pairs.append((f"{place} {tensor_digest(values)}", f"{place} {tensor_digest(half)}"))
    return pairs


def _place(name: str, shape: Iterable[int]) -> str | None:
    """The layer ("-" for embeddings) and shape of a tensor by its name in a model or a file; None
    if it does not count."""
    size = tuple(shape)
    if len(size) not in (1, 2) or 0 in size or _NOT_COUNTED.search(name):
        return None
    if number := _NUMBER.search(name):
        return f"{number[1]} {size}"
    return f"- {size}" if _EMBEDDING.search(name) else None


def runs(numel: int) -> list[tuple[int, int]]:
    """The values of a flat tensor that are sampled: (first, how many) of each run."""
    if numel <= RUNS * RUN:
        return [(0, numel)]
    return [((i * (numel - RUN)) // (RUNS - 1), RUN) for i in range(RUNS)]


def tensor_digest(values: Tensor) -> str:
    """sha256 of values in bfloat16; of the bytes as they are where they are codes."""
    if values.is_floating_point():
        values = values.float().to(torch.bfloat16).view(torch.int16)
    return hashlib.sha256(_little_endian(values.cpu())).hexdigest()


def _little_endian(values: Tensor) -> bytes:
    array = values.numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
