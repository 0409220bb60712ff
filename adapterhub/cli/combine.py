"""`adapterhub combine`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from adapterhub.errors import ConfigError


@click.command("combine")
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option("--output", required=True, help="The folder for the new adapter.")
@click.option(
    "--how",
    type=click.Choice(["linear", "ties", "dare", "dare-ties"]),
    default="linear",
    show_default=True,
    help="linear: the weighted sum; ties, dare: of what remains of each after trimming.",
)
@click.option("--weights", help="One number each, as 0.7,0.3 or -1; by default the mean.")
@click.option("--density", type=float, default=1.0, help="The share that ties and dare keep.")
@click.option("--rank", type=int, help="Keep updates of projections in this rank.")
@click.option("--seed", type=int, default=0, help="Seed of what dare drops.")
@click.option("--name", default="combined", show_default=True, help="Name of the new adapter.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    folders: tuple[str, ...],
    output: str,
    how: str,
    weights: str | None,
    density: float,
    rank: int | None,
    seed: int,
    name: str,
    backbone: str | None,
    as_json: bool,
) -> None:
    """Combine the adapters in DIR... (runs' outputs, or adapters' folders) of one backbone into a
    new adapter. Its head and labels are those of the first."""
    from adapterhub.adapters.load import load_folder
    from adapterhub.files.atomic import check_place
    from adapterhub.files.native import read_manifest
    from adapterhub.inference.open import load_for_merging
    from adapterhub.merging.combine import combine
    from adapterhub.registry.api import pull

    check_place(Path(output), overwrite=False, replaceable=())
    shares = None if weights is None else _numbers(weights)
    sources = [pull(folder) for folder in folders]
    names = [f"{n}: {read_manifest(files).name}" for n, files in enumerate(sources, start=1)]
    first, _ = load_for_merging(sources[0], backbone, name=names[0])
    for files, each in zip(sources[1:], names[1:], strict=True):
        load_folder(first.model, files, name=each)
    options = {"how": how, "weights": shares, "density": density, "rank": rank, "seed": seed}
    made = combine(first.model, names, **options, name=name)  # type: ignore[arg-type]
    made.save(output)
    facts = made.metadata.training["combined"]
    if as_json:
        click.echo(json.dumps({"output": output, "parameters": made.count(), **facts}))
        return
    click.echo(f"{output}: {how} of {len(names)}, {made.count():,} parameters")
    if facts["lost"]:
        click.echo(f"rank {rank} loses up to {facts['lost']:.1%} of the change of a projection")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"the weights {text!r} cannot be read", expected="numbers, as 0.7,0.3"
        ) from error
