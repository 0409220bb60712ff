"""Layers of a quantized backbone: their weights, what they compute, and training through them.

A weight is decoded, or a new one encoded in the same way. Quantizations bring layers that scale,
round or divide their weight when they are called, and some whose kernels have no backward pass.
What such a layer does is tried on a few random inputs rather than believed of its class. Hooks are
not called, so adapters on it do not matter. Layers of bitsandbytes need hooks and settings to be
trained through.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.own_modules import own_modules
from adapterhub.backbones.early_checks import DEQUANTIZE
from adapterhub.backbones.quantized import DECODED, QUANTIZATIONS, quantization_of
from adapterhub.backbones.same import same
from adapterhub.errors import AttachError
from adapterhub.patch import Patch

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


_INPUTS = 4
_ROUNDING = 0.1  # activations in 8 bits are rounded by some 3 %
# A layer with other inputs or outputs, or without a kernel for this device.
_NO_ANSWER = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, NameError)


def has_own_code(layer: nn.Module) -> bool:
    """Return whether a layer computes by other code than nn.Linear, Conv1D and bitsandbytes."""
    if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):  # which accelerate sets
        return True
    usual = type(layer).forward in (nn.Linear.forward, Conv1D.forward)
    return not usual and not type(layer).__module__.startswith("bitsandbytes.")


@torch.no_grad()
def computes_with(layer: nn.Module, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a layer computes x Wᵀ + b, up to the rounding of activations to 8 bits.

    The weight is W, (d_out, d_in).
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_INPUTS, weight.shape[1], generator=generator).to(weight.device, dtype)
    bias: Tensor | None = getattr(layer, "bias", None)
    try:
        expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
        return bool(same({"": expected}, {"": _called(layer, x)}, _ROUNDING))
    except _NO_ANSWER:
        return False


def blocks_gradients(layer: nn.Module, width: int, like: Tensor) -> bool:
    """Return whether no gradient reaches the input of a layer: none, an error, or zeros.

    Its inputs have `width` features, and the device and dtype of `like`.
    """
    with torch.enable_grad():
        x = torch.linspace(-1, 1, width, dtype=like.dtype, device=like.device)[None]
        try:
            output = _called(layer, x.requires_grad_())
        except _NO_ANSWER:  # the model says so when it is called
            return False
        if not isinstance(output, Tensor):
            return False
        try:
            (gradient,) = torch.autograd.grad(output.sum(), x)
        except RuntimeError:  # it needs no gradient, or has no backward pass
            return True
    return not bool(gradient.any())


def _called(layer: nn.Module, x: Tensor) -> Any:
    # accelerate's forward would move weights that are in place already.
    forward = type(layer).forward if hasattr(layer, "_hf_hook") else None
    return forward(layer, x) if forward else layer.forward(x)


_CAN_PACK = "support_avx512bf16_for_cpu"
_HOOK = "_adapterhub_forgets"


def check_gradients(model: PreTrainedModel) -> None:
    """Refuse to train through quantized layers that pass no gradients on.

    Raises:
        AttachError: transformers says so of this quantization, or a layer was tried.
    """
    kind, quantizer = quantization_of(model), getattr(model, "hf_quantizer", None)
    if kind is None:
        return
    says_so = quantizer is not None and not quantizer.is_trainable
    blocking = [] if says_so else _blocking_layers(model)
    if not says_so and not blocking:
        return
    decode = f'quantize="{DEQUANTIZE}" in load_backbone or the recipe, which decodes the weights'
    raise AttachError(
        f"nothing can be trained on this backbone: no gradient passes through layers in {kind}",
        offenders=blocking,
        expected=f"a backbone in fp32, bf16 or fp16, or in {', '.join(QUANTIZATIONS)}",
        hint=decode if kind in DECODED else "load adapters that were trained elsewhere",
    )


def _blocking_layers(model: PreTrainedModel) -> list[str]:
    """List the linear layers that block gradients, of which one of each class is tried."""
    kinds: dict[type, tuple[str, nn.Module, int]] = {}
    for path, layer in own_modules(model):
        width = getattr(layer, "in_features", None)
        if isinstance(width, int) and has_own_code(layer):
            kinds.setdefault(type(layer), (path, layer, width))
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    return [path for path, layer, width in kinds.values() if blocks_gradients(layer, width, like)]


def keep_4bit_layout(model: nn.Module, patch: Patch) -> None:
    """Stop 4-bit layers from repacking their weights.

    On some CPUs bitsandbytes repacks them for inference at the first call without gradients. The
    packed form returns wrong gradients in later calls.
    """
    layers = [module for _, module in own_modules(model) if getattr(module, _CAN_PACK, False)]
    for layer in layers:
        patch.set(layer, _CAN_PACK, False)
        weight: Any = layer.weight
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            layer.state_dict()  # unpacks the weights


def prepare_quantized(model: nn.Module, patch: Patch) -> None:
    """Prepare quantized layers for training through them, those that are not.

    The patch removes the hooks, and lets layers repack their weights.
    """
    for _, layer in own_modules(model):
        if row_scales(layer) is not None and _HOOK not in vars(layer):
            patch.set(layer, _HOOK, True)
            patch.hook(layer.register_forward_hook, drop_saved_input, prepend=True)
    keep_4bit_layout(model, patch)


def drop_saved_input(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Free the input that bitsandbytes saves in an int8 layer's output; a forward hook.

    It is saved for a gradient of the codes, which is never computed, and in a place that gradient
    checkpointing does not cover.
    """
    node: Any = getattr(output, "grad_fn", None)
    if node is None or torch.compiler.is_compiling():
        return
    if isinstance(tensors := getattr(node, "tensors", None), tuple):
        node.tensors = (None,) * len(tensors)
    if isinstance(getattr(node, "A", None), Tensor):
        node.A = None
