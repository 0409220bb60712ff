"""Quantized backbones: how they are asked for, and how one of their weights is read.

    nf4, fp4    4 bits a value in blocks of 64, the scales of the blocks quantized once more
    int8        8 bits a value, one scale a row; activations are rounded to 8 bits too
    int8-weight the same of the weights alone, by torchao

Linear layers are quantized. The head, the output layer, and what the checkpoint lacks stay as they
are: these train, or decide alone what comes out.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3,
https://arxiv.org/abs/2305.14314; Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for
Transformers at Scale", https://arxiv.org/abs/2208.07339.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.errors import ConfigError, unknown

LABELS = ("id2label", "label2id", "num_labels", "problem_type")
_PACKED = "support_avx512bf16_for_cpu"
_FORGETS = "_adapterhub_forgets"


@dataclass(frozen=True)
class Scheme:
    """A way to quantize: the library, the extra that installs it, and the configuration that
    transformers takes, of the dtype of the computation and the paths that stay as they are."""

    library: str
    extra: str
    config: Callable[[torch.dtype, list[str]], Any]


def _four_bits(kind: str, dtype: torch.dtype, kept: list[str]) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )


def _eight_bits(dtype: torch.dtype, kept: list[str]) -> Any:
    return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)


def _weights_alone(dtype: torch.dtype, kept: list[str]) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=kept)


QUANTIZATIONS = {
    "nf4": Scheme("bitsandbytes", "quantized", partial(_four_bits, "nf4")),
    "fp4": Scheme("bitsandbytes", "quantized", partial(_four_bits, "fp4")),
    "int8": Scheme("bitsandbytes", "quantized", _eight_bits),
    "int8-weight": Scheme("torchao", "torchao", _weights_alone),
}


def require(quantize: str | None, folder: Path) -> str | None:
    """Refuse a quantization that cannot be, before anything is loaded. Returns what is left to do:
    nothing where the checkpoint comes as it is wanted.

    Raises:
        ConfigError: an unknown one, one of a checkpoint that is quantized otherwise, or its library
            is not installed.
    """
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise unknown("quantization", quantize, QUANTIZATIONS)
    facts = _stored(folder)
    if facts and quantize == quantization_kind(facts):
        quantize = None
    stored = stored_quantization(folder)
    if quantize is not None and stored is not None:
        raise ConfigError(
            f"the checkpoint {folder.name} is quantized already, by {stored}",
            expected="a checkpoint in fp32, bf16 or fp16",
            hint="load it as it is, without quantize",
        )
    library = QUANTIZATIONS[quantize].library if quantize else stored
    extras = {scheme.library: scheme.extra for scheme in QUANTIZATIONS.values()}
    if library in extras and not importlib.util.find_spec(library):
        raise ConfigError(
            f"this quantized backbone needs {library}, which is not installed",
            hint=f'pip install "adapterhub[{extras[library]}]"',
        )
    return quantize


def stored_quantization(folder: Path) -> str | None:
    """By which library the checkpoint in a folder is quantized, if it is."""
    found = _stored(folder)
    return str(found.get("quant_method", "unknown")) if found else None


def _stored(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        return {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def quantization_kind(facts: Mapping[str, Any]) -> str:
    """The kind of a quantization, one of QUANTIZATIONS where it is known, by what a configuration
    says of it."""
    if facts.get("load_in_4bit"):
        return str(facts.get("bnb_4bit_quant_type", "int4"))
    if facts.get("quant_method") == "torchao":
        made = facts["quant_type"]["default"]["_type"]
        return "int8-weight" if made == "Int8WeightOnlyConfig" else f"torchao-{made}"
    method = facts.get("quant_method", "unknown")
    return "int8" if facts.get("load_in_8bit") else str(getattr(method, "value", method))


def loading_options(
    auto: Any, folder: Path, options: dict[str, Any], quantize: str | None
) -> dict[str, Any]:
    """What `from_pretrained` takes to load a quantized backbone: `options`, and what to quantize.

    The model is made on the meta device first, which reads no weights, to see what the checkpoint
    lacks.
    """
    stored = stored_quantization(folder)
    if quantize is None and stored != "bitsandbytes":
        return options
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    dtype, labels = options["dtype"], {k: v for k, v in options.items() if k in LABELS}
    config = transformers.AutoConfig.from_pretrained(folder, **labels)
    kinds = config.__dict__.pop("quantization_config", None)
    made, info = auto.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        device_map="meta",
        ignore_mismatched_sizes=True,  # codes have other shapes than the values
        output_loading_info=True,
    )
    kept = _kept(made, info["missing_keys"])
    if quantize is None:
        kinds["llm_int8_skip_modules"] = sorted(kept | {*(kinds["llm_int8_skip_modules"] or ())})
        config = transformers.AutoConfig.from_pretrained(folder, **labels)
        config.quantization_config = kinds
        return {k: v for k, v in options.items() if k not in labels} | {"config": config}
    return options | {"quantization_config": QUANTIZATIONS[quantize].config(dtype, sorted(kept))}


def _kept(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """The paths of the modules that stay as they are."""
    output = model.get_output_embeddings()
    kept = {key.rpartition(".")[0] for key in missing}
    kept |= {path for path, module in model.named_modules() if module is output}
    if output is None and model.base_model is not model:
        kept |= {name for name, child in model.named_children() if child is not model.base_model}
    return kept - {""} or {"lm_head"}  # of an empty list transformers makes one of its own


def dequantized(module: nn.Module) -> Tensor | None:
    """The weight of a quantized layer, (d_out, d_in), as the layer computes with it; None of a kind
    that is not known."""
    weight: Any = getattr(module, "weight", None)
    found: Tensor
    if (state := getattr(weight, "quant_state", None)) is not None:
        from bitsandbytes.functional import dequantize_4bit

        found = dequantize_4bit(weight.data, state)
    elif (scales := _scales(module)) is not None:
        found = weight.data.float() * (scales.float() / 127).unsqueeze(1)
    elif hasattr(weight, "dequantize") and not _plain(weight):
        found = weight.dequantize()
    else:
        return None
    whole = [getattr(module, "out_features", None), getattr(module, "in_features", None)]
    return found if list(found.shape) == whole else None


def can_requantize(module: nn.Module) -> bool:
    """Whether `requantized` knows the layer."""
    weight = getattr(module, "weight", None)
    by_row = list(getattr(weight, "block_size", ())) == [1, getattr(module, "in_features", 0)]
    known = getattr(weight, "quant_state", None) is not None or _scales(module) is not None
    return known or (type(weight).__name__ == "Int8Tensor" and by_row)


def requantized(module: nn.Module, matrix: Tensor) -> tuple[nn.Parameter, dict[str, Any]]:
    """A weight (d_out, d_in) quantized as a layer keeps its own, and the attributes of the layer
    that go with it."""
    weight: Any = module.weight
    kind, state = type(weight), getattr(weight, "quant_state", None)
    if state is not None:
        options = {"blocksize": state.blocksize, "compress_statistics": state.nested}
        options |= {"quant_type": state.quant_type, "quant_storage": weight.quant_storage}
        new = kind(matrix.to(state.dtype).contiguous(), **options).to(weight.device)
        new.module = module
        return new, {"quant_state": new.quant_state}
    if hasattr(kind, "from_hp"):
        from torchao.quantization import PerRow

        coded = kind.from_hp(matrix.to(weight.dtype).contiguous(), PerRow())
        return nn.Parameter(coded, requires_grad=False), {}
    new = kind(matrix.cpu(), requires_grad=False).to(weight.device)
    fresh: Any = copy.copy(module.state)
    fresh.CB = fresh.SCB = None  # the layer takes them over from the weight when it is called
    return new, {"state": fresh}


def _plain(weight: Tensor) -> bool:
    """Whether a tensor is numbers, and not a kind of its own that holds codes."""
    return type(weight) in (Tensor, nn.Parameter) and type(weight.data) is Tensor


def _scales(module: nn.Module) -> Tensor | None:
    """The scales of the rows of an int8 weight, (d_out,): the layer takes them over from its weight
    when it is first called."""
    for owner in (getattr(module, "weight", None), getattr(module, "state", None)):
        if isinstance(scales := getattr(owner, "SCB", None), Tensor):
            return scales
    return None


def size_of(parameter: Tensor) -> int:
    """The number of values of a parameter, which 4-bit codes keep two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def bytes_of(parameter: Tensor) -> int:
    """What a parameter takes: its values or codes, and the scales of these."""
    if not _plain(parameter) and hasattr(parameter, "__tensor_flatten__"):
        held = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
        return sum(t.numel() * t.element_size() for t in held)
    own = parameter.numel() * parameter.element_size()
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return own + _state_bytes(state) + (_state_bytes(state.state2) if state.nested else 0)
    # The layer of an int8 weight takes its scales over: there is one of 4 bytes a row.
    return own + 4 * parameter.shape[0] * (type(parameter).__name__ == "Int8Params")


def _state_bytes(state: Any) -> int:
    tensors = (state.absmax, state.code, getattr(state, "offset", None))
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def keep_layout(model: nn.Module) -> list[nn.Module]:
    """Keep 4-bit weights as they are stored, and return the layers that this changes.

    On some CPUs bitsandbytes packs them anew for inference at the first call without gradients, in
    a form that gives none in a later call: training would go on with gradients that are wrong.
    """
    layers = [module for module in model.modules() if getattr(module, _PACKED, False)]
    for layer in layers:
        layer.__dict__[_PACKED] = False
        weight: Any = layer.weight
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            layer.state_dict()  # which unpacks them
    return layers


def hold_layout(model: nn.Module) -> list[nn.Module]:
    """Make quantized layers fit for training through them, and return those that this changes, for
    `free_layout`."""
    eights = [m for m in model.modules() if _scales(m) is not None and _FORGETS not in m.__dict__]
    for layer in eights:
        layer.__dict__[_FORGETS] = layer.register_forward_hook(forget_input, prepend=True)
    return keep_layout(model) + eights


def free_layout(layers: list[nn.Module]) -> None:
    """The layers are as they were: they may pack their weights again."""
    for layer in layers:
        if _FORGETS in layer.__dict__:
            layer.__dict__.pop(_FORGETS).remove()
        else:
            layer.__dict__[_PACKED] = True


def forget_input(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """The hook of an int8 layer: bitsandbytes keeps its input for a gradient of the codes, which
    nobody takes, and where gradient checkpointing does not see it."""
    node: Any = getattr(output, "grad_fn", None)
    if node is None or torch.compiler.is_compiling():
        return
    if isinstance(kept := getattr(node, "tensors", None), tuple):
        node.tensors = (None,) * len(kept)
    if isinstance(getattr(node, "A", None), Tensor):
        node.A = None
