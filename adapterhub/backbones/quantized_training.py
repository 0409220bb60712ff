"""Train through quantized layers: hooks and settings that bitsandbytes layers need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.own_modules import own_modules
from adapterhub.backbones.early_checks import DEQUANTIZE
from adapterhub.backbones.layer_probe import blocks_gradients, has_own_code
from adapterhub.backbones.quantized import DECODED, QUANTIZATIONS, quantization_of
from adapterhub.backbones.quantized_weights import row_scales
from adapterhub.errors import AttachError
from adapterhub.patch import Patch

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

    Args:
        model: the backbone.
        patch: undoes it: removes hooks, and lets layers repack their weights.
    """
    for _, layer in own_modules(model):
        if row_scales(layer) is not None and _HOOK not in vars(layer):
            handle = layer.register_forward_hook(drop_saved_input, prepend=True)
            patch.hook(handle)
            patch.set(layer, _HOOK, handle)
    keep_4bit_layout(model, patch)


def drop_saved_input(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Free the input that bitsandbytes saves in an int8 layer's output; a forward hook.

    It is saved for a gradient of the codes, which is never computed, and in a place that gradient
    checkpointing does not cover.

    Args:
        layer: the int8 layer.
        args: its inputs.
        output: its output.
    """
    node: Any = getattr(output, "grad_fn", None)
    if node is None or torch.compiler.is_compiling():
        return
    if isinstance(tensors := getattr(node, "tensors", None), tuple):
        node.tensors = (None,) * len(tensors)
    if isinstance(getattr(node, "A", None), Tensor):
        node.A = None
