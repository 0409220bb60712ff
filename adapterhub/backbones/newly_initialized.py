"""Parameters of a loaded model that its checkpoint does not have, such as a new task head."""

from __future__ import annotations

from transformers import PreTrainedModel

NEWLY_INITIALIZED = "_adapterhub_fresh"  # the attribute of a model with their paths


def newly_initialized(model: PreTrainedModel) -> frozenset[str]:
    """Return the paths of the newly initialized parameters; empty for a model loaded elsewhere."""
    paths: frozenset[str] = getattr(model, NEWLY_INITIALIZED, frozenset())
    return paths
