"""Serve adapters from one process: requests of any adapters, in batches that they share.

There is no protocol here: `Engine` takes inputs and returns futures. It knows no task or method:
what a row and a prediction are belongs in tasks/, which rows go through which adapter in adapters/.
Texts are generated in generation/.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterhub.serving.engine import ServingEngine as Engine
    from adapterhub.serving.generation.request import GenerationOptions

__all__ = ["Engine", "GenerationOptions"]
_PLACES = {
    "Engine": ("engine", "ServingEngine"),
    "GenerationOptions": ("generation.request", "GenerationOptions"),
}


def __getattr__(name: str) -> Any:
    """Import the engine where it is needed: vLLM imports this room in each of its processes."""
    if name not in _PLACES:
        raise AttributeError(name)
    module, attribute = _PLACES[name]
    return getattr(import_module(f"adapterhub.serving.{module}"), attribute)
