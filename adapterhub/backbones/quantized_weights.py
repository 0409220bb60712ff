"""Weights of quantized layers: decode one, encode a new one, count values and bytes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def dequantized(module: nn.Module) -> Tensor | None:
    """Decode the weight of a quantized layer as the layer computes with it.

    Returns:
        The weight, (d_out, d_in); None for an unsupported quantization.
    """
    weight: Any = getattr(module, "weight", None)
    matrix: Tensor
    if (state := getattr(weight, "quant_state", None)) is not None:
        from bitsandbytes.functional import dequantize_4bit

        matrix = dequantize_4bit(weight.data, state)
    elif (scales := row_scales(module)) is not None:
        matrix = weight.data.float() * (scales.float() / 127).unsqueeze(1)
    elif (factors := _float8_factors(module)) is not None:
        matrix = weight.data.float() * factors
    elif hasattr(weight, "dequantize") and not _is_plain(weight):
        matrix = weight.dequantize()
    else:
        return None
    size = [getattr(module, "out_features", None), getattr(module, "in_features", None)]
    return matrix if list(matrix.shape) == size else None


def can_requantize(module: nn.Module) -> bool:
    """Return whether `requantized` supports a layer."""
    weight = getattr(module, "weight", None)
    if getattr(weight, "quant_state", None) is not None or row_scales(module) is not None:
        return True
    by_row = list(getattr(weight, "block_size", ())) == [1, getattr(module, "in_features", 0)]
    return type(weight).__name__ in ("Int8Tensor", "Float8Tensor") and by_row


def requantized(module: nn.Module, matrix: Tensor) -> tuple[nn.Parameter, dict[str, Any]]:
    """Quantize a weight (d_out, d_in) in the same way as a layer's current weight.

    Returns:
        The new weight, and the other attributes of the layer that must be set with it.
    """
    weight: Any = module.weight
    cls, state = type(weight), getattr(weight, "quant_state", None)
    if state is not None:
        options = {"blocksize": state.blocksize, "compress_statistics": state.nested}
        options |= {"quant_type": state.quant_type, "quant_storage": weight.quant_storage}
        new = cls(matrix.to(state.dtype).contiguous(), **options).to(weight.device)
        new.module = module
        return new, {"quant_state": new.quant_state}
    if hasattr(cls, "from_hp"):
        from torchao.quantization import PerRow

        codes = cls.from_hp(matrix.to(weight.dtype).contiguous(), granularity=PerRow())
        return nn.Parameter(codes, requires_grad=False), {}
    new = cls(matrix.cpu(), requires_grad=False).to(weight.device)
    layer_state: Any = copy.copy(module.state)
    layer_state.CB = layer_state.SCB = None  # the layer moves them from the weight when called
    return new, {"state": layer_state}


def _is_plain(weight: Tensor) -> bool:
    """Return whether a tensor holds numbers, and is not a tensor subclass that holds codes."""
    return type(weight) in (Tensor, nn.Parameter) and type(weight.data) is Tensor


def row_scales(module: nn.Module) -> Tensor | None:
    """Return the scales of an int8 weight's rows, (d_out,); None for any other layer.

    They are an attribute of the weight until the layer is first called, then of the layer's state.
    """
    for owner in (getattr(module, "weight", None), getattr(module, "state", None)):
        if isinstance(scales := getattr(owner, "SCB", None), Tensor):
            return scales
    return None


def _float8_factors(module: nn.Module) -> Tensor | None:
    """Return what multiplies each value of an FP8 weight, broadcast to (d_out, d_in).

    transformers stores a factor for the whole weight, for each row, or for each block. Its layer
    for the blocks calls them `weight_scale_inv`, although it multiplies by them.

    Returns:
        The factors; None for a layer that does not hold 8-bit floating point numbers.
    """
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT8 or weight.ndim != 2:
        return None
    named = (getattr(module, name, None) for name in ("weight_scale_inv", "weight_scale"))
    scales = next((each.data.float() for each in named if isinstance(each, Tensor)), None)
    if scales is None:
        return None
    if scales.numel() in (1, weight.shape[0]):
        return scales.reshape(-1, 1)
    if scales.ndim != 2:
        return None
    rows, columns = _block_size(module, weight, scales)
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: weight.shape[0], : weight.shape[1]]


def _block_size(module: nn.Module, weight: Tensor, scales: Tensor) -> tuple[int, int]:
    """Return the rows and columns that share a scale; the last block of each may be smaller."""
    if size := getattr(module, "block_size", None):
        return size[0], size[1]
    rows, columns = (-(-n // m) for n, m in zip(weight.shape, scales.shape, strict=True))
    return rows, columns


def size_of(parameter: Tensor) -> int:
    """Count the values of a parameter; a byte of 4-bit codes holds two."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def bytes_of(parameter: Tensor) -> int:
    """Count the bytes of a parameter: its values or codes, and their scales."""
    if not _is_plain(parameter) and hasattr(parameter, "__tensor_flatten__"):
        return sum(_bytes(getattr(parameter, name)) for name in parameter.__tensor_flatten__()[0])
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        nested = _state_bytes(state.state2) if state.nested else 0
        return _bytes(parameter) + _state_bytes(state) + nested
    # The layer, not the weight, holds an int8 weight's scales: 4 bytes per row.
    return _bytes(parameter) + 4 * parameter.shape[0] * (type(parameter).__name__ == "Int8Params")


def _state_bytes(state: Any) -> int:
    tensors = (state.absmax, state.code, getattr(state, "offset", None))
    return sum(_bytes(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
