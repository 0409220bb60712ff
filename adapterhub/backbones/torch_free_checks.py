"""Checks of a backbone without libraries: its name, folder, dtype and quantization.

Commands run these checks before they import torch. Loading repeats them with the libraries, which
report problems in more detail.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from adapterhub.config.user_folders import is_file, is_folder, is_hub_id, is_local_name, is_there
from adapterhub.errors import BackboneError, ConfigError, unfetched_files, unknown

DTYPE_NAMES = ("fp32", "bf16", "fp16")
QUANTIZATION_LIBRARIES: Mapping[str, tuple[str, str]] = {
    "nf4": ("bitsandbytes", "quantized"),
    "fp4": ("bitsandbytes", "quantized"),
    "int8": ("bitsandbytes", "quantized"),
    "int8-weight": ("torchao", "torchao"),
    "fp8-weight": ("torchao", "torchao"),
}
"""The library of each quantization, and the extra of adapterhub that installs it."""
DEQUANTIZE = "dequantize"
"""Instead of a quantization: decode a checkpoint that is already quantized."""
DIFFUSERS = ("a pipeline or a model of diffusers", "diffusers", "diffusers")
"""The feature that needs diffusers, the library, and the extra that installs it."""
VECTOR_POOLINGS = ("cls", "mean", "last", "max", "mean_sqrt_len_tokens", "weightedmean")
"""Poolings of vectors; several joined by + are concatenated."""
PIPELINE_INDEX = "model_index.json"


def check_vector_pooling(text: str) -> str:
    """Check the name of a pooling of vectors, or several names joined by +.

    Raises:
        ConfigError: a pooling is unknown.
    """
    for name in text.split("+"):
        if name not in VECTOR_POOLINGS:
            raise unknown("pooling", name, VECTOR_POOLINGS)
    return text


_DTYPES = {
    **{name: name for name in DTYPE_NAMES},
    **{"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"},
}
_LEFT_OPEN = ("auto", "none", "null", "")


def dtype_name(dtype: object) -> str | None:
    """Return the short name of a dtype: `torch.bfloat16`, "torch.bfloat16", "bfloat16", "bf16".

    None and "auto" are the default.

    Raises:
        ConfigError: the dtype is not supported.
    """
    name = str(dtype).lower().removeprefix("torch.") if dtype is not None else "auto"
    if name in _LEFT_OPEN:
        return None
    if name not in _DTYPES:
        raise unknown("dtype", str(dtype)[:80], DTYPE_NAMES)
    return _DTYPES[name]


def check_location(backbone: str) -> None:
    """Check that a text is a folder, or can be a Hub id or the name of a local backbone.

    Raises:
        BackboneError: it is a file, or neither an existing folder nor a valid Hub id.
    """
    if is_folder(backbone) or (backbone.lower().endswith(".gguf") and is_file(backbone)):
        return
    if is_there(backbone):
        raise BackboneError(
            f"the backbone {backbone} is a file",
            expected="the folder of a transformers checkpoint, a .gguf file, or a Hub id",
        )
    if not (is_hub_id(backbone) or is_local_name(backbone)):
        raise BackboneError(
            f"no backbone {backbone!r}: the folder does not exist, and it is not a Hub id",
            expected="a folder, or a Hub id (owner/name)",
        )


def _inner_hint(folder: Path) -> str:
    """Suggest the one subfolder that has a checkpoint, if there is one."""
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    return f"--backbone {inner[0]}" if len(inner) == 1 else ""


def check_backbone_options(
    backbone: str, dtype: str | None = None, quantize: str | None = None
) -> None:
    """Check the options of a backbone before it is loaded.

    Raises:
        BackboneError: it is neither a folder with a checkpoint nor a possible Hub id.
        ConfigError: the dtype or quantization is unknown, or its library is not installed.
    """
    check_location(backbone)
    folder = Path(backbone)
    check_fetched(folder)
    is_here = is_folder(folder) and not (folder / PIPELINE_INDEX).is_file()
    if is_here and not (folder / "config.json").is_file():
        raise BackboneError(
            f"the folder {backbone} is not a backbone: it lacks config.json",
            expected="a transformers checkpoint: config.json, weights and tokenizer",
            hint=_inner_hint(folder),
        )
    dtype_name(dtype)
    if quantize is not None:
        check_quantization(quantize)


def check_fetched(folder: Path) -> None:
    """Refuse a folder with files that git-lfs has not fetched; accept any other path.

    Raises:
        BackboneError: files are missing.
    """
    pointers = unfetched_files(folder) if is_folder(folder) else []
    if pointers:
        raise BackboneError(
            f"{folder} has git-lfs pointers instead of files",
            offenders=pointers,
            hint=f"git -C {folder} lfs pull",
        )


def holds_diffusers(folder: Path) -> bool:
    """Return whether a folder contains a diffusers pipeline, or a model of one."""
    if (folder / PIPELINE_INDEX).is_file():
        return True
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the reader reports the problem
    return isinstance(config, dict) and "_class_name" in config and "model_type" not in config


def require(subject: str, library: str, extra: str) -> None:
    """Check that a library is installed, which a feature needs.

    Raises:
        ConfigError: the library is missing; the error has the command that installs it.
    """
    if not importlib.util.find_spec(library):
        raise ConfigError(
            f"{subject} needs {library}, which is not installed",
            hint=f'pip install "adapterhub[{extra}]"',
        )


def check_quantization(quantize: str) -> None:
    """Check that a quantization is known and its library installed.

    Raises:
        ConfigError: the quantization is unknown, or its library is missing.
    """
    if quantize == DEQUANTIZE:
        return
    if quantize not in QUANTIZATION_LIBRARIES:
        raise unknown("quantization", quantize, (*QUANTIZATION_LIBRARIES, DEQUANTIZE))
    library, extra = QUANTIZATION_LIBRARIES[quantize]
    require(f"quantize={quantize}", library, extra)
