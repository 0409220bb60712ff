"""Optimizers: AdamW, and two forms of it that keep less on the device.

    adamw             both averages of the gradient in fp32: 8 bytes a parameter
    adamw-8bit        in 8 bits, one scale for 256 values: 2 bytes; a tensor of fewer than 4,096
                      values keeps fp32
    paged-adamw-8bit  the same in CUDA managed memory, which may move to the host

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101;
Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861; paged: Dettmers et al. 2023, section 3,
https://arxiv.org/abs/2305.14314. An adapter is small: it is with methods that train whole layers
that 8 bits save memory that counts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapterhub.errors import ConfigError
from adapterhub.training.options import TrainOptions

SMALLEST, BLOCK = 4096, 256
Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """How an optimizer is made of parameter groups, and what its state of a parameter takes."""

    make: Callable[[Groups, TrainOptions], torch.optim.Optimizer]
    bytes: Callable[[Tensor], int]


def _common(options: TrainOptions) -> dict[str, Any]:
    return {"betas": (options.beta1, options.beta2), "eps": options.eps}


def _adamw(groups: Groups, options: TrainOptions) -> torch.optim.Optimizer:
    fused = all(p.device.type in ("cuda", "cpu") for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, **_common(options), fused=fused)


def _eight_bits(groups: Groups, options: TrainOptions, paged: bool) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"train.optimizer={options.optimizer} needs bitsandbytes, which is not installed",
            hint='pip install "adapterhub[quantized]", or train.optimizer=adamw',
        )
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    cls = PagedAdamW8bit if paged and torch.cuda.is_available() else AdamW8bit
    made: torch.optim.Optimizer = cls(groups, **_common(options), min_8bit_size=SMALLEST)
    return made


def _state_bytes(parameter: Tensor) -> int:
    values = parameter.numel()
    return 8 * values if values < SMALLEST else 2 * (values + 4 * -(-values // BLOCK))


OPTIMIZERS = {
    "adamw": Row(_adamw, lambda parameter: 8 * parameter.numel()),
    "adamw-8bit": Row(lambda g, o: _eight_bits(g, o, paged=False), _state_bytes),
    "paged-adamw-8bit": Row(lambda g, o: _eight_bits(g, o, paged=True), _state_bytes),
}
