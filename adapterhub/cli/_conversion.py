"""Conversion of adapters to LoRA, for `adapterhub convert` and `adapterhub resize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_facts, print_json, print_table
from adapterhub.cli._options import (
    as_json_option,
    backbone_place_option,
    registry_option,
    require_signature_option,
)
from adapterhub.errors import ConfigError, MergeError
from adapterhub.files.shown_table import ShownTable
from adapterhub.status import doing, reading

if TYPE_CHECKING:
    from adapterhub.adapters.adapter import Adapter


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("reference", metavar="ADAPTER"),
    click.option("--rank", type=click.IntRange(1), help="The largest rank."),
    click.option(
        "--energy",
        type=float,
        help="The share of each update's squared singular values that is kept, such as 0.99.",
    ),
    click.option("--eval", "data", metavar="FILE", help="Labelled data to evaluate both on."),
    backbone_place_option,
    registry_option,
    require_signature_option,
    as_json_option,
)


def conversion_options(command: Any) -> Any:
    """Add the argument and the options of `write_as_lora`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def print_ranks(
    reference: str, *, backbone: str | None, registry: str | None, as_json: bool
) -> None:
    """Print the share of an adapter's update that each rank would keep."""
    from adapterhub.registry.pull import pull_verified

    pull_verified(reference, registry=registry)
    with doing("loading torch"):
        from adapterhub.inference.open import load_for_merging
        from adapterhub.merging.combine import update_ranks

    adapter, _ = load_for_merging(reference, backbone, registry=registry)
    ranks = update_ranks(adapter)
    if ranks is None:
        raise MergeError(
            f"{adapter.name!r} has no update of a rank of its own",
            expected="trained low-rank products at projections, and nothing else",
            hint=f"adapterhub convert {reference} --output DIR --energy 0.99",
        )
    sizes = [2**power for power in range((ranks.rank - 1).bit_length())]
    kept = {size: ranks.kept(size) for size in (*sizes, ranks.rank)}
    if as_json:
        print_json({"rank": ranks.rank, "kept": {str(r): share for r, share in kept.items()}})
        return
    rows = [(str(size), f"{share:.1%}") for size, share in kept.items()]
    print_table(ShownTable(("rank", "of the update"), rows, numbers=True))


def write_as_lora(
    reference: str,
    output: str,
    rank: int | None,
    energy: float | None,
    data: str | None,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Write an adapter as a LoRA, and print the loss of the conversion."""
    from adapterhub.backbones.torch_free_checks import check_backbone_options
    from adapterhub.files.atomic import check_place
    from adapterhub.registry.pull import pull_verified

    if energy is not None and not 0 < energy <= 1:
        raise ConfigError(f"--energy {energy}", expected="more than 0, at most 1")
    if backbone:
        check_backbone_options(backbone)
    check_place(Path(output), overwrite=False, replaceable=())
    pull_verified(reference, registry=registry)
    with doing("loading torch"):
        from adapterhub.inference.open import load_for_merging
        from adapterhub.merging.combine import to_lora

    adapter, _ = load_for_merging(reference, backbone, registry=registry)
    with doing("converting"):
        lora = to_lora(
            adapter.model, adapter.name, rank=rank, energy=energy, new_name=f"{adapter.name}-lora"
        )
        lora.save(output)
        facts = _facts(adapter, lora)
    if data is not None:
        places = {"before": reference, "after": output}
        facts["scores"] = {
            when: _scores(place, data, backbone, registry) for when, place in places.items()
        }
    if as_json:
        print_json({"output": output, **facts})
        return
    lowest, highest = facts["ranks"]
    shown = {
        "rank": str(highest) if lowest == highest else f"{lowest} to {highest}",
        "parameters": f"{facts['parameters']:,}, {facts['parameters before']:,} before",
        "lost": f"{facts['lost']:.2%} of an update, at most",
        "difference": f"{facts['difference']:.1e} of the largest output, on a probe batch",
    }
    if data is not None:
        before, after = facts["scores"]["before"], facts["scores"]["after"]
        shown |= {n: f"{after[n]:.4f}, {score:.4f} before" for n, score in before.items()}
    print_facts(shown, width=12)


def _facts(adapter: Adapter, lora: Adapter) -> dict[str, Any]:
    """Return the sizes of both adapters, and the difference of their outputs."""
    from adapterhub.adapters.route import activate
    from adapterhub.backbones.probe import probe
    from adapterhub.methods.lora import LoRALayer

    after = probe(lora.backbone.pretrained)
    activate(lora.model, adapter.name)
    before = probe(lora.backbone.pretrained)
    ranks = [module.A.shape[0] for p in lora.placed if isinstance(module := p.module, LoRALayer)]
    return {
        "ranks": [min(ranks), max(ranks)],
        "parameters": lora.count(),
        "parameters before": adapter.count(),
        "lost": lora.metadata.training["combined"]["lost"],
        "difference": max(
            float((after[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
            for name, value in before.items()
        ),
    }


def _scores(place: str, data: str, backbone: str | None, registry: str | None) -> dict[str, float]:
    from adapterhub.inference.open import open_adapter

    opened = open_adapter(place, backbone, registry=registry)
    with reading(data):
        task, choice = opened.task.fitted(data, opened.data, "eval")
        rows = task.read(data, choice.options, "eval")
    with doing("evaluating"):
        return dict(opened.evaluate(rows))
