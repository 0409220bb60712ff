"""Pipelines of diffusers as one module: the parts that LoRA files of such pipelines adapt.

    unet, transformer      what removes the noise
    text_encoder, ...      what reads the prompt

A pipeline is no module, but has modules. `parts_of` returns those of them that the pipeline's class
names as loadable, in one `ModuleDict`: their paths begin with the name of the part, as in the files
of diffusers. The pipeline itself is not changed.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeGuard

from torch import nn

_PARTS: weakref.WeakKeyDictionary[Any, nn.ModuleDict] = weakref.WeakKeyDictionary()
_LOADABLE = "_lora_loadable_modules"  # of the class of a pipeline


class PipelineParts(nn.ModuleDict):
    """The modules of a pipeline that adapters can be at.

    Args:
        pipeline: the pipeline.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(_modules_of(pipeline))
        self.kind = type(pipeline)


def is_pipeline(thing: object) -> TypeGuard[Any]:
    """Return whether an object is a pipeline of diffusers that reads LoRA files."""
    return not isinstance(thing, nn.Module) and isinstance(getattr(thing, _LOADABLE, None), list)


def loadable_in(pipeline: Any) -> tuple[str, ...]:
    """Return the names of the parts that a pipeline may have."""
    return tuple(getattr(pipeline, _LOADABLE))


def parts_of(pipeline: Any) -> nn.ModuleDict:
    """Return the parts of a pipeline; the same object as long as it has the same parts."""
    known = _PARTS.get(pipeline)
    if known is None or dict(known.items()) != _modules_of(pipeline):
        _PARTS[pipeline] = known = PipelineParts(pipeline)
    return known


def _modules_of(pipeline: Any) -> dict[str, nn.Module]:
    found = {name: getattr(pipeline, name, None) for name in loadable_in(pipeline)}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def as_module(thing: Any) -> Any:
    """Return the parts of a pipeline, and anything else as it is."""
    return parts_of(thing) if is_pipeline(thing) else thing
