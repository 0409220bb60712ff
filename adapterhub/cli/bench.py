"""`adapterhub bench`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import say
from adapterhub.cli._options import check_engine, quiet_option
from adapterhub.cli.train import (
    RecipeCommand,
    nested_flags,
    recipe_flags,
    recipe_words,
)
from adapterhub.config.user_folders import is_file
from adapterhub.errors import ConfigError
from adapterhub.recipe.output_folder import new_output
from adapterhub.status import Display, display_for_terminal, doing, showing

if TYPE_CHECKING:
    from adapterhub.bench.study import Study

# Flags of a recipe that a study chooses for each of its runs.
DECIDED = ("method", "from", "lr", "epochs", "steps", "seed", "name")
SECTIONS = {
    "What to compare": (
        "backbone",
        "methods",
        "ranks",
        "baseline",
        "quantize",
        "task",
    ),
    "Data": ("train", "eval", "test", "text", "pair", "label", "labels"),
    "How much": ("budget", "steps", "rates", "seeds", "rows", "batch_size", "max_length"),
    "Where it runs": ("engine", "workers", "ray_address", "shard"),
    "Result": ("output",),
}


@click.command("bench", cls=RecipeCommand, sections=SECTIONS)
@click.argument("words", nargs=-1, metavar="[DATA | STUDY.yaml] [KEY=VALUE]...")
@partial(recipe_flags, without=(*DECIDED, "test"))
@click.option("--test", metavar="FILE", help="Test data, used once at the end.")
@click.option("--methods", metavar="SPECS", help="Methods to compare: lora,mam,lora(rank=16).")
@click.option("--ranks", metavar="N,N", help="Ranks to compare, at equal scales: 4,16,64.")
@click.option("--baseline", metavar="SPEC", help="The method that others are compared with.")
@click.option("--budget", metavar="TIME", help="Approximate time for all runs: 30m, 2h.")
@click.option("--steps", type=int, metavar="N", help="Steps of a whole run, instead of a budget.")
@click.option("--seeds", type=int, metavar="N", help="Runs of each method with its best rate.")
@click.option("--rates", type=int, metavar="N", help="Learning rates that are tried.")
@click.option("--rows", metavar="N,N", help="Numbers of training rows to compare at.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Run in this process, or on the workers of a Ray cluster.",
)
@click.option("--workers", type=int, metavar="N", help="Ray: runs at once, on all its machines.")
@click.option(
    "--ray-address",
    metavar="HOST:PORT",
    help="Ray: a running cluster. Default: as Ray finds it (RAY_ADDRESS), or this machine.",
)
@click.option("--shard", metavar="K/N", help="Do the K-th of N parts of the runs, then exit.")
@quiet_option
def command(
    words: tuple[str, ...],
    test: str | None,
    methods: str | None,
    ranks: str | None,
    baseline: str | None,
    budget: str | None,
    steps: int | None,
    seeds: int | None,
    rates: int | None,
    rows: str | None,
    engine: str,
    workers: int | None,
    ray_address: str | None,
    shard: str | None,
    quiet: bool,
    **flags: Any,
) -> None:
    """Compare methods on your data: tuned, repeated, and tested on rows that selected nothing.

    For each method, learning rates around its default are tried, all with equal trials, and the
    best one is trained with several seeds. The same command continues a study that was stopped.
    """
    from adapterhub.bench.cells import parse_shard
    from adapterhub.bench.study import read_study
    from adapterhub.recipe.sweep import split_values

    bench = {
        "test": test,
        "methods": tuple(split_values(methods)) if methods else None,
        "ranks": _numbers("--ranks", ranks, "4,16,64"),
        "baseline": baseline,
        "budget": budget,
        "steps": steps,
        "seeds": seeds,
        "rates": rates,
        "rows": _numbers("--rows", rows, "100,500"),
    }
    file, overrides = recipe_words(words, flags)
    if not flags["output"]:
        flags["output"] = new_output(file, overrides, flags["train"], above="studies", resume=True)
    output = flags["output"]
    if file is None and output and is_file(Path(output) / "study.yaml"):
        file = str(Path(output) / "study.yaml")
    study = read_study(file, overrides, nested_flags(flags), bench)
    _check_complete(study)
    part = parse_shard(shard) if shard else None
    check_engine(engine, workers, ray_address)
    _check_shard(study, shard)
    with showing(Display() if quiet else display_for_terminal()):
        study = _completed(study)
        with doing("loading torch"):
            from adapterhub.cli._study import RunsOn, bench_study
        runs_on = RunsOn(engine, workers, ray_address, part)
        bench_study(study, quiet=quiet, runs_on=runs_on)


def _completed(study: Study) -> Study:
    """Return a study with a missing task and backbone filled in, and report them."""
    from adapterhub.tasks import parse_task
    from adapterhub.tasks.common.infer_task import usual_method
    from adapterhub.training.run_data import read_data

    recipe, first = study.recipe, next(iter(study.tasks().values()))
    if recipe.backbone and first.task is not None:
        return study.with_usual_method(usual_method(parse_task(first.task).head))
    if recipe.backbone and study.bench.tasks and not study.bench.ranks:
        return study
    data = read_data(replace(first, data=replace(first.data, eval=None)))
    for note in data.chosen:
        say(note, err=True)
    chosen = data.completed(first)
    task = recipe.task if study.bench.tasks else chosen.task
    study = replace(study, recipe=replace(recipe, backbone=chosen.backbone, task=task))
    return study.with_usual_method(usual_method(data.head))


def _numbers(flag: str, text: str | None, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(each.replace("_", "")) for each in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}", expected=f"whole numbers: {example}") from error


def _check_shard(study: Any, shard: str | None) -> None:
    if shard and study.bench.budget is not None and study.bench.steps is None:
        raise ConfigError(
            "--shard with --budget: each process would measure other times, and plan other runs",
            hint="--steps N instead of a budget; or run it once without --shard until the first "
            "run is done",
        )


def _check_complete(study: Any) -> None:
    recipe = study.recipe
    missing = {"--output": recipe.output}
    if not study.bench.tasks:
        missing["--train"] = recipe.data.train
    if names := [name for name, value in missing.items() if not value]:
        raise ConfigError(
            "the study is incomplete",
            offenders=[f"{name} is missing" for name in names],
            hint="adapterhub bench FILE --output DIR",
        )
