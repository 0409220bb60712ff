"""Initializations of peft that subtract a part of W from it.

PiSSA and OLoRA start from a part of W and replace W by W - s B0 A0, so their files are for that
weight. Like peft, which has only W when it loads them, the importer recomputes B0 and A0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.interchange.translation import Translation
from adapterhub.methods.pissa import principal

# Initializations that keep W.
_PLAIN = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


def subtracted_initialization(config: Mapping[str, Any], translation: Translation) -> str:
    """Return the decomposition whose leading part was subtracted from W, "" if none was."""
    init = config["init_lora_weights"]
    name = init.lower() if isinstance(init, str) else init
    if name in _PLAIN:
        return ""
    assert isinstance(name, str)
    decomposition, _, iterations = name.partition("_niter_")
    if config["use_dora"] or decomposition not in _DECOMPOSITIONS:
        translation.problems.append(
            f"init_lora_weights: {init!r} changed weights that are not in the files"
        )
        return ""
    if iterations:
        translation.notes.append(
            f"init_lora_weights {init}: the randomized decomposition that was subtracted from the "
            "weights is not in the files; the exact one is used instead"
        )
    return decomposition


def subtracted_factors(
    initialization: str, module: nn.Module, weight: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the subtracted part s B0 A0 of a module's weight.

    `initialization` is pissa or olora, `weight` W: (d_out, d_in), `scale` s. The rank is lower if W
    has fewer components.

    Returns:
        B0: (d_out, rank) and A0: (rank, d_in).
    """
    return _DECOMPOSITIONS[initialization](module, weight, rank, scale)


def _components(
    module: nn.Module, weight: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    left, right = principal(weight, rank, 0)
    return left / scale**0.5, right / scale**0.5


def _orthonormal(
    module: nn.Module, weight: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    transposed = isinstance(module, Conv1D)  # peft decomposes the weight as it is stored
    q, r = torch.linalg.qr(weight.T if transposed else weight)
    q, r = q[:, :rank], r[:rank]
    return (r.T, q.T) if transposed else (q, r)


_DECOMPOSITIONS = {"pissa": _components, "olora": _orthonormal}
