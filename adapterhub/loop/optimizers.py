"""Optimizers: AdamW, two variants whose state takes less memory, and one for factors.

    adamw             both moments in fp32: 8 bytes per parameter
    adamw-8bit        both in 8 bits, with one scale per 256 values: 2 bytes; tensors with fewer
                      than 4,096 values keep fp32
    paged-adamw-8bit  the same in CUDA managed memory, which may be paged to the host
    riemannian        AdamW, where the gradients of the factors of an update B A are first
                      G_A <- (B^T B + d I)^-1 G_A   and   G_B <- G_B (A A^T + d I)^-1

    A, G_A: (rank, d_in)    B, G_B: (d_out, rank)    d: 0.01

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101;
Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861; paged: Dettmers et al. 2023, section 3,
https://arxiv.org/abs/2305.14314; riemannian: Zhang & Pilanci 2024, "Riemannian Preconditioned LoRA
for Fine-Tuning Foundation Models", https://arxiv.org/abs/2402.02347. Most adapters are small: 8-bit
states matter for methods that train whole layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.errors import ConfigError
from adapterhub.methods.lora import LoRALayer
from adapterhub.recipe.options import TrainOptions

SMALLEST, BLOCK = 4096, 256
_DAMPING = 1e-2  # of products of factors, one of which is zero at first
Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerRow:
    """How to build an optimizer from parameter groups, and the bytes of its state per tensor.

    `make` also gets the model whose tensors train.
    """

    make: Callable[[Groups, TrainOptions, nn.Module], torch.optim.Optimizer]
    bytes: Callable[[Tensor], int]


def _common(options: TrainOptions) -> dict[str, Any]:
    return {"betas": (options.beta1, options.beta2), "eps": options.eps}


def _adamw(groups: Groups, options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    fused = all(p.device.type in ("cuda", "cpu") for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, **_common(options), fused=fused)


def _adamw_8bit(
    groups: Groups, options: TrainOptions, model: nn.Module, paged: bool = False
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


def _riemannian(groups: Groups, options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    layers = [module for module in model.modules() if isinstance(module, LoRALayer)]
    pairs = [(m.A, m.B) for m in layers if {id(m.A), id(m.B)} <= trained]
    if not pairs:
        raise ConfigError(
            "train.optimizer=riemannian needs factors A and B that both train",
            expected="a LoRA or one of its variants",
            hint="method=lora, or train.optimizer=adamw",
        )
    optimizer = _adamw(groups, options, model)
    optimizer.register_step_pre_hook(lambda *_: _precondition(pairs))
    return optimizer


@torch.no_grad()
def _precondition(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Change the gradients of the factors of products B A. A: (rank, d_in), B: (d_out, rank)."""
    for a, b in pairs:
        damping = _DAMPING * torch.eye(len(a)).to(a)
        if a.grad is not None:
            a.grad.copy_(torch.linalg.solve(b.T @ b + damping, a.grad))
        if b.grad is not None:
            b.grad.copy_(torch.linalg.solve(a @ a.T + damping, b.grad.T).T)


def _bytes_fp32(parameter: Tensor) -> int:
    return 8 * parameter.numel()


OPTIMIZERS = {
    "adamw": OptimizerRow(_adamw, _bytes_fp32),
    "adamw-8bit": OptimizerRow(_adamw_8bit, _state_bytes_8bit),
    "paged-adamw-8bit": OptimizerRow(partial(_adamw_8bit, paged=True), _state_bytes_8bit),
    "riemannian": OptimizerRow(_riemannian, _bytes_fp32),
}
