"""Pipelines of diffusers as one module: the parts that LoRA files of such pipelines adapt.

    unet, transformer, prior, decoder    what removes the noise
    text_encoder, ...                    what reads the prompt

A pipeline is no module, but has modules. `parts_of` returns those of them that the pipeline's class
names as loadable, in one `ModuleDict`: their paths begin with the name of the part, as in the files
of diffusers. A class that names none (PixArt, DiT), or nothing that removes the noise (PRX), has
the parts above. The pipeline itself is not changed.

Other modules, such as a VAE, a ControlNet or a T5 that no such file has, are no parts: they are not
adapted by default, may be exchanged, and an adapter is saved for the numbers of all parts. Each can
have adapters of its own.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from torch import nn

_PARTS: weakref.WeakKeyDictionary[Any, PipelineParts] = weakref.WeakKeyDictionary()
_LOADABLE = "_lora_loadable_modules"  # of the class of a pipeline
_INSIDE = "_orig_mod"  # of a compiled module: the module
_TEXT = "text_encoder"
_USUAL = re.compile(rf"(unet|transformer|prior|decoder|{_TEXT})(_\d)?")


class PipelineParts(nn.ModuleDict):
    """The modules of a pipeline that adapters can be at.

    Args:
        pipeline: the pipeline.

    Attributes:
        kind: the class of the pipeline.
        compiled: the names of the parts in whose place the pipeline has `torch.compile(part)`.
        others: the names of the pipeline's other modules.
        compute: what calling the parts as a model computes; None: a pipeline is called itself.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(_modules_of(pipeline))
        self.kind = type(pipeline)
        self.compiled: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self.compute: Callable[..., Any] | None = None

    def forward(self, **inputs: Any) -> Any:
        """Compute what `compute` does."""
        if self.compute is None:
            raise TypeError(f"call the {self.kind.__name__} itself: its parts have no forward")
        return self.compute(**inputs)

    def __reduce__(self) -> tuple[Callable[[type], PipelineParts], tuple[type], dict[str, Any]]:
        # A copy of what is inside, which knows these parts, asks for their kind first.
        return _without_modules, (self.kind,), vars(self)


def is_pipeline(thing: object) -> TypeGuard[Any]:
    """Return whether an object is a pipeline of diffusers."""
    if isinstance(thing, nn.Module | type):
        return False
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(thing).__mro__}
    return "diffusers.DiffusionPipeline" in kinds


def loadable_in(kind: type, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names of a pipeline's modules that are parts, by the class of it."""
    present = list(names)
    loadable = tuple(getattr(kind, _LOADABLE, ()))
    if any(name in present for name in loadable if not name.startswith(_TEXT)):
        return loadable
    usual = (name for name in present if _USUAL.fullmatch(name))
    return tuple(dict.fromkeys((*loadable, *usual)))


def parts_of(pipeline: Any) -> PipelineParts:
    """Return the parts of a pipeline; the same object as long as it has the same parts.

    A compiled part stands for the one inside, whose hooks it calls.
    """
    modules = _modules_of(pipeline)
    known = _PARTS.get(pipeline) or _of_a_copy(modules)
    if known is None or dict(known.items()) != modules:
        known = PipelineParts(pipeline)
    _PARTS[pipeline] = known
    known.compiled = tuple(name for name in modules if hasattr(getattr(pipeline, name), _INSIDE))
    own = (name for name, value in vars(pipeline).items() if isinstance(value, nn.Module))
    known.others = tuple(name for name in own if name not in modules)
    return known


def _modules_of(pipeline: Any) -> dict[str, nn.Module]:
    names = loadable_in(type(pipeline), vars(pipeline))
    found = {name: getattr(pipeline, name, None) for name in names}
    found = {name: getattr(module, _INSIDE, module) for name, module in found.items()}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def _without_modules(kind: type) -> PipelineParts:
    made = PipelineParts.__new__(PipelineParts)
    vars(made)["kind"] = kind
    return made


def _of_a_copy(modules: Mapping[str, nn.Module]) -> PipelineParts | None:
    """Return the parts that are copied with the adapters of a pipeline; None without adapters."""
    known = (getattr(m.__dict__.get("save_pretrained"), "owner", None) for m in modules.values())
    return next((parts for parts in known if isinstance(parts, PipelineParts)), None)


def as_module(thing: Any) -> Any:
    """Return the parts of a pipeline, and anything else as it is."""
    return parts_of(thing) if is_pipeline(thing) else thing
