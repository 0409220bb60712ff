"""`adapterhub diff`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from adapterhub.cli._format import print_json, print_table, say
from adapterhub.cli._options import (
    as_json_option,
    backbone_option,
    registry_option,
    require_signature_option,
)
from adapterhub.files.shown_table import ShownTable

if TYPE_CHECKING:
    from adapterhub.files.compare import TensorDifference
    from adapterhub.files.native import Saved

_MOST_TENSORS = 12  # rows with the largest differences
_MOST_TEXT = 40  # characters of a value


@click.command("diff")
@click.argument("references", nargs=-1, metavar="ADAPTER ADAPTER...")
@backbone_option
@registry_option
@require_signature_option
@as_json_option
def command(
    references: tuple[str, ...], backbone: str | None, registry: str | None, as_json: bool
) -> None:
    """Show in what adapters differ from the first: options, data, scores and tensors.

    Each ADAPTER is a run folder, an adapter folder or a published name. The distance of two tensors
    is the norm of their difference, relative to the norm of the first.
    """
    from adapterhub.files.native import Saved
    from adapterhub.registry.pull import pull

    if len(references) < 2:
        raise click.UsageError("Missing argument 'ADAPTER': two are compared.")
    folders = [pull(r, backbone=backbone, registry=registry) for r in references]
    first, *others = map(Saved.at, folders)
    for number, (reference, second) in enumerate(zip(references[1:], others, strict=True)):
        if number and not as_json:
            say("")
        _print_differences((references[0], reference), first, second, as_json=as_json)


def _print_differences(
    references: tuple[str, str],
    first: Saved,
    second: Saved,
    *,
    as_json: bool,
) -> None:
    from adapterhub.files.compare import field_row, manifest_differences, tensor_differences

    fields = manifest_differences(first.manifest, second.manifest)
    tensors = tensor_differences(first, second)
    if as_json:
        records = {name: vars(difference) for name, difference in tensors.items()}
        print_json({"adapters": references, "fields": fields, "tensors": records})
        return
    if fields:
        rows = [field_row(path, values, _MOST_TEXT) for path, values in fields.items()]
        print_table(ShownTable(["field", *references], rows))
    _print_tensors(references, tensors)


def _print_tensors(references: tuple[str, str], tensors: dict[str, TensorDifference]) -> None:
    shared = {n: t for n, t in tensors.items() if t.first is not None and t.second is not None}
    differing = {name: t for name, t in shared.items() if t.distance != 0}
    names = sorted(differing, key=lambda name: -_order(differing[name]))
    if names:
        rows = [[name, *_cells(differing[name])] for name in names[:_MOST_TENSORS]]
        print_table(ShownTable(["tensor", "shape", "distance"], rows))
    if len(names) > _MOST_TENSORS:
        say(f"and {len(names) - _MOST_TENSORS} more tensors that differ (use --json)")
    say(f"{len(shared) - len(names)} of {len(shared)} tensors that both have are equal")
    for reference, side in zip(references, ("second", "first"), strict=True):
        if count := sum(getattr(t, side) is None for t in tensors.values()):
            say(f"{count} {'tensors are' if count > 1 else 'tensor is'} only in {reference}")


def _order(difference: TensorDifference) -> float:
    return math.inf if difference.distance is None else difference.distance


def _cells(difference: TensorDifference) -> tuple[str, str]:
    first = _shape(difference.first)
    if difference.distance is None:
        return f"{first}, {_shape(difference.second)}", "other shape"
    return first, f"{difference.distance:.3g}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return " x ".join(map(str, shape or ())) or "one value"
