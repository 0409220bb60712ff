"""What adapters cannot be attached to, each with the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from adapterhub.anatomy.backbone import (
    Backbone,
    PipelineParts,
    is_pipeline,
    is_transformers,
    own_modules,
)
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.errors import AttachError
from adapterhub.methods.common.base import METHODS

_LOAD = "model, tokenizer = load_backbone({})"
_AGAIN = f"load the backbone again: {_LOAD.format('ID')}"
_CONVERTED = "; a saved adapter of it can be loaded here: load(model, FOLDER)"


class AdaptedModel(NamedTuple):
    """A model with adapters: their names, and its parameters as they were before."""

    backbone: Backbone
    names: Iterable[str]
    parameters: Iterable[nn.Parameter]


def require_model(model: object) -> None:
    """Refuse what is no module, or only wraps a model; `check_model` refuses a compiled one.

    Raises:
        AttachError: something else; the error says what to type instead.
    """
    if is_transformers(model) or isinstance(model, torch._dynamo.OptimizedModule):
        return
    if is_pipeline(model) or (isinstance(model, nn.Module) and not _only_wraps(model)):
        return
    wraps = ", but wraps one" if isinstance(model, nn.Module) else ", nor another module"
    raise AttachError(
        f"{type(model).__name__} is not a model of transformers{wraps}",
        expected="a model of transformers, or another torch.nn.Module",
        hint=remedy(model),
    )


def required_backbone(model: nn.Module) -> Backbone:
    """Return the backbone of a model of transformers, or of another module; refuse other things.

    Raises:
        AttachError: as `require_model`.
    """
    require_model(model)
    return Backbone.of(model)


def _only_wraps(module: nn.Module) -> bool:
    """Return whether a module has a model of transformers inside, and no parameters beside it."""
    inside = next((m for m in module.modules() if is_transformers(m)), None)
    if inside is None or _defined_in("peft", type(module)):
        return inside is not None
    own = set(map(id, inside.parameters()))
    return all(id(parameter) in own for parameter in module.parameters())


def check_model(backbone: Backbone) -> None:
    """Refuse what is not a model of transformers, and a compiled, sharded or adapted one.

    Adapters of another library would be part of the outputs, and not of the backbone's identity.

    Raises:
        AttachError: which of them it is.
    """
    own = backbone.module
    if isinstance(own, PipelineParts) and own.compiled:
        first = f"pipe.{own.compiled[0]}"
        raise AttachError(
            "parts of the pipeline are compiled: they would silently ignore new hooks",
            offenders=own.compiled,
            hint=f"{first} = {first}._orig_mod; attach; torch._dynamo.reset(); then {first} = "
            f"torch.compile({first})",
        )
    if isinstance(own, nn.Module) and backbone.compiled:
        raise AttachError(
            "the model is compiled: it would silently ignore new hooks",
            hint="attach first, then torch.compile(model)",
        )
    require_model(own)
    if library := library_inside(own):
        raise AttachError(
            f"the model has adapters of the library {library} in its layers",
            expected="the backbone as it was loaded",
            hint=remedy_inside(library),
        )
    if backbone.sharded and tensor_parallel(own) is None:
        raise AttachError(
            "the model is sharded: new parameters would differ between the processes",
            hint="attach first, then fully_shard(model)",
        )


def refuse_shared(backbone: Backbone, others: Iterable[AdaptedModel]) -> None:
    """Refuse a model that shares modules or parameters with another one that has adapters.

    Raises:
        AttachError: which adapters the other one has.
    """
    strangers = [other for other in others if other.backbone.module is not backbone.module]
    own = set(map(id, _parts(backbone.module))) if strangers else set()
    for other in strangers:
        parts = (*_parts(other.backbone.module), *other.parameters)
        if not own.isdisjoint(map(id, parts)):
            raise AttachError(
                f"this {backbone.name} shares modules with a {other.backbone.name} that has "
                "adapters",
                offenders=map(repr, other.names),
                expected="models of which only one has adapters",
                hint="detach them there first, or attach to a copy: copy.deepcopy(model)",
            )


def _parts(model: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    """Yield parameters, and the modules that hold tensors; models share others, as activations."""
    for _, module in own_modules(model):
        if module._parameters or module._buffers:
            yield module
            yield from (p for p in module._parameters.values() if p is not None)


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
        return next((name for name, m in modules if is_transformers(m)), None)
    return "model" if is_transformers(getattr(thing, "model", None)) else None
