"""`adapterhub combine`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import print_json, say
from adapterhub.cli._options import (
    as_json_option,
    backbone_place_option,
    registry_option,
    require_signature_option,
)
from adapterhub.errors import ConfigError
from adapterhub.status import doing


@click.command("combine")
@click.argument("references", nargs=-1, required=True, metavar="ADAPTER...")
@click.option("--output", required=True, help="Folder for the new adapter.")
@click.option(
    "--how",
    type=click.Choice(["linear", "ties", "dare", "dare-ties"]),
    default="linear",
    show_default=True,
    help="linear: weighted sum; ties, dare: weighted sum after trimming.",
)
@click.option("--weights", help="One number per adapter: 0.7,0.3 (default: mean).")
@click.option("--density", type=float, default=1.0, help="Share of the values ties and dare keep.")
@click.option("--rank", type=int, help="Truncate the combined updates to this rank.")
@click.option("--energy", type=float, help="Truncate each to the rank with this share of energy.")
@click.option("--seed", type=int, default=0, help="Seed of the values that dare drops.")
@click.option("--head", help="The ADAPTER whose head and labels are kept (default: the first).")
@click.option("--name", default="combined", show_default=True, help="Name of the new adapter.")
@backbone_place_option
@registry_option
@require_signature_option
@as_json_option
def command(
    references: tuple[str, ...],
    output: str,
    how: str,
    weights: str | None,
    density: float,
    rank: int | None,
    energy: float | None,
    seed: int,
    head: str | None,
    name: str,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Combine adapters of the same backbone into a new adapter.

    Each ADAPTER is a run folder, an adapter folder or a published name. The new adapter gets the
    head and labels of the first; if the labels differ, --head must name one.
    """
    from adapterhub.backbones.torch_free_checks import check_backbone_options
    from adapterhub.files.atomic import check_place
    from adapterhub.registry.pull import pull_verified

    if backbone:
        check_backbone_options(backbone)
    check_place(Path(output), overwrite=False, replaceable=())
    numbers = None if weights is None else _numbers(weights)
    if head is not None and head not in references:
        raise ConfigError(f"--head {head} is not combined", expected=", ".join(references))
    sources = [pull_verified(reference, registry=registry) for reference in references]
    names = [f"{n}: {s.own().manifest.name}" for n, s in enumerate(sources, start=1)]
    with doing("loading torch"):
        from adapterhub.adapters.load import load_folder
        from adapterhub.inference.open import load_for_merging
        from adapterhub.merging.combine import combine

    first, _ = load_for_merging(references[0], backbone, name=names[0], registry=registry)
    for source, source_name in zip(sources[1:], names[1:], strict=True):
        load_folder(first.model, source.source, name=source_name)
    options = {"how": how, "weights": numbers, "density": density, "seed": seed}
    options |= {"rank": rank, "energy": energy}
    owner = None if head is None else names[references.index(head)]
    combined = combine(first.model, names, **options, name=name, head=owner)  # type: ignore[arg-type]
    combined.save(output)
    facts = combined.metadata.training["combined"]
    if as_json:
        print_json({"output": output, "parameters": combined.count(), **facts})
        return
    say(f"{output}: {how} of {len(names)} adapters, {combined.count():,} parameters")
    if facts["lost"]:
        say(f"up to {facts['lost']:.1%} of the update of a projection is lost")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"invalid weights {text!r}", expected="numbers separated by commas: 0.7,0.3"
        ) from error
