"""The fingerprint: the identity of a backbone by its weights.

    fingerprint = sha256(sorted (site, shape, digest) of every pre-trained parameter)
    digest = sha256(4,096 or more evenly spaced values, rounded to bfloat16, little-endian)

Values are rounded so that fp32 and bf16 loads of one checkpoint agree; a tensor of up to 4,096
values is read whole. A parameter under a site is named by its site, others are not named, so that a
renamed module changes nothing. The task head and parameters that the checkpoint lacks (they are
new, and travel with the adapter) are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from adapterhub.backbones.weights import whole

SAMPLES = 4096


def fingerprint_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """The identity of a set of (site key or "", tensor) pairs, in any order."""
    lines = sorted(f"{key} {tuple(t.shape)} {digest(t)}" for key, t in named)
    return f"bf16-{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def digest(tensor: Tensor) -> str:
    """sha256 of a tensor's evenly spaced values in bfloat16."""
    flat = whole(tensor.detach()).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)].to(torch.bfloat16).cpu().view(torch.int16)
    return hashlib.sha256(sample.numpy().astype("<i2").tobytes()).hexdigest()
