"""Weights that peft loads in place, and that modules tied to them get too.

If tokens were added to a model, peft saves its embedding and its output layer as they are:

    X.weight                     loaded into the module itself, unless X is a module to save
    X.original_module.weight     loaded into the module that the saved one replaces
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder

_REPLACED = ".original_module"
_WEIGHT = ".weight"


def spread_tied_weights(files: PeftFiles, finder: ModuleFinder) -> PeftFiles:
    """Give tied modules without a weight of their own in the checkpoint the one loaded in place.

    Args:
        files: the checkpoint.
        finder: finds its modules in the model.

    Returns:
        The checkpoint with those weights, and without replaced modules.
    """
    tensors = {name: t for name, t in files.tensors.items() if f"{_REPLACED}." not in name}
    for name, tensor in files.tensors.items():
        module, dot, parameter = name.rpartition(".")
        if f"{dot}{parameter}" != _WEIGHT or ".lora_" in name or not _is_in_place(module, files):
            continue
        path = finder.find(module.removesuffix(_REPLACED))
        for other in finder.tied(path or ""):
            _add(tensors, other, tensor)
    return replace(files, tensors=tensors)


def _is_in_place(module: str, files: PeftFiles) -> bool:
    if module.endswith(_REPLACED):
        return True
    saved = files.config["modules_to_save"] or ()
    return not any(module.endswith(name) for name in saved)


def _add(tensors: dict[str, Tensor], path: str, weight: Tensor) -> None:
    """Add the weight of a module, adapted or not, unless the checkpoint has one."""
    own = [name for name in tensors if name.startswith(f"{path}.")]
    layer = ".base_layer" if any(".lora_" in name for name in own) else ""
    if not any(name.endswith(_WEIGHT) and ".lora_" not in name for name in own):
        tensors[f"{path}{layer}{_WEIGHT}"] = weight
