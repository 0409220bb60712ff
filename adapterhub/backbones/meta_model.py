"""Models without the weights of a backbone: a skeleton without values, a stand-in with random ones.

A skeleton of a module has the same modules with parameters of the same sizes. Adapters are planned
on it without reading weights, so planning is equally cheap for a model of any size.

A stand-in has random weights that take almost no memory. A weight of shape (d_out, d_in) is a
Hankel matrix, W[i, j] = b[i + j]: a view of d_out + d_in - 1 random numbers. So a stand-in of any
size fits into memory, and runs the code of its class.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.projections import in_features, is_projection, out_features
from adapterhub.status import MODEL_LOCK


def skeleton(module: nn.Module) -> Any:
    """Copy a module to the meta device; the copy shares everything but tensors with it.

    Projections with quantized weights become plain ones. Adapters are left out.
    """
    return _copied(module, {})


def _copied(module: nn.Module, known: dict[int, Any]) -> Any:
    """Copy a module and its submodules; `known` has the copies so far, by the original's id."""
    if (twin := known.get(id(module))) is not None:
        return twin
    if is_projection(module) and not _has_matrix(module):
        bias = getattr(module, "bias", None) is not None
        plain = nn.Linear(in_features(module), out_features(module), bias, device="meta")
        return known.setdefault(id(module), plain)
    copied: Any = object.__new__(type(module))
    known[id(module)] = copied
    vars(copied).update(vars(module))
    for tensors in ("_parameters", "_buffers"):
        own = vars(module)[tensors].items()
        vars(copied)[tensors] = {name: _empty(tensor, known) for name, tensor in own}
    children = module._modules.items()
    vars(copied)["_modules"] = {
        name: None if child is None else _copied(child, known)
        for name, child in children
        if name != CHILD
    }
    return copied


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a projection's weight is a matrix of numbers rather than codes."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and weight.is_floating_point()


def _empty(tensor: torch.Tensor | None, known: dict[int, Any]) -> Any:
    """Return an empty tensor of the same size, dtype and kind; tied tensors share one."""
    if tensor is None or id(tensor) in known:
        return None if tensor is None else known[id(tensor)]
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=False)
    return known.setdefault(id(tensor), empty)


def stand_in(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make a model of the same class and configuration, in fp32 on the CPU, with random weights.

    The given model may lack weights (`meta_model`).
    """
    config = copy.deepcopy(model.config)
    if config.pad_token_id is None:
        config.pad_token_id = 0  # classifiers refuse batches without it
    config._experts_implementation = "eager"  # the others need weights with usual strides
    with MODEL_LOCK:  # also for parameters: accelerate would put other threads' tensors on meta
        with torch.device("cpu"), init_empty_weights(include_buffers=False):
            random = type(model)(config)
        generator = torch.Generator().manual_seed(seed)
        for module in random.modules():
            for name, parameter in module.named_parameters(recurse=False):
                value = _random(parameter.shape, "bias" in name, generator)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
        random.tie_weights()
    return random.eval()  # type: ignore[no-any-return]


def _random(shape: Sequence[int], is_bias: bool, generator: torch.Generator) -> Tensor:
    """Return random values of a shape; vectors are near 1, or near 0 for a bias."""
    if len(shape) < 2:
        return 0.1 * torch.randn(shape, generator=generator) + (not is_bias)
    *outer, rows, columns = shape
    width = rows + columns - 1
    numbers = torch.randn(math.prod(outer) * width, generator=generator) / math.sqrt(columns)
    strides = [math.prod(outer[i + 1 :]) * width for i in range(len(outer))]
    return numbers.as_strided((*outer, rows, columns), (*strides, 1, 1))
