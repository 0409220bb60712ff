"""Serve adapters from one process: requests of any adapters, in batches that they share.

There is no protocol here: `Engine` takes inputs and returns futures. It knows no task or method:
what a row and a prediction are belongs in tasks/, which rows go through which adapter in adapters/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterhub.serving.engine import ServingEngine as Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Import the engine where it is needed: vLLM imports this room in each of its processes."""
    if name != "Engine":
        raise AttributeError(name)
    from adapterhub.serving.engine import ServingEngine

    return ServingEngine
