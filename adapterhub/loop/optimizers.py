"""Optimizers: AdamW, and two variants whose state takes less memory.

    adamw             both moments in fp32: 8 bytes per parameter
    adamw-8bit        both in 8 bits, with one scale per 256 values: 2 bytes; tensors with fewer
                      than 4,096 values keep fp32
    paged-adamw-8bit  the same in CUDA managed memory, which may be paged to the host

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101;
Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861; paged: Dettmers et al. 2023, section 3,
https://arxiv.org/abs/2305.14314. Most adapters are small: 8-bit states matter for methods that
train whole layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapterhub.errors import ConfigError
from adapterhub.recipe.options import TrainOptions

SMALLEST, BLOCK = 4096, 256
Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerRow:
    """How to build an optimizer from parameter groups, and the bytes of its state per tensor."""

    make: Callable[[Groups, TrainOptions], torch.optim.Optimizer]
    bytes: Callable[[Tensor], int]


def _common(options: TrainOptions) -> dict[str, Any]:
    return {"betas": (options.beta1, options.beta2), "eps": options.eps}


def _adamw(groups: Groups, options: TrainOptions) -> torch.optim.Optimizer:
    fused = all(p.device.type in ("cuda", "cpu") for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, **_common(options), fused=fused)


def _adamw_8bit(
    groups: Groups, options: TrainOptions, paged: bool = False
) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"train.optimizer={options.optimizer} needs bitsandbytes, which is not installed",
            hint='pip install "adapterhub[quantized]", or train.optimizer=adamw',
        )
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    cls = PagedAdamW8bit if paged and torch.cuda.is_available() else AdamW8bit
    optimizer: torch.optim.Optimizer = cls(groups, **_common(options), min_8bit_size=SMALLEST)
    return optimizer


def _state_bytes_8bit(parameter: Tensor) -> int:
    values = parameter.numel()
    return 8 * values if values < SMALLEST else 2 * (values + 4 * -(-values // BLOCK))


OPTIMIZERS = {
    "adamw": OptimizerRow(_adamw, lambda parameter: 8 * parameter.numel()),
    "adamw-8bit": OptimizerRow(_adamw_8bit, _state_bytes_8bit),
    "paged-adamw-8bit": OptimizerRow(
        lambda groups, options: _adamw_8bit(groups, options, paged=True), _state_bytes_8bit
    ),
}
