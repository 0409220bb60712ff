"""`adapterhub train`."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import (
    bytes_text,
    count_text,
    examples,
    print_facts,
    print_json,
    print_table,
    say,
    say_text,
    seconds_text,
    sparkline,
)
from adapterhub.cli._open import open_page
from adapterhub.cli._stages import check_flags, train_stages
from adapterhub.cli._sweep import train_sweep
from adapterhub.config.options import options_of
from adapterhub.config.overrides import merge_options, parse_overrides
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, one_line
from adapterhub.files.shown_table import ShownTable
from adapterhub.loop.processes import restarted
from adapterhub.recipe.options import TrainOptions
from adapterhub.recipe.recipe import NAMES, SPECS, Recipe, read
from adapterhub.recipe.several_runs import parse_sweep, read_staged
from adapterhub.status import Display, display_for_terminal, doing, showing

if TYPE_CHECKING:
    from adapterhub.recipe.recipe import Recipe
    from adapterhub.training.run_data import RunData


# Section of the help text -> flag -> (option of the recipe, what the flag takes). All other options
# are given as KEY=VALUE.
SECTIONS = {
    "What to train": {
        "backbone": ("backbone", "ID"),
        "quantize": ("quantize", "KIND"),
        "family": ("family", "FILE"),
        "method": ("method", "SPEC"),
        "from": ("from", "ADAPTER"),
        "on": ("on", "ADAPTER..."),
        "task": ("task", "SPEC"),
    },
    "Data": {
        "train": ("data.train", "FILE"),
        "eval": ("data.eval", "FILE"),
        "text": ("data.text", "COLUMN"),
        "pair": ("data.pair", "COLUMN"),
        "label": ("data.label", "COLUMN"),
        "labels": ("data.labels", "NAMES"),
    },
    "Training": {
        "epochs": ("train.epochs", "N"),
        "steps": ("train.max_steps", "N"),
        "lr": ("train.learning_rate", "RATE"),
        "batch-size": ("train.batch_size", "N"),
        "max-length": ("train.max_length", "N"),
        "seed": ("seed", "N"),
    },
    "Result": {"output": ("output", "DIR"), "name": ("name", "NAME")},
}
_MOST_OF_A_ROW = 20_000  # characters of a text that --show prints
FLAGS = {flag: path for flags in SECTIONS.values() for flag, (path, _) in flags.items()}
PARAMETERS = {s: tuple(f.replace("-", "_") for f in flags) for s, flags in SECTIONS.items()}
_OPTIONS = {
    f"{group}{o.name}": o
    for group, cls in (("", Recipe), ("data.", DataOptions), ("train.", TrainOptions))
    for o in options_of(cls)
}


MULTIPLE = frozenset(f for f, path in FLAGS.items() if _OPTIONS[path].type.startswith("list"))


def recipe_flags(function: Any, without: Sequence[str] = ()) -> Any:
    """Add an option for each flag, with the help text and the type of its recipe option.

    `without` are flags that are left out.
    """
    for flags in reversed(SECTIONS.values()):
        for flag, (path, metavar) in reversed(flags.items()):
            if flag in without:
                continue
            option = _OPTIONS[path]
            kind = {"int": int, "float": float}.get(option.type.partition(" ")[0], str)
            help_text = f"{option.help[0].upper()}{option.help[1:]}."
            function = click.option(
                f"--{flag}", type=kind, metavar=metavar, help=help_text, multiple=flag in MULTIPLE
            )(function)
    return function


class RecipeCommand(click.Command):
    """A command with the flags of a recipe; for an unknown flag it says what to type instead.

    Args:
        sections: the titles below which its options are listed, each with their names; the last
            section has the others.
        rest: other arguments of a command.
    """

    def __init__(
        self, *rest: Any, sections: Mapping[str, tuple[str, ...]] = PARAMETERS, **others: Any
    ) -> None:
        super().__init__(*rest, **others)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {o.name: o.get_help_record(ctx) or ("", "") for o in options}
        width = max(len(name) for name, _ in records.values())
        rest = tuple(n for n in records if not any(n in names for names in self.sections.values()))
        for title, names in (*self.sections.items(), ("Other options", rest)):
            lines = [(records[n][0].ljust(width), records[n][1]) for n in names if n]
            with formatter.section(title):
                formatter.write_dl(lines)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but `--on A B` is `--on A --on B`; an unknown flag has a hint."""
        try:
            return super().parse_args(ctx, list(_one_value_each(args)))
        except click.NoSuchOption as error:
            flag = error.option_name
            name = flag.lstrip("-").replace("-", "_")
            if path := NAMES.own_name(name):
                own = next((f"--{f} VALUE" for f in FLAGS if FLAGS[f] == path), f"{path}=VALUE")
                raise click.UsageError(f"no such flag: {flag}; type {own}", ctx) from error
            if meaning := NAMES.meanings.get(name):
                raise click.UsageError(f"no such flag: {flag}; try {meaning}", ctx) from error
            raise


def _print_schema(context: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        from adapterhub.recipe.recipe_text import recipe_schema

        print_json(recipe_schema(), indent=2)
        context.exit()


@click.command(
    "train",
    cls=RecipeCommand,
    epilog=examples(
        "adapterhub train recipes/quickstart.yaml train.epochs=1",
        "adapterhub train --backbone sentence-transformers/all-MiniLM-L6-v2 \\",
        "    --method lora --train train.tsv --eval dev.tsv --output runs/sst2",
        "adapterhub train recipe.yaml --sweep method=lora,pfeiffer --sweep seed=0,1,2",
        "adapterhub train --resume --output runs/sst2",
    ),
)
@click.argument("words", nargs=-1, metavar="[RECIPE.yaml] [KEY=VALUE]...")
@recipe_flags
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=V,V",
    help="Train once with each value of an option.",
)
@click.option(
    "--resume", is_flag=True, default=restarted, help="Continue the run in the output folder."
)
@click.option("--dry-run", is_flag=True, help="Print sites, parameters and memory, then stop.")
@click.option(
    "--show",
    type=click.IntRange(1),
    metavar="N",
    help="Print the first N rows as the model gets them, then stop.",
)
@click.option("--quiet", is_flag=True, help="Print no progress.")
@click.option("--open", "open_report", is_flag=True, help="Open the report in the browser.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON schema of recipes, for editors, then stop.",
)
def command(
    words: tuple[str, ...],
    sweep: tuple[str, ...],
    resume: bool,
    dry_run: bool,
    show: int | None,
    quiet: bool,
    open_report: bool,
    **flags: Any,
) -> None:
    """Train an adapter from a recipe or from flags.

    KEY=VALUE sets any option of the recipe: train.schedule=cosine. `adapterhub options train`
    lists them, and `adapterhub recipe` writes them all to a file. KEY=VALUE overrides flags, and
    flags override the recipe.
    """
    if show:
        flags["output"] = flags["output"] or "."  # required of a recipe; nothing is written
    file, overrides = recipe_words(words)
    if resume and file is None:
        file = _recipe_of(flags["output"])
    if staged := read_staged(file, overrides, nested_flags(flags)):
        check_flags(staged, {"--sweep": sweep, "--show": show, "--open": open_report})
        train_stages(staged, resume=resume, dry_run=dry_run, quiet=quiet)
        return
    recipe = read(file, overrides, nested_flags(flags))
    if sweep:
        if show or open_report:
            raise ConfigError("--sweep trains several runs", hint="leave out --show and --open")
        recipes = _swept(sweep, file, overrides, flags)
        train_sweep(recipes, resume=resume, dry_run=dry_run, quiet=quiet)
        return
    if show:
        print_rows(recipe, show)
        return
    from adapterhub.loop.processes import is_main
    from adapterhub.training.preflight import check_run

    with showing(Display() if quiet or not is_main() else display_for_terminal()):
        data = check_run(recipe, resume, dry=dry_run)
        with doing("loading torch"):
            from adapterhub.loop.report import reporter_for
            from adapterhub.training.prepare import prepare
            from adapterhub.training.run import run

        if dry_run:
            prepared = prepare(recipe, data)
        else:
            reporter = reporter_for(Path(recipe.output), recipe.train, quiet=quiet)
            outcome = run(recipe, reporter, resume=resume, data=data)
    if dry_run:
        for note in prepared.notes:
            say(note, err=True)
        _print_plan(prepared)
    elif is_main():
        _print_outcome(outcome)
        _print_next(Path(recipe.output), data, bool(outcome.page))
        if open_report and outcome.page:
            open_page(outcome.page)


def _swept(
    sweep: tuple[str, ...], file: str | None, overrides: list[str], flags: dict[str, Any]
) -> dict[str, Recipe]:
    """Read the recipe of each run of a sweep, by its name."""
    return {
        each.name: read(file, [*overrides, *each.words], nested_flags(flags))
        for each in parse_sweep(sweep)
    }


def _one_value_each(args: Sequence[str]) -> Iterator[str]:
    """Repeat a flag that takes several values before each of them.

    The values end at a flag, a KEY=VALUE or a recipe.
    """
    flag = None
    for number, arg in enumerate(args):
        if arg.startswith("-") or "=" in arg or arg.endswith((".yaml", ".yml")):
            flag = arg if arg.removeprefix("--") in MULTIPLE else None
        elif flag is not None and args[number - 1] != flag:
            yield flag
        yield arg


def recipe_words(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Split the arguments into the recipe file, if there is one, and the overrides.

    Raises:
        ConfigError: more than one file.
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"more than one recipe: {', '.join(files)}",
            expected="one file, and options as KEY=VALUE without spaces",
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


def _recipe_of(output: str | None) -> str | None:
    """Return the recipe of the run in a folder, if there is one: that of a run to resume."""
    path = Path(output) / "recipe.yaml" if output else None
    return str(path) if path and path.is_file() else None


def nested_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Build the nested options of a recipe from the flags that are set."""
    data: dict[str, Any] = {}
    for flag, value in flags.items():
        if value not in (None, ()):
            *above, name = FLAGS[flag.replace("_", "-")].split(".")
            # A spec may be a YAML list or mapping; a column named 1 stays a string.
            leaf = parse_overrides([f"{name}={value}"]) if flag in SPECS else {name: value}
            data = merge_options(data, {above[0]: leaf} if above else leaf)
    return data


def _print_plan(prepared: Any) -> None:
    from adapterhub.loop.report import rate_text
    from adapterhub.training.plan import plan_of

    plan, recipe, data = plan_of(prepared), prepared.recipe, prepared.data
    epochs = round(plan.steps / plan.steps_per_epoch, 2)
    sites = [(site, method, count_text(count)) for site, method, count in plan.sites]
    print_table(ShownTable(("site", "method", "parameters"), sites, title="Sites"))
    if plan.tasks:
        _print_tasks(plan.tasks)
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


def _print_tasks(tasks: Sequence[Any]) -> None:
    """Print what each of several tasks gets of the run."""
    columns = ("task", "kind", "rows", "share", "steps", "weight")
    rows = []
    for each in tasks:
        share, weight = f"{each.share:.1%}", f"{each.weight:g}"
        rows.append((each.name, each.task, f"{each.rows:,}", share, f"{each.steps:,}", weight))
    print_table(ShownTable(columns, rows, title="Tasks"))


def _print_outcome(outcome: Any) -> None:
    result = outcome.result
    parameters, head = count_text(outcome.parameters), count_text(outcome.head_parameters)
    speed = f"{result.examples_per_second:,.0f} examples/s"
    if result.tokens_per_second:
        speed += f", {result.tokens_per_second:,.0f} tokens/s"
    facts = {
        **{name: f"{value:.4f}" for name, value in outcome.metrics.items()},
        "trained": f"{parameters} parameters, plus {head} in the head",
        "adapter": f"{outcome.folder}, {bytes_text(outcome.adapter_bytes)}",
        "time": f"{seconds_text(result.seconds)}, {speed}",
        "peak memory": bytes_text(result.peak_memory),
    }
    if outcome.page:
        facts["report"] = str(outcome.page)
    print_facts(facts | _curves(outcome.folder.parent, facts), width=12)
    _print_verdict(outcome.verdict)


def _print_verdict(said: Sequence[str]) -> None:
    """Print which evaluation was the best, and below it why the run ended."""
    for number, line in enumerate(said):
        say(f"{'' if number else 'best':12} {line}")


def _print_next(run: Path, data: RunData, has_page: bool) -> None:
    """Print what to type next.

    Args:
        run: the run folder.
        data: its data.
        has_page: whether it has a page to open.
    """
    head, first = next(iter(data.parts.items()), ("", data))
    texts = first.task.fields(first.options)
    second = f"a {first.task.pair_name}" if first.task.pair_name else "another"
    place, pair = shlex.quote(str(run)), f' --pair "{second}"' * (texts != 1)
    which = f" --head {head}" * bool(head)
    say(f"{'next':12} adapterhub predict {place}{which} {first.task.typed_input()}{pair}")
    say(f"{'':12} adapterhub publish {place}")
    if has_page:
        say(f"{'':12} adapterhub report {place} --open")


def _curves(run: Path, facts: dict[str, str]) -> dict[str, str]:
    """Return the curve of the training loss, and that of the main metric beside its value."""
    from adapterhub.pages.run_files import read_run

    files = read_run(run)
    main = files.main_metric
    losses = [line["loss"] for line in files.training if line["loss"] is not None]
    scores = [v for line in files.evaluations if (v := line["metrics"].get(main)) is not None]
    curves = {}
    if len(scores) > 1 and main in facts:
        curves[main] = f"{facts[main]}  {sparkline(scores)}"
    if len(losses) > 1:
        curves["train loss"] = f"{losses[-1]:.4f}  {sparkline(losses)} from {losses[0]:.4f}"
    return curves


def print_rows(recipe: Recipe, count: int) -> None:
    """Print the first training rows of a recipe, wrapped to the terminal, or to 80 columns."""
    from adapterhub.training.plan import preview_rows

    rows, notes = preview_rows(recipe, count)
    for note in notes:
        say_text(_wrapped("note", note, 4))
    for row in rows:
        say("")
        say(row.title)
        width = max(map(len, row.facts))
        for name, text in row.facts.items():
            say_text(_wrapped(name, text, width))


def _wrapped(name: str, text: str, width: int) -> str:
    lead = f"  {name:{width}}  "
    return textwrap.fill(
        one_line(text, _MOST_OF_A_ROW),
        width=max(shutil.get_terminal_size().columns - 1, 40),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
    )
