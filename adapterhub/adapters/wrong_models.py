"""What is given in place of a model by mistake, each with what to type instead."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.anatomy.own_modules import own_modules
from adapterhub.methods._base import METHODS

_LOAD = "model, tokenizer = load_backbone({})"
_AGAIN = f"load the backbone again: {_LOAD.format('ID')}"
_CONVERTED = "; a saved adapter of it can be loaded here: load(model, FOLDER)"


def remedy(thing: object) -> str:
    """Return what to type instead, for something that is not a model of transformers."""
    if isinstance(thing, str):
        name = thing.partition("(")[0]
        return f"attach(model, {thing!r})" if name in METHODS else _LOAD.format(repr(thing))
    if isinstance(thing, PreTrainedTokenizerBase):
        return "attach(model, METHOD, tokenizer=tokenizer)"
    if _defined_in("peft", type(thing)) and isinstance(thing, nn.Module):
        return _without_peft(thing) + _CONVERTED
    if path := _path_of_model(thing):
        return f"use the model inside: model.{path}; attach first, then wrap"
    return _LOAD.format("ID")


def library_inside(model: nn.Module) -> str | None:
    """Return the library that has put its own adapters into the layers of a model, or None."""
    kinds = {type(module) for _, module in own_modules(model)}
    libraries = ("peft", "adapters")
    return next((lib for lib in libraries if any(_defined_in(lib, k) for k in kinds)), None)


def remedy_inside(library: str) -> str:
    """Return what to type for a model with the adapters of another library in its layers."""
    unload = "model = peft_model.unload(), or " if library == "peft" else ""
    return f"{unload}{_AGAIN}{_CONVERTED}"


def _without_peft(model: Any) -> str:
    if _defined_in("peft", type(model.base_model)):
        return "unwrap it, without its adapters: model = model.unload()"
    if library_inside(model.get_base_model()):  # a task head that it has wrapped
        return _AGAIN
    return "unwrap it, without its adapters: model = model.get_base_model()"


def _defined_in(library: str, kind: type) -> bool:
    return any(cls.__module__.partition(".")[0] == library for cls in kind.__mro__)


def _path_of_model(thing: Any) -> str | None:
    """Return where a wrapper, a pipeline or a trainer has its model."""
    if isinstance(thing, nn.Module):
        modules = thing.named_modules()
        return next((name for name, m in modules if isinstance(m, PreTrainedModel)), None)
    return "model" if isinstance(getattr(thing, "model", None), PreTrainedModel) else None
