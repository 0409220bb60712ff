"""Parameters of a loaded model that its checkpoint does not have, such as a new task head."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

NEWLY_INITIALIZED = "_adapterhub_fresh"  # the attribute of a model with their paths
_DRAWN = "_is_hf_initialized"  # with which transformers marks what it has initialized


def newly_initialized(model: PreTrainedModel) -> frozenset[str]:
    """Return the paths of the newly initialized parameters; empty for a model loaded elsewhere."""
    paths: frozenset[str] = getattr(model, NEWLY_INITIALIZED, frozenset())
    return paths


def initialize_again(model: PreTrainedModel) -> None:
    """Draw the newly initialized parameters anew, with the numbers that loading would draw.

    The model is without adapters.
    """
    new = newly_initialized(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        setattr(tensor, _DRAWN, name not in new)
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        setattr(module, _DRAWN, not any(name.startswith(inside) for name in new))
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in new}
    devices = {name: model.get_parameter(name).device for name in new}
    for owner in owners.values():  # loading draws on the processor
        owner.to("cpu")
    with torch.no_grad():
        model.initialize_weights()
    for name, owner in owners.items():
        owner.to(devices[name])
