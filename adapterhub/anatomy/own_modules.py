"""The modules of a backbone without those of adapters, and paths of a family row among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

# Buffers that training changes, by their usual names.
_STATISTICS = frozenset({"cluster_size", "embed_avg", "embedding_avg", "num_batches_tracked"})
_AVERAGES = ("running_", "ema_", "moving_")
CHILD = "adapterhub"  # the name of the one child module that a host has while adapters are attached


def own_modules(model: nn.Module, *, every_use: bool = False) -> list[tuple[str, nn.Module]]:
    """List the modules of a model with their paths, as `named_modules` does, without slots.

    `every_use` lists a module that has several paths under each of them.
    """
    found: list[tuple[str, nn.Module]] = []
    _collect(model, "", every_use, set(), found)
    return found


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module changes buffers while it trains.

    They are the averages of a batch norm or of a codebook, or the vectors of a spectral norm, which
    torch keeps in a parametrization, and before that in a hook.
    """
    buffers = (name for name, buffer in module._buffers.items() if buffer is not None)
    if any(name in _STATISTICS or name.startswith(_AVERAGES) for name in buffers):
        return True
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Keep buffers as they are inside: to read a weight with a spectral norm changes them."""
    training = [m for m in model.modules() if m.training and has_statistics(m)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def parameter_at(module: nn.Module, path: str) -> nn.Parameter | None:
    """Return the parameter of a module at a path; None if there is none."""
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner)._parameters.get(name)


def copy_with(module: Any, parameters: Mapping[str, Any], cls: type | None = None) -> Any:
    """Return a shallow copy of a module with other objects in place of some parameters.

    The module itself stays as it is, since other threads may compute with it. A path, such as
    `out_proj.weight`, is of a parameter of a child, which is copied likewise. The copy is of the
    class `cls`, by default of the module's own.
    """
    copied: Any = object.__new__(cls or type(module))
    vars(copied).update(vars(module))
    own = {name: value for name, value in parameters.items() if "." not in name}
    vars(copied)["_parameters"] = {**module._parameters, **own}
    inside: dict[str, dict[str, Any]] = {}
    for name in parameters.keys() - own.keys():
        child, _, rest = name.partition(".")
        inside.setdefault(child, {})[rest] = parameters[name]
    changed = {name: copy_with(module._modules[name], each) for name, each in inside.items()}
    vars(copied)["_modules"] = {**module._modules, **changed}
    return copied


def slots_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the slots of a model, without the modules that they hold."""
    for _, module in own_modules(model):
        if (slot := module._modules.get(CHILD)) is not None:
            yield slot


def _collect(
    module: nn.Module,
    path: str,
    every_use: bool,
    seen: set[int],
    found: list[tuple[str, nn.Module]],
) -> None:
    """Append a module and those below it, each before its children."""
    if not every_use and id(module) in seen:
        return
    seen.add(id(module))
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None and name != CHILD:
            _collect(child, f"{path}.{name}" if path else name, every_use, seen, found)


def join(*parts: str) -> str:
    """Join parts, some of which may be empty, into a module path."""
    return ".".join(p for p in parts if p)


def layer_paths(base: nn.Module, spec: str) -> list[str]:
    """List the paths of a stack's layers; empty if the model does not have the stack."""
    paths = [""]
    for name in spec.split(".*."):
        lists = [join(path, name) for path in paths]
        paths = [f"{path}.{number}" for path in lists for number in range(_length(base, path))]
    return paths


def _length(base: nn.Module, path: str) -> int:
    module = _get(base, path)
    return len(module) if isinstance(module, nn.ModuleList | nn.Sequential) else 0


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def first_existing(layer: nn.Module, spec: str) -> str | None:
    """Return the first of the `|`-separated paths that exists in the layer."""
    return next((path for path in spec.split("|") if has_path(layer, path)), None)


def has_path(layer: nn.Module, path: str) -> bool:
    """Return whether a module exists, or both of `a>b`."""
    return all(_get(layer, end) is not None for end in path.split(">"))
