"""`adapterhub train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from adapterhub.cli._format import bytes_text, count_text, plain_table, seconds_text
from adapterhub.config.options import options_of
from adapterhub.config.overrides import merge_options, parse_overrides
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.training.recipe import SPECS, Recipe, read

# The flags that stand for options of the recipe; every other option is given as key=value.
FLAGS = {
    "backbone": "backbone",
    "method": "method",
    "quantize": "quantize",
    "task": "task",
    "train": "data.train",
    "eval": "data.eval",
    "text": "data.text",
    "pair": "data.pair",
    "label": "data.label",
    "output": "output",
    "seed": "seed",
}
_HELP = {o.name: o.help for o in options_of(Recipe)} | {
    f"data.{o.name}": o.help for o in options_of(DataOptions)
}


def _flags(function: Any) -> Any:
    for flag, path in reversed(FLAGS.items()):
        kind = int if flag == "seed" else str
        function = click.option(f"--{flag}", flag, type=kind, help=f"{_HELP[path]}.")(function)
    return function


@click.command("train")
@click.argument("words", nargs=-1, metavar="[RECIPE.yaml] [KEY=VALUE]...")
@_flags
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop before the first step.")
@click.option("--quiet", is_flag=True, help="No progress on the terminal.")
def command(words: tuple[str, ...], resume: bool, dry_run: bool, quiet: bool, **flags: Any) -> None:
    """Train an adapter, from a recipe or from flags.

    \b
    adapterhub train recipes/quickstart.yaml train.epochs=1
    adapterhub train --backbone sentence-transformers/all-MiniLM-L6-v2 --method lora \\
        --train train.tsv --eval dev.tsv --text sentence --label label --output runs/sst2

    Any option of the recipe can be given as KEY=VALUE, such as train.learning_rate=1e-3.
    """
    recipe = read(*_recipe_words(words), _nested(flags))
    from adapterhub.training.prepare import prepare
    from adapterhub.training.processes import is_main
    from adapterhub.training.report import reporter_for
    from adapterhub.training.run import check_output, run

    if dry_run:
        check_output(Path(recipe.output), resume)
        _print_plan(prepare(recipe))
        return
    reporter = reporter_for(Path(recipe.output), recipe.train, quiet=quiet)
    outcome = run(recipe, reporter, resume=resume)
    if is_main():
        _print_outcome(outcome)


def _recipe_words(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"more than one recipe: {', '.join(files)}",
            expected="one file; options are KEY=VALUE, without blanks",
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is not None:
            *above, name = FLAGS[flag].split(".")
            # A spec may be YAML's [...] or {...}; a column may be called 1.
            leaf = parse_overrides([f"{name}={value}"]) if flag in SPECS else {name: value}
            data = merge_options(data, {above[0]: leaf} if above else leaf)
    return data


def _print_plan(ready: Any) -> None:
    from adapterhub.training.plan import plan_of

    plan = plan_of(ready)
    console = Console()
    sites = Table("site", "method", "parameters", title="Sites", title_justify="left")
    for site, method, count in plan.sites:
        sites.add_row(site, method, count_text(count))
    console.print(plain_table(sites) if not console.is_terminal else sites)
    facts = {
        "backbone": f"{ready.recipe.backbone}, {count_text(plan.backbone)} parameters",
        "method": ", ".join(m.name for m in ready.adapter.methods),
        "trainable": f"{count_text(plan.trainable)} "
        f"({plan.trainable / plan.backbone:.2%} of the backbone), "
        f"of them {count_text(plan.head)} in the head",
        "data": f"{len(ready.data.train):,} to train, {len(ready.data.evaluation):,} to evaluate",
        "labels": ", ".join(ready.data.labels) or "none",
        "steps": f"{plan.steps:,} of {ready.recipe.train.batch_size} examples",
        "tokens": f"{plan.tokens:,} an epoch, the longest example has {plan.longest}",
        **{f"memory, {k}": bytes_text(v) for k, v in plan.memory.items()},
        "memory, sum": f"{bytes_text(sum(plan.memory.values()))} (estimate)",
    }
    for name, text in facts.items():
        console.print(f"{name:24} {text}", highlight=False, markup=False, soft_wrap=True)


def _print_outcome(outcome: Any) -> None:
    console, result = Console(), outcome.result
    trained, head = count_text(outcome.parameters), count_text(outcome.head_parameters)
    speed = f"{result.examples_per_second:,.0f} examples/s"
    facts = {
        **{name: f"{value:.4f}" for name, value in outcome.metrics.items()},
        "trained": f"{trained} parameters, and {head} in the head",
        "adapter": f"{outcome.folder}, {bytes_text(outcome.adapter_bytes)}",
        "time": f"{seconds_text(result.seconds)}, {speed}",
        "peak memory": bytes_text(result.peak_memory),
    }
    for name, text in facts.items():
        console.print(f"{name:12} {text}", highlight=False, markup=False, soft_wrap=True)
