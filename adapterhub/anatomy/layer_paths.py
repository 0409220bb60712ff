"""Paths of a family row, looked up in a model: those of the layers, and of modules in a layer."""

from __future__ import annotations

from torch import nn

from adapterhub.anatomy.sites import join


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
