"""Serve adapters from one process: requests of any adapters, in batches that they share.

There is no protocol here: `Engine` takes inputs and returns futures. It knows no task or method:
what a row and a prediction are belongs in tasks/, which rows go through which adapter in adapters/.
"""

from __future__ import annotations

from adapterhub.serving.engine import ServingEngine as Engine
from adapterhub.serving.generation import GenerationOptions

__all__ = ["Engine", "GenerationOptions"]
