"""A stand-in for a backbone: the same modules, with random weights that take almost no memory.

A weight of shape (d_out, d_in) is a Hankel matrix, W[i, j] = b[i + j]: a view of d_out + d_in - 1
random numbers. So a stand-in of any size fits into memory, and computes as its class does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.backbones.model_lock import MODEL_LOCK


def stand_in(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make a model of the same class and configuration, in fp32 on the CPU, with random weights.

    The model itself may have none (`meta_model`).
    """
    config = copy.deepcopy(model.config)
    if config.pad_token_id is None:
        config.pad_token_id = 0  # classifiers refuse batches without it
    config._experts_implementation = "eager"  # the others need weights with usual strides
    with MODEL_LOCK:  # also for the parameters: accelerate would put those of other threads on meta
        with torch.device("cpu"), init_empty_weights(include_buffers=False):
            made = type(model)(config)
        generator = torch.Generator().manual_seed(seed)
        for module in made.modules():
            for name, parameter in module.named_parameters(recurse=False):
                value = _random(parameter.shape, "bias" in name, generator)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
        made.tie_weights()
    return made.eval()  # type: ignore[no-any-return]


def _random(shape: Sequence[int], is_bias: bool, generator: torch.Generator) -> Tensor:
    """Return random values of a shape; those of a vector are near 1, or near 0 for a bias."""
    if len(shape) < 2:
        return 0.1 * torch.randn(shape, generator=generator) + (not is_bias)
    *outer, rows, columns = shape
    width = rows + columns - 1
    numbers = torch.randn(math.prod(outer) * width, generator=generator) / math.sqrt(columns)
    strides = [math.prod(outer[i + 1 :]) * width for i in range(len(outer))]
    return numbers.as_strided((*outer, rows, columns), (*strides, 1, 1))
