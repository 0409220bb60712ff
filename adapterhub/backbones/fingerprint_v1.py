"""The first fingerprint, in manifests without an `identity`: a set of sampled tensors.

    fingerprint = sha256(sorted set of "layer shape digest" of the included tensors)
    digest = sha256(16 runs of 256 values, evenly spaced, rounded to bfloat16, little-endian)

Included are the tensors that every model class of a checkpoint has: vectors and matrices inside the
layers, and token embeddings. Excluded are poolers, final norms, position tables and heads, in which
`AutoModel` and `AutoModelForCausalLM` differ; experts, which transformers fuses on loading; tensors
of adapters; and buffers. Only the first number of a tensor's name is used, the layer: renaming a
module does not change the fingerprint, swapping two layers does. Tied copies are one line.

Because of the rounding, a checkpoint and its fp32 and bf16 loads have the same fingerprint,
whatever dtype it is stored in. An fp16 or quantized load has lost precision, as has a model that
was cast to fp16 and back: its fingerprint is that of the files it was loaded from, provided its
remaining values match these files.

It accepts too much: values between the runs, exchanged projections and another configuration go
unseen. `fingerprint.py` has its successor; adapters of that time are still checked with this one.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from adapterhub.backbones.checkpoint import stored_tensors, take_runs
from adapterhub.backbones.weights import has_values, whole
from adapterhub.errors import BackboneError

RUNS, RUN = 16, 256
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:word_embeddings?|embed_tokens|wte|shared|tokens_embed|embed_in|tok_embeddings)\.weight$"
)
# Modules that are fused or renamed on loading, adapters, buffers, and heads.
_EXCLUDED = re.compile(
    r"(?:^|\.)(?:experts?|rotary_emb|masked_bias|adapterhub)\.|\.(?:inv_freq|masked_bias|position_ids)$"
    r"|^(?:classifier|score|cls|lm_head|qa_outputs)\."
)


def first_fingerprint(named: Iterable[tuple[str, Tensor]], origin: Path | None = None) -> str:
    """Compute the first fingerprint of a model from its parameters' names and values, in any order.

    `origin` is the folder they were loaded from, if known.

    Raises:
        BackboneError: the weights are quantized and do not match an origin, or no tensor is
            included.
    """
    included = [(key, t) for name, t in named if (key := _key(name, t.shape)) is not None]
    # Quantized tensors have other shapes and codes: only the others can be compared.
    readable = [(key, _sample(t), t.ndim) for key, t in included if has_values(t)]
    lines = {f"{key} {tensor_digest(values)}" for key, values, _ in readable}
    # Vectors may be of ones, but a matrix of fp16 numbers has probably been rounded.
    rounded = any(_fits_fp16(values) for _, values, dimensions in readable if dimensions > 1)
    exact = len(readable) == len(included) and not rounded
    if not exact and origin is not None:
        stored = _stored_lines(origin)
        if lines <= {line for pair in stored for line in pair}:
            return _identity({line for line, _ in stored})
    if len(readable) < len(included):
        raise BackboneError(
            "the weights are quantized and do not match a checkpoint on disk",
            expected="a model as loaded by load_backbone or from_pretrained",
            hint="load_backbone(FOLDER or HUB ID), and change its weights before quantizing them",
        )
    return _identity(lines)


def _fits_fp16(values: Tensor) -> bool:
    """Return whether all values are fp16 numbers, as after a cast to fp16, and maybe back."""
    return values.dtype == torch.float16 or torch.equal(values.half().to(values.dtype), values)


def _sample(tensor: Tensor) -> Tensor:
    return take_runs(whole(tensor), sampled_runs(tensor.numel()))


def _identity(lines: set[str]) -> str:
    if not lines:
        raise BackboneError("a backbone without layers or token embeddings has no identity")
    return f"bf16-{hashlib.sha256(chr(10).join(sorted(lines)).encode()).hexdigest()}"


def _stored_lines(folder: Path) -> list[tuple[str, str]]:
    """Compute for each tensor its line, and its line after a load in fp16."""
    pairs = []
    for name, shape, read in stored_tensors(folder):
        if (key := _key(name, shape)) is not None:
            values = read(sampled_runs(math.prod(shape)))
            half = values.half() if values.is_floating_point() else values
            pairs.append((f"{key} {tensor_digest(values)}", f"{key} {tensor_digest(half)}"))
    return pairs


def _key(name: str, shape: Iterable[int]) -> str | None:
    """Return a tensor's layer ("-" for embeddings) and shape; None if it is not included.

    `name` is its name in a model or in a file.
    """
    size = tuple(shape)
    if len(size) not in (1, 2) or 0 in size or _EXCLUDED.search(name):
        return None
    if number := _NUMBER.search(name):
        return f"{number[1]} {size}"
    return f"- {size}" if _EMBEDDING.search(name) else None


def sampled_runs(numel: int) -> list[tuple[int, int]]:
    """List the sampled runs of a flattened tensor: (first value, number of values) each."""
    if numel <= RUNS * RUN:
        return [(0, numel)]
    return [((i * (numel - RUN)) // (RUNS - 1), RUN) for i in range(RUNS)]


def tensor_digest(values: Tensor) -> str:
    """Compute sha256 of values in bfloat16, or of the bytes of integers."""
    if values.is_floating_point():
        values = values.float().to(torch.bfloat16).view(torch.int16)
    return hashlib.sha256(_little_endian(values.cpu())).hexdigest()


def _little_endian(values: Tensor) -> bytes:
    array = values.numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
