"""`adapterhub train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from adapterhub.cli._format import (
    PlainTable,
    bytes_text,
    count_text,
    examples,
    print_facts,
    print_json,
    print_table,
    say,
    seconds_text,
)
from adapterhub.config.json_schema import json_schema
from adapterhub.config.options import options_of
from adapterhub.config.overrides import merge_options, parse_overrides
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.training.recipe import SPECS, Recipe, read

# Flag -> option of the recipe. All other options are given as KEY=VALUE.
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
    """Add an option for each flag, with the help text of its recipe option."""
    for flag, path in reversed(FLAGS.items()):
        kind = int if flag == "seed" else str
        help_text = f"{_HELP[path][0].upper()}{_HELP[path][1:]}."
        function = click.option(f"--{flag}", flag, type=kind, help=help_text)(function)
    return function


def _print_schema(context: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        print_json(json_schema(Recipe), indent=2)
        context.exit()


@click.command(
    "train",
    epilog=examples(
        "adapterhub train recipes/quickstart.yaml train.epochs=1",
        "adapterhub train --backbone sentence-transformers/all-MiniLM-L6-v2 \\",
        "    --method lora --train train.tsv --eval dev.tsv --output runs/sst2",
    ),
)
@click.argument("words", nargs=-1, metavar="[RECIPE.yaml] [KEY=VALUE]...")
@_flags
@click.option("--resume", is_flag=True, help="Continue the run in the output folder.")
@click.option("--dry-run", is_flag=True, help="Print sites, parameters and memory, then stop.")
@click.option("--quiet", is_flag=True, help="Print no progress.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON schema of recipes, for editors, then stop.",
)
def command(words: tuple[str, ...], resume: bool, dry_run: bool, quiet: bool, **flags: Any) -> None:
    """Train an adapter from a recipe or from flags.

    KEY=VALUE sets any option of the recipe, such as train.learning_rate=1e-3.
    """
    recipe = read(*_recipe_words(words), _nested(flags))
    from adapterhub.training.output_folder import check_output
    from adapterhub.training.prepare import prepare
    from adapterhub.training.processes import is_main
    from adapterhub.training.report import reporter_for
    from adapterhub.training.run import run

    if dry_run:
        check_output(Path(recipe.output), resume)
        prepared = prepare(recipe)
        for note in prepared.data.notes:
            say(note, err=True)
        _print_plan(prepared)
        return
    reporter = reporter_for(Path(recipe.output), recipe.train, quiet=quiet)
    outcome = run(recipe, reporter, resume=resume)
    if is_main():
        _print_outcome(outcome)


def _recipe_words(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Split the arguments into the recipe file, if there is one, and the overrides."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"more than one recipe: {', '.join(files)}",
            expected="one file, and options as KEY=VALUE without spaces",
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    """Build the nested options of a recipe from the flags that are set."""
    data: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is not None:
            *above, name = FLAGS[flag].split(".")
            # A spec may be a YAML list or mapping; a column named 1 stays a string.
            leaf = parse_overrides([f"{name}={value}"]) if flag in SPECS else {name: value}
            data = merge_options(data, {above[0]: leaf} if above else leaf)
    return data


def _print_plan(prepared: Any) -> None:
    from adapterhub.training.plan import plan_of
    from adapterhub.training.report import rate_text

    plan, recipe, data = plan_of(prepared), prepared.recipe, prepared.data
    epochs = round(plan.steps / plan.steps_per_epoch, 2)
    sites = PlainTable("site", "method", "parameters", title="Sites", title_justify="left")
    for site, method, count in plan.sites:
        sites.add_row(site, method, count_text(count))
    print_table(sites)
    share = f"{plan.trainable / plan.backbone:.2%} of the backbone"
    facts = {
        "backbone": f"{recipe.backbone}, {count_text(plan.backbone)} parameters",
        "method": ", ".join(method.name for method in prepared.adapter.methods),
        "trainable": f"{count_text(plan.trainable)} ({share}), {count_text(plan.head)} in the head",
        "data": f"{len(data.train):,} training, {len(data.evaluation):,} evaluation examples",
        "labels": ", ".join(f"{name}: {n:,}" for name, n in plan.labels.items()) or "none",
        "steps": f"{plan.steps:,} with batch size {recipe.train.batch_size}, {epochs:g} epoch(s)",
        "learning rate": f"{rate_text(plan.rates)}, {recipe.train.schedule}",
        "tokens": f"{plan.tokens:,} per epoch, {plan.longest} in the longest example",
        "truncated": f"{plan.truncated:,} training examples, by train.max_length="
        f"{recipe.train.max_length}",
        **{f"memory, {part}": bytes_text(size) for part, size in plan.memory.items()},
        "memory, total": f"{bytes_text(sum(plan.memory.values()))} (estimate)",
    }
    print_facts(facts, width=24)


def _print_outcome(outcome: Any) -> None:
    result = outcome.result
    parameters, head = count_text(outcome.parameters), count_text(outcome.head_parameters)
    speed = f"{result.examples_per_second:,.0f} examples/s"
    facts = {
        **{name: f"{value:.4f}" for name, value in outcome.metrics.items()},
        "trained": f"{parameters} parameters, plus {head} in the head",
        "adapter": f"{outcome.folder}, {bytes_text(outcome.adapter_bytes)}",
        "time": f"{seconds_text(result.seconds)}, {speed}",
        "peak memory": bytes_text(result.peak_memory),
    }
    print_facts(facts, width=12)
