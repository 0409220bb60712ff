"""Make diffusers pipelines and models from configurations: modules and sizes, no weights.

    model_index.json           the class of a pipeline, and the library and class of each part
    unet/config.json, ...      the configuration of a part
    config.json                the configuration of a single model, with its class `_class_name`

Classes are looked up by name in diffusers and transformers; code in a folder is never run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from torch import nn

from adapterhub.anatomy.backbone import is_pipeline, loadable_in
from adapterhub.backbones.checkpoint import BROKEN
from adapterhub.backbones.find import PACKAGED, is_gguf
from adapterhub.backbones.hub_network import guarded_hub
from adapterhub.backbones.quantized import quiet_bitsandbytes
from adapterhub.backbones.torch_free_checks import (
    DIFFUSERS,
    PIPELINE_INDEX,
    holds_diffusers,
    require,
)
from adapterhub.config.user_folders import is_local_name, is_there
from adapterhub.errors import BackboneError, did_you_mean
from adapterhub.status import MODEL_LOCK, quiet_loading

_CLASS = "_class_name"
_CONFIG = "config.json"
_WRITTEN = "the file as diffusers wrote it"
_LIBRARIES = ("diffusers", "transformers")


def diffusers_folder(backbone: str, revision: str | None = None) -> Path | None:
    """Return the folder of a diffusers pipeline or model; None for other backbones.

    For a Hub id, only configurations are downloaded.
    """
    folder = Path(backbone)
    if not is_there(folder):
        if is_local_name(backbone) or is_gguf(backbone) or backbone in PACKAGED:
            return None
        names = [PIPELINE_INDEX, _CONFIG, f"*/{_CONFIG}"]
        try:
            with guarded_hub():
                path = snapshot_download(backbone, revision=revision, allow_patterns=names)
        except (OSError, ValueError, HTTPError):
            return None  # loading a transformers model reports the problem
        folder = Path(path)
    return folder if holds_diffusers(folder) else None


def meta_diffusers(folder: Path) -> Any:
    """Make a diffusers pipeline with its parts, or a diffusers model, on the meta device.

    The pipeline has only its parts, so it cannot run.

    Raises:
        ConfigError: diffusers is not installed.
        BackboneError: a configuration is broken, or a class is unknown or not a model.
    """
    require(*DIFFUSERS)
    quiet_bitsandbytes()  # diffusers imports it
    with MODEL_LOCK, quiet_loading():
        if index := _read(folder / PIPELINE_INDEX):
            return _pipeline(folder, index)
        return _model(folder, "diffusers", _read(folder / _CONFIG).get(_CLASS))


def _pipeline(folder: Path, index: Mapping[str, Any]) -> Any:
    """Make a pipeline from its index; skip parts without a library and a class."""
    from diffusers import DiffusionPipeline

    kind = _class(folder, "diffusers", index.get(_CLASS), DiffusionPipeline)
    pipeline = object.__new__(kind)
    names = loadable_in(kind, index) if is_pipeline(pipeline) else ()
    listed = {name: index[name] for name in names if isinstance(index.get(name), list)}
    parts = {name: value for name, value in listed.items() if len(value) == 2 and all(value)}
    if not parts:
        models = sorted(path.parent for path in folder.glob(f"*/{_CONFIG}"))
        raise BackboneError(
            f"adapters cannot be attached to a {kind.__name__}: it has no parts for LoRA files",
            expected="a pipeline with a unet, a transformer or a text encoder, or one model",
            hint=f"adapterhub inspect {models[0]}" if models else "",
        )
    vars(pipeline).update({name: _model(folder / name, *parts[name]) for name in parts})
    return pipeline


def _read(file: Path) -> Mapping[str, Any]:
    """Read a JSON file; return {} if it does not exist.

    Raises:
        BackboneError: the file is broken.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BackboneError(f"{file} is not JSON: {error}", expected=_WRITTEN) from None
    if not isinstance(value, dict):
        raise BackboneError(f"{file} is not a JSON object", expected=_WRITTEN)
    return value


def _class(folder: Path, library: object, name: object, base: type) -> Any:
    """Return a class of a library by name.

    Raises:
        BackboneError: the library lacks the class, or it is not a subclass of `base`.
    """
    module = importlib.import_module(str(library)) if library in _LIBRARIES else None
    attribute = getattr(module, str(name), None)
    if not (isinstance(attribute, type) and issubclass(attribute, base)):
        near = did_you_mean(str(name), dir(module)) if module else ""
        raise BackboneError(
            f"{folder} is of a class that is not known here: {library}.{name}{near}",
            expected=f"a {base.__name__} of diffusers or transformers; code in a folder never runs",
        )
    return attribute


def _model(folder: Path, library: object, name: object) -> nn.Module:
    """Make a model from the configuration in a folder on the meta device."""
    kind = _class(folder, library, name, nn.Module)
    config = dict(_read(folder / _CONFIG))
    if not config:
        raise BackboneError(
            f"the folder {folder} has no {_CONFIG}",
            expected=f"the configuration of a {name}, as diffusers wrote it",
        )
    try:
        with torch.device("meta"):
            if library == "diffusers":
                model: nn.Module = kind.from_config(config)
            else:
                model = kind(kind.config_class.from_dict(config))
    except BROKEN as error:
        raise BackboneError(
            f"no {name} can be made of {folder / _CONFIG}: {type(error).__name__}: "
            f"{str(error)[:300]}",
            expected="the configuration of this class",
        ) from None
    return model.eval()
