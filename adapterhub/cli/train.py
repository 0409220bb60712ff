"""`adapterhub train`, and the flags of recipes for all commands that accept one."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import (
    bytes_text,
    open_page,
    print_facts,
    print_json,
    print_table,
    say,
    say_text,
    seconds_text,
    shown_score,
    sparkline,
)
from adapterhub.cli._options import quiet_option
from adapterhub.config.options import help_in_words, options_of
from adapterhub.config.user_folders import is_file, is_there
from adapterhub.config.yaml import (
    call_text,
    load_yaml,
    merge_options,
    parse_calls,
    parse_overrides,
)
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import is_data_name
from adapterhub.errors import AdapterhubError, ConfigError, TrainingError, one_line
from adapterhub.files.shown_table import TEST, ShownTable
from adapterhub.loop.processes import is_main, restarted
from adapterhub.recipe.output_folder import new_output
from adapterhub.recipe.recipe import NAMES, SPECS, Recipe, TrainOptions, read
from adapterhub.recipe.sweep import StagedRecipe, parse_sweep, read_staged
from adapterhub.status import Display, display_for_terminal, doing, showing
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.distillation import TeacherOptions

if TYPE_CHECKING:
    from adapterhub.loop.report import Reporter
    from adapterhub.training.run import RunOutcome
    from adapterhub.training.run_data import RunData
    from adapterhub.training.several import Ended


# Section of the help text -> flag -> (option of the recipe, value of the flag). All other options
# are set as KEY=VALUE.
SECTIONS = {
    "What to train": {
        "backbone": ("backbone", "ID"),
        "quantize": ("quantize", "KIND"),
        "family": ("family", "FILE"),
        "method": ("method", "SPEC"),
        "from": ("from", "ADAPTER"),
        "on": ("on", "ADAPTER..."),
        "teacher": ("teacher.model", "MODEL"),
        "task": ("task", "SPEC"),
    },
    "Data": {
        "train": ("data.train", "FILE"),
        "eval": ("data.eval", "FILE"),
        "test": ("data.test", "FILE|SHARE"),
        "retain": ("data.retain", "FILE"),
        "text": ("data.text", "COLUMN"),
        "pair": ("data.pair", "COLUMN"),
        "label": ("data.label", "COLUMN"),
        "labels": ("data.labels", "NAMES"),
        "group": ("data.group", "COLUMN"),
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
FLAGS = {flag: path for flags in SECTIONS.values() for flag, (path, _) in flags.items()}
PARAMETERS = {s: tuple(f.replace("-", "_") for f in flags) for s, flags in SECTIONS.items()}
_STUDIES = ("stages", "bench")
_OF_RECIPES = {
    "backbone", "method", "task", "tasks", "teacher", "data", "train", "from", "output", *_STUDIES
}  # fmt: skip
_LISTS = {"method", "new_tokens", "on", "stages"}
_DATA_SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".gz")  # of files that are no recipes
_LARGEST_RECIPE = 1 << 16  # bytes; a larger file is data, not a recipe
_OPTIONS = {
    f"{group}{o.name}": o
    for group, cls in (
        ("", Recipe),
        ("teacher.", TeacherOptions),
        ("data.", DataOptions),
        ("train.", TrainOptions),
    )
    for o in options_of(cls)
}
MULTIPLE = frozenset(f for f, path in FLAGS.items() if _OPTIONS[path].type.startswith("list"))
_REPEATED = MULTIPLE | {"train"}  # flags with several values


def recipe_flags(function: Any, without: Sequence[str] = ()) -> Any:
    """Add an option for each flag, with the help text and the type of its recipe option.

    `without` are flags to leave out.
    """
    for flags in reversed(SECTIONS.values()):
        for flag, (path, metavar) in reversed(flags.items()):
            if flag in without:
                continue
            option = _OPTIONS[path]
            kind = {"int": int, "float": float}.get(option.type.partition(" ")[0], str)
            words, left_out = help_in_words(option)
            left_out = left_out and str(option.default or left_out)
            default = f"; default: {left_out}" if left_out else ""
            help_text = f"{words[0].upper()}{words[1:]}{default}."
            function = click.option(
                f"--{flag}", type=kind, metavar=metavar, help=help_text, multiple=flag in _REPEATED
            )(function)
    return function


class RecipeCommand(click.Command):
    """A command with the flags of a recipe; the error for an unknown flag suggests another.

    `sections` maps the titles of the help sections to option names; a last section has the rest.
    """

    def __init__(
        self, *rest: Any, sections: Mapping[str, tuple[str, ...]] = PARAMETERS, **others: Any
    ) -> None:
        super().__init__(*rest, **others)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their sections."""
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


def _one_value_each(args: Sequence[str]) -> Iterator[str]:
    """Repeat a flag with several values before each value.

    The values end at the next flag, KEY=VALUE or recipe. A later `--train` replaces an earlier one.
    """
    flag = None
    args = [re.sub(r"^--data(?==|$)", "--train", arg) for arg in args]
    for number, arg in enumerate(args):
        later = any(each.partition("=")[0] == "--train" for each in args[number + 1 :])
        if later and arg.startswith("--train="):
            flag = None
            continue
        ends = arg.startswith("-") or is_override(arg) or arg.endswith((".yaml", ".yml"))
        if ends or (flag == "--train" and args[number - 1] != flag and is_recipe(arg)):
            flag = arg if arg.removeprefix("--") in _REPEATED else None
        elif flag is not None and args[number - 1] != flag and not (later and flag == "--train"):
            yield flag
        if not (later and flag == "--train"):
            yield arg


def is_override(word: str) -> bool:
    """Return whether a word is KEY=VALUE, not a path that contains a `=`.

    Folders of sweeps and of partitioned tables contain one: `runs/lr=1e-3`, `year=2024/part.csv`.
    """
    key, equals, _ = word.partition("=")
    if not equals or is_there(word) or any(mark in key for mark in "/\\~"):
        return False
    is_option = "." in key or key in _OF_RECIPES or NAMES.own_name(key.strip()) is not None
    return is_option or not is_data_name(word)


def recipe_words(words: tuple[str, ...], flags: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Split the arguments into the optional recipe file and the overrides.

    The data files among the arguments become the flag `train`: one file, or a list of them.

    Raises:
        ConfigError: there are several recipes.
    """
    overrides = [word for word in words if is_override(word)]
    files = [word for word in words if word not in overrides]
    recipes = [word for word in files if is_recipe(word)]
    if len(recipes) > 1:
        raise ConfigError(
            f"more than one recipe: {', '.join(recipes)}",
            expected="one recipe, files of training data, and options as KEY=VALUE",
        )
    typed = [word for word in files if word not in recipes]
    data = typed + [word for word in flags["train"] or () if word not in typed]
    flags["train"] = data if len(data) > 1 else next(iter(data), None)
    return (recipes[0] if recipes else None), overrides


def is_recipe(file: str) -> bool:
    """Return whether a file is a recipe or study, not data: by its suffix, or by its content.

    A word that is neither a file nor looks like a data source counts as a mistyped name.
    """
    path = Path(file)
    if file.lower().endswith((".yaml", ".yml")):
        return True
    if path.suffix.lower() in _DATA_SUFFIXES:
        return False
    if not is_there(path):
        return not path.suffix and not any(mark in file for mark in "/:#*")
    if not is_file(path) or path.stat().st_size > _LARGEST_RECIPE:
        return False
    try:
        options = load_yaml(path)
    except ConfigError:
        return False
    # Data may also be an object: of columns, or with a list of rows, {"data": [...]}.
    known = all(name in _STUDIES or NAMES.own_name(name) for name in options)
    lists = {name for name, value in options.items() if isinstance(value, list)}
    return known and bool(options.keys() & _OF_RECIPES) and lists <= _LISTS


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


_MOST_OF_AN_UPDATE = 0.95  # share of its squared norm that a suggested rank keeps
_MOST_OF_A_ROW = 20_000  # characters of a text printed by --show


def _print_schema(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        from adapterhub.recipe.recipe import recipe_schema

        print_json(recipe_schema(), indent=2)
        context.exit()


@click.command("train", cls=RecipeCommand)
@click.argument("words", nargs=-1, metavar="[DATA... | RECIPE.yaml] [KEY=VALUE]...")
@recipe_flags
@click.option(
    "--reward",
    multiple=True,
    metavar="RULE",
    help="Of grpo: exact, regex:PATTERN, tests or FILE.py:FUNCTION.",
)
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
    help="Print N rows as the model gets them, then stop.",
)
@quiet_option
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
    reward: tuple[str, ...],
    sweep: tuple[str, ...],
    resume: bool,
    dry_run: bool,
    show: int | None,
    quiet: bool,
    open_report: bool,
    **flags: Any,
) -> None:
    """Train an adapter on a data file, or from a recipe.

    `adapterhub train reviews.csv` is enough: defaults fit the data and are printed. KEY=VALUE
    sets any option of the recipe: train.schedule=cosine. `adapterhub options train` lists all, and
    `adapterhub recipe` writes them to a file. KEY=VALUE overrides flags, and flags the recipe.
    """
    if show:
        flags["output"] = flags["output"] or "."  # required by a recipe; nothing is written
    file, overrides = recipe_words(words, flags)
    if reward:
        flags["task"] = _rewarded(flags["task"], file, reward)
    if not flags["output"]:
        flags["output"] = new_output(file, overrides, flags["train"], resume=resume)
    if resume and file is None:
        file = _recipe_of(flags["output"])
    if staged := read_staged(file, overrides, nested_flags(flags)):
        _check_flags(staged, {"--sweep": sweep, "--show": show, "--open": open_report})
        _train_stages(staged, resume=resume, dry_run=dry_run, quiet=quiet)
        return
    recipe = read(file, overrides, nested_flags(flags))
    if sweep:
        if show or open_report:
            raise ConfigError("--sweep trains several runs", hint="leave out --show and --open")
        recipes = _swept(sweep, file, overrides, flags)
        _train_sweep(recipes, resume=resume, dry_run=dry_run, quiet=quiet)
        return
    if show:
        print_rows(recipe, show)
        return
    _train(recipe, resume=resume, dry_run=dry_run, quiet=quiet, open_report=open_report)


def _rewarded(spec: str | None, file: str | None, rewards: Sequence[str]) -> str:
    """Return the spec of a task with these rewards: of the flag, the recipe, or grpo."""
    of_recipe = load_yaml(file).get("task") if file else None
    task: Any = parse_overrides([f"task={spec}"])["task"] if spec else of_recipe or "grpo"
    parsed = parse_calls(task, "task", "grpo") if isinstance(task, str) else task
    named = parsed if isinstance(parsed, Mapping) else dict(parsed)
    return json.dumps({name: {**(own or {}), "reward": [*rewards]} for name, own in named.items()})


def _train(recipe: Recipe, *, resume: bool, dry_run: bool, quiet: bool, open_report: bool) -> None:
    """Train one run, or print its plan."""
    from adapterhub.training.run_data import check_run

    with showing(_display(quiet)):
        data = check_run(recipe, resume, dry=dry_run)
        with doing("loading torch"):
            from adapterhub.training.run import prepare, run

        if dry_run:
            prepared = prepare(recipe, data)
        else:
            outcome = run(recipe, quiet=quiet, resume=resume, data=data)
    if dry_run:
        for note in prepared.notes:
            say(note, err=True)
        _print_plan(prepared)
    elif is_main():
        _print_outcome(outcome, recipe.data.retain)
        _print_next(Path(recipe.output), data, bool(outcome.page))
        if open_report and outcome.page:
            open_page(outcome.page)


def _display(quiet: bool) -> Display:
    """Return the display of progress; only the first of several processes shows it."""
    return Display() if quiet or not is_main() else display_for_terminal()


def _numbered(kind: str, names: list[str], quiet: bool) -> Callable[[str, Recipe], Reporter]:
    """Return a factory of reporters for several runs; each reporter first prints its run."""

    def reporter(name: str, recipe: Recipe) -> Reporter:
        from adapterhub.loop.report import reporter_for

        reports = reporter_for(Path(str(recipe.output)), recipe.train, quiet=quiet)
        reports.note(f"{kind} {names.index(name) + 1} of {len(names)}: {name}")
        return reports

    return reporter


def _swept(
    sweep: tuple[str, ...], file: str | None, overrides: list[str], flags: dict[str, Any]
) -> dict[str, Recipe]:
    """Read the recipe of each run of a sweep, by its name."""
    return {
        each.name: read(file, [*overrides, *each.words], nested_flags(flags))
        for each in parse_sweep(sweep)
    }


def _recipe_of(output: str | None) -> str | None:
    """Return the recipe of the run to resume in a folder, if there is one."""
    path = Path(output) / "recipe.yaml" if output else None
    return str(path) if path and is_file(path) else None


def _print_plan(prepared: Any) -> None:
    from adapterhub.loop.loop import process_memory
    from adapterhub.loop.report import rate_text
    from adapterhub.training.plan import plan_of

    process = process_memory()
    tried = _rehearsed(prepared)  # before the plan, whose small batches fragment the memory
    plan, recipe, data = plan_of(prepared, process), prepared.recipe, prepared.data
    epochs = round(plan.steps / plan.steps_per_epoch, 2)
    sites = [(site, method, f"{count:,}") for site, method, count in plan.sites]
    print_table(ShownTable(("site", "method", "parameters"), sites, title="Sites"))
    if plan.tasks:
        _print_tasks(plan.tasks)
    if plan.sources:
        _print_sources(plan.sources)
    share = f"{plan.trainable / plan.backbone:.2%} of the backbone"
    facts = {
        "backbone": f"{recipe.backbone}, {plan.backbone:,} parameters",
        "method": ", ".join(method.name for method in prepared.adapter.methods),
        "trainable": f"{plan.trainable:,} ({share}), {plan.head:,} in the head",
        "data": f"{len(data.train):,} training, {len(data.evaluation):,} evaluation examples"
        + f", {len(data.test):,} test examples" * bool(data.test),
        "labels": ", ".join(f"{name}: {n:,}" for name, n in plan.labels.items()) or "none",
        "steps": f"{plan.steps:,} with batch size {recipe.train.batch_size}, {epochs:g} epoch"
        + "s" * (epochs != 1),
        "learning rate": f"{rate_text(plan.rates)}, {recipe.train.schedule}",
        "tokens": f"{plan.tokens:,} per epoch, {plan.longest} in the longest example",
        "truncated": f"{plan.truncated:,} training examples, by train.max_length="
        f"{recipe.train.max_length}",
        **{f"memory, {part}": bytes_text(size) for part, size in plan.memory.items()},
        "memory, total": f"{bytes_text(sum(plan.memory.values()))} (estimate)",
        **tried,
    }
    print_facts(facts, width=24)


def _rehearsed(prepared: Any) -> dict[str, str]:
    """Run a few steps; return their memory instead of the estimate, and the time of the run."""
    from adapterhub.training.plan import rehearse

    try:
        with doing("trying a few steps"):
            measured = rehearse(prepared)
    except AdapterhubError as error:
        return {"time": f"not known, for a first step fails: {error.problem}"}
    if measured is None:
        return {"time": "not known: the run was not tried"}
    memory = (
        f"{bytes_text(measured.peak_memory)} "
        f"(measured in {measured.steps} steps, and an evaluation)"
    )
    each = f"{measured.step_seconds:.2g} s a step, as measured here and now"
    return {"memory, total": memory, "time": f"about {seconds_text(measured.seconds)} ({each})"}


def _print_tasks(tasks: Sequence[Any]) -> None:
    """Print the share of the run that each of several tasks gets."""
    columns = ("task", "kind", "rows", "share", "steps", "weight")
    rows = []
    for each in tasks:
        share, weight = f"{each.share:.1%}", f"{each.weight:g}"
        rows.append((each.name, each.task, f"{each.rows:,}", share, f"{each.steps:,}", weight))
    print_table(ShownTable(columns, rows, title="Tasks"))


def _print_sources(
    sources: Sequence[tuple[Any, float]],
    metrics: Mapping[str, float] | None = None,
    tested: Mapping[str, float] | None = None,
) -> None:
    """Print the rows, the share and the scores of each of several sources; then the test scores."""

    def cells(scores: Mapping[str, Mapping[str, float]], source: Any) -> list[str]:
        own = (by_source.get(source.name) for by_source in scores.values())
        return ["-" if value is None else f"{value:.4f}" for value in own]

    names = {each.name for each, _ in sources}
    scores, tests = (_scores_by_metric(names, each or {}) for each in (metrics, tested))
    columns = ("source", "rows", "evaluated", "share", *scores)
    rows = [
        (
            each.name,
            _count(each.train),
            _count(each.evaluation),
            f"{share:.1%}",
            *cells(scores, each),
        )
        for each, share in sources
    ]
    print_table(ShownTable(columns, rows, numbers=True))
    if tests:
        columns = ("source", "tested", *(f"{TEST}{name}" for name in tests))
        tested_rows = [(each.name, _count(each.test), *cells(tests, each)) for each, _ in sources]
        print_table(ShownTable(columns, tested_rows, numbers=True))


def _scores_by_metric(
    sources: Collection[str], metrics: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return {metric: {source: score}} of the metrics of single sources."""
    scores: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        source, _, metric = name.partition("/")
        if metric and source in sources:
            scores.setdefault(metric, {})[source] = value
    return scores


def _count(rows: int) -> str:
    return f"{rows:,}" if rows else "-"


def _print_outcome(outcome: Any, retain: str | None) -> None:
    from adapterhub.pages.page import retained_title

    result = outcome.result
    speed = f"{result.examples_per_second:,.0f} examples/s"
    if result.tokens_per_second:
        speed += f", {result.tokens_per_second:,.0f} tokens/s"
    shown = {
        name: shown_score(value, outcome.errors.get(name))
        for name, value in outcome.metrics.items()
        if not any(name.startswith(f"{source.name}/") for source, _ in outcome.sources)
    }
    facts = {
        "trained": f"{outcome.parameters:,} parameters, plus {outcome.head_parameters:,} in the "
        "head",
        "adapter": f"{outcome.folder}, {bytes_text(outcome.adapter_bytes)}",
        "time": f"{seconds_text(result.seconds)}, {speed}",
        "peak memory": bytes_text(result.peak_memory),
    }
    if outcome.page:
        facts["report"] = str(outcome.page)
    curves = _curves(outcome, shown)
    print_facts({name: curves.pop(name, text) for name, text in shown.items()}, width=12)
    if outcome.sources:
        _print_sources(outcome.sources, outcome.metrics, outcome.tested)
    of_sources = tuple(f"{source.name}/" for source, _ in outcome.sources)
    tested = {n: v for n, v in outcome.tested.items() if not n.startswith(of_sources or (" ",))}
    for number, (name, value) in enumerate(tested.items()):
        text = shown_score(value, outcome.errors.get(f"{TEST}{name}"))
        say(f"{'' if number else 'test':12} {name} {text}")
    for number, line in enumerate(outcome.word_lines):
        say(f"{'' if number else 'words':12} {line}")
    for number, line in enumerate(outcome.retained.lines if outcome.retained else ()):
        say(f"{'' if number else retained_title(retain):12} {line}")
    print_facts(facts | curves, width=12)
    for number, line in enumerate(outcome.verdict):
        say(f"{'' if number else 'best':12} {line}")
    if outcome.ranks:
        smaller, whole = outcome.ranks.least(_MOST_OF_AN_UPDATE), outcome.ranks.rank
        if 2 * smaller <= whole:
            kept = math.floor(100 * outcome.ranks.kept(smaller))
            say(f"{'rank':12} {smaller} of {whole} would keep {kept} % of the update:")
            place = shlex.quote(str(outcome.folder.parent))
            say(f"{'':12} adapterhub resize {place} --rank {smaller} --output DIR")


def _print_next(run: Path, data: RunData, has_page: bool) -> None:
    """Print the next commands to type; `has_page`: the run folder has a page to open."""
    place = shlex.quote(str(run))
    say(f"{'next':12} adapterhub predict {place} {data.typed_inputs()}")
    say(f"{'':12} adapterhub publish {place}")
    if has_page:
        say(f"{'':12} adapterhub report {place} --open")


def _curves(outcome: RunOutcome, facts: dict[str, str]) -> dict[str, str]:
    """Return the curves of the training loss and of the main metric, with its value."""
    main, losses = outcome.result.metric, outcome.losses()
    scores = [each[main] for each in outcome.result.history if math.isfinite(each[main])]
    curves = {}
    if len(scores) > 1 and main in facts:
        curves[main] = f"{facts[main]}  {sparkline(scores)}"
    if len(losses) > 1:
        curves["train loss"] = f"{losses[-1]:.4f}  {sparkline(losses)} from {losses[0]:.4f}"
    return curves


def print_rows(recipe: Recipe, count: int) -> None:
    """Print the first training rows of a recipe, wrapped to the terminal or to 80 columns."""
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


def _check_flags(staged: StagedRecipe, values: Mapping[str, object]) -> None:
    """Reject flags that only apply to single runs.

    Raises:
        ConfigError: such a flag is set.
    """
    if flags := [flag for flag, value in values.items() if value]:
        raise ConfigError(
            f"a recipe of stages trains several runs, here {len(staged.stages)}",
            hint=f"leave out {', '.join(flags)}",
        )


def _train_stages(staged: StagedRecipe, *, resume: bool, dry_run: bool, quiet: bool) -> None:
    """Train the stages of a recipe, and print a table of them."""
    from adapterhub.training.several import check_stages, run_stages

    if dry_run:
        _print_stages(staged, check_stages(staged, resume, dry=True))
        return
    with showing(_display(quiet)):
        outcomes = run_stages(staged, _numbered("stage", [*staged.stages], quiet), resume=resume)
    if is_main():
        _print_trained_stages(staged, outcomes)


def _print_stages(staged: StagedRecipe, rest: list[str]) -> None:
    rows = []
    for name, recipe in staged.stages.items():
        start = ", ".join(staged.starts[name] or (recipe.from_ or "-", *recipe.on))
        method = "by the task" if recipe.method is None else _spec_text(recipe.method)
        if recipe.method is None and start != "-":
            method = f"from {start}"
        done = "" if name in rest else " (finished)"
        task = "by the data" if recipe.task is None else parse_task(recipe.task).name
        source = str(recipe.data.train)
        rows.append((f"{name}{done}", start, task, method, source, str(recipe.output)))
    print_table(ShownTable(("stage", "from", "task", "method", "data", "output"), rows))


def _spec_text(spec: object) -> str:
    """Return a method spec as typed on the command line."""
    if isinstance(spec, list):
        return " + ".join(map(_spec_text, spec))
    if isinstance(spec, Mapping):
        return ", ".join(call_text(str(name), options or {}) for name, options in spec.items())
    return str(spec)


def _print_trained_stages(staged: StagedRecipe, outcomes: dict[str, RunOutcome]) -> None:
    """Print the metrics of each trained stage, and the next commands to type."""
    rows = []
    for name in staged.stages:
        if (outcome := outcomes.get(name)) is None:
            rows.append((name, "-", "-", "finished before"))
            continue
        named = outcome.metrics | {f"{TEST}{key}": each for key, each in outcome.tested.items()}
        metrics = ", ".join(
            f"{key} {shown_score(value, outcome.errors.get(key))}" for key, value in named.items()
        )
        result = outcome.result
        rows.append((name, f"{result.steps:,}", seconds_text(result.seconds), metrics))
    print_table(ShownTable(("stage", "steps", "time", "metrics"), rows))
    say(f"adapter  {Path(staged.output, 'adapter')}")
    say(f'next     adapterhub predict {shlex.quote(staged.output)} "a text"')


def _train_sweep(
    recipes: Mapping[str, Recipe], *, resume: bool, dry_run: bool, quiet: bool
) -> None:
    """Train the runs of a sweep, by their names, and print a table of them.

    The output of each recipe is the folder of the sweep. Runs that were started are resumed.

    Raises:
        TrainingError: at least one of the runs failed; the table shows which.
    """
    from adapterhub.training.run_data import check_recipe

    placed = {
        name: replace(recipe, output=str(Path(recipe.output) / name))
        for name, recipe in recipes.items()
    }
    for recipe in placed.values():
        check_recipe(recipe, resume, dry=dry_run)
    if dry_run:
        say(f"{len(placed)} runs")
        for recipe in placed.values():
            say(recipe.output)
        return
    with showing(_display(quiet)):
        with doing("loading torch"):
            from adapterhub.training.several import run_several

        names = {recipe.output: name for name, recipe in placed.items()}
        reporter = _numbered("run", [*placed], quiet)
        runs = run_several(
            [*placed.values()],
            lambda recipe: reporter(names[str(recipe.output)], recipe),
            resume=resume,
        )
        ended = {names[str(each.recipe.output)]: each for each in runs}
    if is_main():
        _print_sweep(ended)


def _print_sweep(ended: Mapping[str, Ended]) -> None:
    """Print the runs of a sweep, the best one first, and the next commands to type.

    Raises:
        TrainingError: some runs failed.
    """
    done = {name: each.outcome for name, each in ended.items() if each.outcome}
    done = {name: done[name] for name in sorted(done, key=lambda name: _rank(done[name]))}
    if done:
        print_table(_sweep_table(done))
        best, *others = (shlex.quote(str(ended[name].recipe.output)) for name in done)
        compare = [f"adapterhub compare {others[0]} {best}"] if others else []
        for number, line in enumerate([*compare, f"adapterhub publish {best}"]):
            say(f"{'' if number else 'next':12} {line}")
    failed = {name: each.error for name, each in ended.items() if each.error}
    if failed:
        raise TrainingError(
            f"{len(failed)} of {len(ended)} runs failed",
            offenders=[f"{name}: {one_line(error.problem)}" for name, error in failed.items()],
            hint="the other runs are complete",
        )


def _score(outcome: RunOutcome) -> float | None:
    return outcome.metrics.get(outcome.result.metric)


def _rank(outcome: RunOutcome) -> float:
    """Return a sort key that is smaller for a better run."""
    from adapterhub.pages.page import lower_is_better

    score = _score(outcome)
    if score is None or score != score:
        return float("inf")
    return score if lower_is_better(outcome.result.metric) else -score


def _sweep_table(done: Mapping[str, RunOutcome]) -> ShownTable:
    metrics = {outcome.result.metric for outcome in done.values()}
    columns = ("run", "/".join(sorted(metrics)), "trained", "adapter", "time")
    rows = []
    for name, outcome in done.items():
        score = _score(outcome)
        error = outcome.errors.get(outcome.result.metric)
        shown = "-" if score is None else shown_score(score, error)
        sizes = f"{outcome.parameters:,}", bytes_text(outcome.adapter_bytes)
        rows.append((name, shown, *sizes, seconds_text(outcome.result.seconds)))
    return ShownTable(columns, rows, numbers=True)
