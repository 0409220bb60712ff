"""Quantized backbones: the schemes, and how to load one.

    nf4, fp4    4 bits per value in blocks of 64; the scales of the blocks are quantized too
    int8        8 bits per value, one scale per row; activations are rounded to 8 bits as well
    int8-weight 8 bits per value, weights only, by torchao
    fp8-weight  the same with floating point numbers of 8 bits (4 of exponent, 3 of mantissa)

Linear layers are quantized, except the head, the output layer and newly initialized modules: these
train, or determine the output directly.

A checkpoint that is quantized already is loaded as it is. `dequantize` decodes it to plain weights
as it is loaded, which transformers can do for the formats in DECODED.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3,
https://arxiv.org/abs/2305.14314; Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for
Transformers at Scale", https://arxiv.org/abs/2208.07339.
"""

from __future__ import annotations

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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from adapterhub.backbones.early_checks import DEQUANTIZE, QUANTIZATION_LIBRARIES
from adapterhub.backbones.layer_timing import without_slow_bf16
from adapterhub.backbones.model_lock import MODEL_LOCK
from adapterhub.errors import ConfigError, unknown

LABELS = ("id2label", "label2id", "num_labels", "problem_type")


@dataclass(frozen=True)
class Scheme:
    """A way to quantize.

    Attributes:
        config: makes the transformers configuration from the dtype of the computation and the
            paths of the modules that are not quantized.
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


_TORCHAO = {"Int8WeightOnlyConfig": "int8-weight", "Float8WeightOnlyConfig": "fp8-weight"}
QUANTIZATIONS = {
    "nf4": Scheme(partial(_four_bits, "nf4"), shards=True),
    "fp4": Scheme(partial(_four_bits, "fp4"), shards=True),
    "int8": Scheme(_eight_bits),
    "int8-weight": Scheme(_eight_bit_weights),
    "fp8-weight": Scheme(_float8_weights),
}


DECODED = ("fp8", "mxfp4", "compressed-tensors")
"""The stored quantizations that transformers can decode as it loads a checkpoint."""
IN_FP32 = ("bitsandbytes", "mxfp4")
"""The stored quantizations whose layers compute in fp32, too: mxfp4 is decoded without a GPU."""


def sharded_codes() -> list[str]:
    """List the quantizations whose codes can be divided over processes; each has all scales."""
    return [name for name, scheme in QUANTIZATIONS.items() if scheme.shards]


def remaining_quantization(quantize: str | None, folder: Path) -> str | None:
    """Return the quantization still to be applied to a checkpoint; None if it has it already.

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
    config = _stored_config(folder)
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
    """Refuse a checkpoint of which transformers would load the codes as if they were weights."""
    if stored == "bitsandbytes" or stored in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    raise ConfigError(
        f"the checkpoint {folder.name} is quantized by {stored}, which transformers "
        f"{transformers.__version__} cannot load",
        expected=f"one of {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}",
        hint="pip install --upgrade transformers",
    )


def _check_decodes(folder: Path, stored: str | None) -> None:
    """Refuse to decode a checkpoint that is not quantized, or in a way that stays as it is."""
    if stored in DECODED:
        return
    kind = f"is quantized by {stored}" if stored else "is not quantized"
    raise ConfigError(
        f"quantize={DEQUANTIZE}: the checkpoint {folder.name} {kind}",
        expected=f"a checkpoint in {', '.join(DECODED)}",
        hint="load it as it is, without quantize",
    )


def stored_quantization(folder: Path) -> str | None:
    """Return the library by which the checkpoint in a folder is quantized; None if it is not."""
    config = _stored_config(folder)
    return str(config.get("quant_method", "unknown")) if config else None


def _stored_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        return {}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:  # transformers explains it when it loads the model
        return {}
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    return quantization if isinstance(quantization, dict) else {}


def quantization_kind(config: Mapping[str, Any]) -> str:
    """Name the quantization that a transformers configuration describes.

    One of QUANTIZATIONS, or the method's own name if it is none of these.
    """
    if config.get("load_in_4bit"):
        return str(config.get("bnb_4bit_quant_type", "int4"))
    if config.get("quant_method") == "torchao":
        name = config["quant_type"]["default"]["_type"]
        return _TORCHAO.get(name, f"torchao-{name}")
    method = config.get("quant_method", "unknown")
    return "int8" if config.get("load_in_8bit") else str(getattr(method, "value", method))


def quantization_of(model: PreTrainedModel) -> str | None:
    """Return how a model is quantized, as `quantization_kind` does; None if it is not."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    return quantization_kind(config if isinstance(config, dict) else config.to_dict())


def cpu_note(model: PreTrainedModel) -> str:
    """Return what a user should be told of a model whose quantization is slow on its device."""
    kind = quantization_of(model)
    if kind is None or model.device.type != "cpu":
        return ""
    if QUANTIZATION_LIBRARIES.get(kind, ("", ""))[0] != "bitsandbytes":
        return ""
    return f"{kind} saves memory; on a CPU it can be several times slower than fp32"


# The casts of each call; a kernel that is optional, and that `keep_4bit_layout` leaves unused.
_TALKATIVE = ("autograd._functions", "backends.cpu.ops")


def quiet_bitsandbytes() -> None:
    """Let bitsandbytes print errors only; it is imported by what loads a backbone with it."""
    for name in _TALKATIVE:
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)


def loading_options(
    auto: Any, folder: Path, options: dict[str, Any], quantize: str | None
) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load a quantized backbone, or decode it.

    To find newly initialized parameters, the model is first made on the meta device, which reads no
    weights. The given options have `dtype`.
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
    """Make a checkpoint that transformers has decoded a plain model of one dtype, in place.

    What bitsandbytes left as it is has one dtype, too.

    transformers decodes FP8 and MXFP4 where they have no kernels, as on a CPU: to the dtype of
    `from_pretrained`, while all other tensors keep that of the file. `save_pretrained` would encode
    the weights again, without a configuration that says so.
    """
    stored, coded = stored_quantization(folder), quantization_of(model) is not None
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
    """Return the paths of modules not to quantize: head, output layer, newly initialized."""
    with MODEL_LOCK:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map="meta",
            ignore_mismatched_sizes=True,  # codes have other shapes than values
            output_loading_info=True,
        )
    output = model.get_output_embeddings()
    paths = {key.rpartition(".")[0] for key in info["missing_keys"]}
    paths |= {path for path, module in model.named_modules() if module is output}
    if output is None and model.base_model is not model:
        paths |= {name for name, child in model.named_children() if child is not model.base_model}
    return paths - {""} or {"lm_head"}  # transformers replaces an empty list by its own
