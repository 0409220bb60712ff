"""Pipelines of diffusers as one module: the parts that LoRA files of such pipelines adapt.

    unet, transformer      what removes the noise
    text_encoder, ...      what reads the prompt

A pipeline is no module, but has modules. `parts_of` returns those of them that the pipeline's class
names as loadable, in one `ModuleDict`: their paths begin with the name of the part, as in the files
of diffusers. Classes that read no such files (PixArt, DiT) name none, and have the parts above. The
pipeline itself is not changed.
"""

from __future__ import annotations

import re
import weakref
from typing import Any, TypeGuard

from torch import nn

_PARTS: weakref.WeakKeyDictionary[Any, nn.ModuleDict] = weakref.WeakKeyDictionary()
_LOADABLE = "_lora_loadable_modules"  # of the class of a pipeline
_USUAL = re.compile(r"(unet|transformer|text_encoder)(_\d)?")


class PipelineParts(nn.ModuleDict):
    """The modules of a pipeline that adapters can be at.

    Args:
        pipeline: the pipeline.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(_modules_of(pipeline))
        self.kind = type(pipeline)


def is_pipeline(thing: object) -> TypeGuard[Any]:
    """Return whether an object is a pipeline of diffusers."""
    if isinstance(thing, nn.Module | type):
        return False
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(thing).__mro__}
    return "diffusers.DiffusionPipeline" in kinds


def parts_of(pipeline: Any) -> nn.ModuleDict:
    """Return the parts of a pipeline; the same object as long as it has the same parts."""
    known = _PARTS.get(pipeline)
    if known is None or dict(known.items()) != _modules_of(pipeline):
        _PARTS[pipeline] = known = PipelineParts(pipeline)
    return known


def _modules_of(pipeline: Any) -> dict[str, nn.Module]:
    usual = [name for name in pipeline.config if _USUAL.fullmatch(name)]
    names = getattr(pipeline, _LOADABLE, usual)
    found = {name: getattr(pipeline, name, None) for name in names}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def as_module(thing: Any) -> Any:
    """Return the parts of a pipeline, and anything else as it is."""
    return parts_of(thing) if is_pipeline(thing) else thing
