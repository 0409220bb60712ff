"""Serve adapters from one process, with requests of any adapters in shared batches.

This room contains no protocol: `Engine` takes inputs and returns futures. It does not depend on a
task or method: rows and predictions are defined in tasks/, and the routing of rows through adapters
in adapters/. Texts are generated in generation/.
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
    """Import the engine on first use: vLLM imports this room in each of its processes."""
    if name not in _PLACES:
        raise AttributeError(name)
    module, attribute = _PLACES[name]
    return getattr(import_module(f"adapterhub.serving.{module}"), attribute)
