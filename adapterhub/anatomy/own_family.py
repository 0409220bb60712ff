"""Rows of the user's own: for all models of a type in this process, or for one model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.families import FAMILIES
from adapterhub.anatomy.family import Family, Stack
from adapterhub.anatomy.family_file import FamilySource, read_family
from adapterhub.anatomy.layer_paths import has_path, layer_paths
from adapterhub.errors import BackboneError, ConfigError, did_you_mean

_ROW = "_adapterhub_family"


def register_family(family: FamilySource, *, replace: bool = False) -> Family:
    """Add a row for the models of its types, which are loaded after this or have no adapters yet.

    Args:
        family: a `Family`, a mapping of its fields, or a YAML file.
        replace: replace the rows of these types.

    Raises:
        ConfigError: the row is not valid, or there is another row for one of its types.
    """
    row = read_family(family)
    taken = [t for t in row.model_types if FAMILIES.get(t, row) != row]
    if taken and not replace:
        raise ConfigError(
            f"there is a row for {', '.join(taken)} already",
            hint="register_family(..., replace=True), or load_backbone(..., family=...) for one "
            "model",
        )
    FAMILIES.update(dict.fromkeys(row.model_types, row))
    return row


def use_family(model: PreTrainedModel, family: FamilySource) -> None:
    """Use a row for one model, which has no adapters.

    Raises:
        ConfigError: the row is not valid.
        BackboneError: it is for another type of model, or names modules that the model lacks.
    """
    row = read_family(family)
    model_type = model.config.model_type
    if model_type not in row.model_types:
        raise BackboneError(
            f"the row is for {', '.join(row.model_types)}, the model is of type {model_type}",
            hint=f"model_types: [{model_type}]",
        )
    if missing := list(_missing(model.base_model, row)):
        raise BackboneError(
            f"the row of {model_type} names modules that {type(model).__name__} lacks",
            offenders=missing,
            hint="adapterhub inspect MODEL --draft-family writes the row of what was found",
        )
    setattr(model, _ROW, row)


def forget_family(model: PreTrainedModel) -> None:
    """Use the row of its type for a model again, or none."""
    vars(model).pop(_ROW, None)


def own_family(model: PreTrainedModel) -> Family | None:
    """Return the row that `use_family` gave to a model, if any."""
    row: Family | None = getattr(model, _ROW, None)
    return row


def _missing(base: nn.Module, row: Family) -> Iterator[str]:
    """Yield the modules that a row names, but no layer of a model has."""
    paths = [path for path, _ in base.named_modules()]
    for stack in row.stacks:
        layers = [base.get_submodule(path) for path in layer_paths(base, stack.layers)]
        if not layers:
            lists = [p for p, m in base.named_modules() if isinstance(m, nn.ModuleList)]
            near = did_you_mean(stack.layers, lists)
            yield f"{stack.name}: no module list {stack.layers!r}{near}"
        else:
            yield from _missing_in(layers, stack)
        if stack.root and stack.root not in paths:
            yield f"{stack.name}: root {stack.root!r}{did_you_mean(stack.root, paths)}"
    yield from (f"below: {p!r}{did_you_mean(p, paths)}" for p in row.below if p not in paths)


def _missing_in(layers: list[nn.Module], stack: Stack) -> Iterator[str]:
    inside = list({path: None for layer in layers for path, _ in layer.named_modules()})
    for number, sites in ((None, stack.sites), *stack.own.items()):
        for role, spec in sites.items():
            for path in spec.split("|"):
                if not any(has_path(layer, path) for layer in layers):
                    where = role if number is None else f"own.{number}.{role}"
                    yield f"{stack.name}.{where}: {path!r}{did_you_mean(path, inside)}"
