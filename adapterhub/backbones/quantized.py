"""Quantized backbones: quantization schemes, loading, and access to decoded weights.

    nf4, fp4    4 bits per value in blocks of 64; the scales of the blocks are quantized too
    int8        8 bits per value, one scale per row; activations are rounded to 8 bits as well
    int8-weight 8 bits per value, weights only, by torchao
    fp8-weight  the same with 8-bit floating point numbers (4 bits of exponent, 3 of mantissa)

Linear layers are quantized, except the head, the output layer and newly initialized modules. These
are trained, or determine the output directly.

A checkpoint that is already quantized is loaded unchanged. `dequantize` decodes it to plain weights
on loading, which transformers supports for the formats in DECODED.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3,
https://arxiv.org/abs/2305.14314; Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for
Transformers at Scale", https://arxiv.org/abs/2208.07339.

The weight of a layer can be decoded, and a new weight encoded in the same format. Some quantized
layers scale, round or divide their weight when they are called, and some kernels lack a backward
pass. The behavior of such a layer is tested on a few random inputs rather than inferred from its
class. Hooks are not called, so adapters on the layer do not matter. Training through bitsandbytes
layers needs hooks and settings.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from adapterhub.anatomy.backbone import Backbone, device_of, own_modules, quantization_kind
from adapterhub.backbones.checkpoint import stored_config, stored_quantization
from adapterhub.backbones.compare import same
from adapterhub.backbones.layer_timing import without_slow_bf16
from adapterhub.backbones.torch_free_checks import DEQUANTIZE, QUANTIZATION_LIBRARIES
from adapterhub.errors import AttachError, ConfigError, unknown
from adapterhub.patch import Patch
from adapterhub.status import MODEL_LOCK

LABELS = ("id2label", "label2id", "num_labels", "problem_type")


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme.

    Attributes:
        config: makes the transformers configuration from the compute dtype and the paths of the
            modules that are not quantized.
        shards: whether FSDP2 can divide the codes.
    """

    config: Callable[[torch.dtype, list[str]], Any]
    shards: bool = False


def _four_bits(kind: str, dtype: torch.dtype, skipped: list[str]) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skipped,
    )


def _eight_bits(dtype: torch.dtype, skipped: list[str]) -> Any:
    return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)


def _eight_bit_weights(dtype: torch.dtype, skipped: list[str]) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=skipped)


def _float8_weights(dtype: torch.dtype, skipped: list[str]) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return transformers.TorchAoConfig(Float8WeightOnlyConfig(), modules_to_not_convert=skipped)


QUANTIZATIONS = {
    "nf4": Scheme(partial(_four_bits, "nf4"), shards=True),
    "fp4": Scheme(partial(_four_bits, "fp4"), shards=True),
    "int8": Scheme(_eight_bits),
    "int8-weight": Scheme(_eight_bit_weights),
    "fp8-weight": Scheme(_float8_weights),
}


DECODED = ("fp8", "mxfp4", "compressed-tensors")
"""Stored quantizations that transformers can decode when it loads a checkpoint."""
IN_FP32 = ("bitsandbytes", "mxfp4")
"""Stored quantizations whose layers also compute in fp32; mxfp4 is decoded without a GPU."""


def sharded_codes() -> list[str]:
    """List the quantizations whose codes can be sharded; each process has all scales."""
    return [name for name, scheme in QUANTIZATIONS.items() if scheme.shards]


def remaining_quantization(quantize: str | None, folder: Path) -> str | None:
    """Return the quantization to apply to a checkpoint; None if it is already applied.

    Raises:
        ConfigError: the quantization is unknown, the checkpoint is quantized in another way, or the
            library is not installed.
    """
    stored = stored_quantization(folder)
    if stored is not None:
        _check_known(folder, stored)
    if quantize == DEQUANTIZE:
        _check_decodes(folder, stored)
        return quantize
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise unknown("quantization", quantize, (*QUANTIZATIONS, DEQUANTIZE))
    config = stored_config(folder)
    if config and quantize == quantization_kind(config):
        quantize = None
    if quantize is not None and stored is not None:
        raise ConfigError(
            f"the checkpoint {folder.name} is quantized already, by {stored}",
            expected="a checkpoint in fp32, bf16 or fp16",
            hint="load it as it is, without quantize",
        )
    library = QUANTIZATION_LIBRARIES[quantize][0] if quantize else stored
    extras = dict(QUANTIZATION_LIBRARIES.values())
    if library in extras and not importlib.util.find_spec(library):
        raise ConfigError(
            f"this quantized backbone needs {library}, which is not installed",
            hint=f'pip install "adapterhub[{extras[library]}]"',
        )
    return quantize


def _check_known(folder: Path, stored: str) -> None:
    """Refuse a checkpoint if transformers would load its codes as weights."""
    if stored == "bitsandbytes" or stored in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    raise ConfigError(
        f"the checkpoint {folder.name} is quantized by {stored}, which transformers "
        f"{transformers.__version__} cannot load",
        expected=f"one of {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}",
        hint="pip install --upgrade transformers",
    )


def _check_decodes(folder: Path, stored: str | None) -> None:
    """Refuse to decode a checkpoint that is not quantized, or whose format cannot be decoded."""
    if stored in DECODED:
        return
    kind = f"is quantized by {stored}" if stored else "is not quantized"
    raise ConfigError(
        f"quantize={DEQUANTIZE}: the checkpoint {folder.name} {kind}",
        expected=f"a checkpoint in {', '.join(DECODED)}",
        hint="load it as it is, without quantize",
    )


def cpu_note(backbone: Backbone) -> str:
    """Return a note for the user if the quantization of a model is slow on its device."""
    kind = backbone.quantization
    if kind is None or device_of(backbone.module) != torch.device("cpu"):
        return ""
    if QUANTIZATION_LIBRARIES.get(kind, ("", ""))[0] != "bitsandbytes":
        return ""
    return f"{kind} saves memory; on a CPU it can be several times slower than fp32"


# Messages about casts in each call, and about an optional kernel that `keep_4bit_layout` disables.
_TALKATIVE = ("autograd._functions", "backends.cpu.ops")


def quiet_bitsandbytes() -> None:
    """Limit the log of bitsandbytes to errors; libraries import it when they load a backbone."""
    for name in _TALKATIVE:
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)


def loading_options(
    auto: Any, folder: Path, options: dict[str, Any], quantize: str | None
) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load a quantized backbone, or decode it.

    The model is first created on the meta device, without reading weights, to find newly
    initialized parameters. `options` must contain `dtype`.
    """
    if quantize == DEQUANTIZE:
        return _decoding_options(folder, options)
    if quantize is None and stored_quantization(folder) != "bitsandbytes":
        return options
    quiet_bitsandbytes()
    dtype, labels = options["dtype"], {k: v for k, v in options.items() if k in LABELS}
    config = transformers.AutoConfig.from_pretrained(folder, **labels)
    stored_config = config.__dict__.pop("quantization_config", None)
    skipped = _skipped_modules(auto, folder, config, dtype)
    if quantize is not None:
        scheme = QUANTIZATIONS[quantize]
        return options | {"quantization_config": scheme.config(dtype, sorted(skipped))}
    skipped |= {*(stored_config["llm_int8_skip_modules"] or ())}
    stored_config["llm_int8_skip_modules"] = sorted(skipped)
    computed = str(stored_config.get("bnb_4bit_compute_dtype", "")).removeprefix("torch.")
    if computed == "bfloat16" and without_slow_bf16("bf16") != "bf16":
        stored_config["bnb_4bit_compute_dtype"] = "float32"
    config = transformers.AutoConfig.from_pretrained(folder, **labels)
    config.quantization_config = stored_config
    return {k: v for k, v in options.items() if k not in labels} | {"config": config}


def _decoding_options(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that decode a quantized checkpoint."""
    labels = {name: value for name, value in options.items() if name in LABELS}
    config = transformers.AutoConfig.from_pretrained(folder, **labels)
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    return {name: value for name, value in options.items() if name not in labels} | {
        "config": config
    }


def settle_decoded(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Convert a model that transformers has decoded to a plain model of one dtype, in place.

    Tensors that bitsandbytes did not quantize get the same dtype.

    transformers decodes FP8 and MXFP4 where it lacks kernels, such as on a CPU. The decoded weights
    get the dtype of `from_pretrained`; all other tensors keep the dtype of the file.
    `save_pretrained` would encode the weights again, without a configuration that records it.
    """
    stored, coded = stored_quantization(folder), Backbone.of(model).quantization is not None
    if stored is None or (coded and stored != "bitsandbytes"):
        return
    if not coded:
        vars(model).pop("_weight_conversions", None)
    kept = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        kept |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not kept & {*name.split(".")}:
            parameter.data = parameter.data.to(dtype)


def _skipped_modules(
    auto: Any, folder: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> set[str]:
    """Return the paths of modules to leave unquantized: head, output layer, new modules."""
    with MODEL_LOCK:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map="meta",
            ignore_mismatched_sizes=True,  # the shapes of codes and values differ
            output_loading_info=True,
        )
    output = model.get_output_embeddings()
    paths = {key.rpartition(".")[0] for key in info["missing_keys"]}
    paths |= {path for path, module in model.named_modules() if module is output}
    if output is None and model.base_model is not model:
        paths |= {name for name, child in model.named_children() if child is not model.base_model}
    return paths - {""} or {"lm_head"}  # transformers replaces an empty list with its own


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def dequantized(module: nn.Module) -> Tensor | None:
    """Decode the weight of a quantized layer to the values that the layer computes with.

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
    """Quantize a weight (d_out, d_in) in the format of a layer's current weight.

    Returns:
        The new weight, and other attributes of the layer that must be set with it.
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
    """Return whether a tensor holds numbers, rather than being a subclass that holds codes."""
    return type(weight) in (Tensor, nn.Parameter) and type(weight.data) is Tensor


def row_scales(module: nn.Module) -> Tensor | None:
    """Return the row scales of an int8 weight, (d_out,); None for any other layer.

    The scales are an attribute of the weight until the first call, then of the layer's state.
    """
    for owner in (getattr(module, "weight", None), getattr(module, "state", None)):
        if isinstance(scales := getattr(owner, "SCB", None), Tensor):
            return scales
    return None


def _float8_factors(module: nn.Module) -> Tensor | None:
    """Return the factor of each value of an FP8 weight, broadcast to (d_out, d_in).

    transformers stores one factor for the whole weight, for each row, or for each block. Its block
    layer names the factors `weight_scale_inv`, although it multiplies by them.

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
_ROUNDING = 0.1  # rounding activations to 8 bits changes them by about 3 %
# Errors of a layer with other inputs or outputs, or without a kernel for this device.
_NO_ANSWER = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, NameError)


def has_own_code(layer: nn.Module) -> bool:
    """Return whether a layer runs code other than nn.Linear, Conv1D or bitsandbytes."""
    if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):  # set by accelerate
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
    """Return whether a layer blocks gradients: its input gets none, zeros, or an error.

    The input has `width` features, and the device and dtype of `like`.
    """
    with torch.enable_grad():
        x = torch.linspace(-1, 1, width, dtype=like.dtype, device=like.device)[None]
        try:
            output = _called(layer, x.requires_grad_())
        except _NO_ANSWER:  # calling the model raises the same error
            return False
        if not isinstance(output, Tensor):
            return False
        try:
            (gradient,) = torch.autograd.grad(output.sum(), x)
        except RuntimeError:  # the output needs no gradient, or lacks a backward pass
            return True
    return not bool(gradient.any())


def _called(layer: nn.Module, x: Tensor) -> Any:
    # accelerate's forward would move weights that are already in place.
    forward = type(layer).forward if hasattr(layer, "_hf_hook") else None
    return forward(layer, x) if forward else layer.forward(x)


_CAN_PACK = "support_avx512bf16_for_cpu"
_HOOK = "_adapterhub_forgets"


def check_gradients(backbone: Backbone) -> None:
    """Refuse to train through quantized layers that do not pass gradients on.

    Raises:
        AttachError: transformers cannot train this quantization, or a tested layer blocks
            gradients.
    """
    if (kind := backbone.quantization) is None:
        return
    model = backbone.pretrained
    quantizer = getattr(model, "hf_quantizer", None)
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
    """List the linear layers that block gradients; one layer of each class is tested."""
    kinds: dict[type, tuple[str, nn.Module, int]] = {}
    for path, layer in own_modules(model):
        width = getattr(layer, "in_features", None)
        if isinstance(width, int) and has_own_code(layer):
            kinds.setdefault(type(layer), (path, layer, width))
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    return [path for path, layer, width in kinds.values() if blocks_gradients(layer, width, like)]


def keep_4bit_layout(model: nn.Module, patch: Patch) -> None:
    """Stop 4-bit layers from repacking their weights.

    On some CPUs, bitsandbytes repacks the weights for inference at the first call without
    gradients. The packed layers return wrong gradients in later calls.
    """
    layers = [module for _, module in own_modules(model) if getattr(module, _CAN_PACK, False)]
    for layer in layers:
        patch.set(layer, _CAN_PACK, False)
        weight: Any = layer.weight
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            layer.state_dict()  # unpacks the weights


def prepare_quantized(model: nn.Module, patch: Patch) -> None:
    """Prepare quantized layers for training through them; skip prepared layers.

    Undoing the patch removes the hooks and lets layers repack their weights.
    """
    for _, layer in own_modules(model):
        if row_scales(layer) is not None and _HOOK not in vars(layer):
            patch.set(layer, _HOOK, True)
            patch.hook(layer.register_forward_hook, drop_saved_input, prepend=True)
    keep_4bit_layout(model, patch)


def drop_saved_input(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Free the input that bitsandbytes saves in an int8 layer's output; a forward hook.

    The input is saved for a gradient of the codes, which is never computed. Gradient checkpointing
    does not free it.
    """
    node: Any = getattr(output, "grad_fn", None)
    if node is None or torch.compiler.is_compiling():
        return
    if isinstance(tensors := getattr(node, "tensors", None), tuple):
        node.tensors = (None,) * len(tensors)
    if isinstance(getattr(node, "A", None), Tensor):
        node.A = None
