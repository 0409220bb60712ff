"""`adapterhub predict`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._answers import HowToWrite, Shape, answers, print_pieces
from adapterhub.cli._format import say, say_text
from adapterhub.cli._options import (
    backbone_place_option,
    check_engine,
    data_form_options,
    head_option,
    max_length_option,
    registry_option,
    require_signature_option,
    several_options,
    task_option,
    text_column_option,
)
from adapterhub.config.user_folders import is_file, is_folder, is_there
from adapterhub.errors import ConfigError, DataError, one_line
from adapterhub.status import counting, doing, reading

if TYPE_CHECKING:
    from adapterhub.data.columns import ColumnChoice
    from adapterhub.data.table import Table
    from adapterhub.inference.open import Predictor
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.inference.table_job import TableOutput
    from adapterhub.tasks import Task


_TABLE_OPTIONS = ("source", "output", "route_column", "adapters", "into", "engine", "workers",
                  "ray_address")  # fmt: skip
_WRITING_OPTIONS = ("max_new_tokens", "temperature", "top_p", "beams", "stream")
_USUAL = {"into": "prediction", "engine": "local"}
_table_options = several_options(
    click.option(
        "--input", "source", metavar="FILES", help="Parquet: a file, folder, pattern or URL."
    ),
    click.option(
        "--output",
        metavar="PATH",
        help="Write a table: .csv, .tsv, .jsonl or .parquet; with --input also a folder or URL.",
    ),
    click.option(
        "--route-column", metavar="COLUMN", help="With --input: it names each row's adapter."
    ),
    click.option(
        "--adapter",
        "adapters",
        multiple=True,
        metavar="NAME=ADAPTER",
        help="With --route-column: an adapter by its name in the column; repeat it.",
    ),
    click.option(
        "--into", default="prediction", show_default=True, help="With --input: the new column."
    ),
    click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="With --input: predict in this process, or on the workers of a Ray cluster.",
    ),
    click.option("--workers", type=int, metavar="N", help="Ray: number of workers."),
    click.option("--ray-address", metavar="HOST:PORT", help="Ray: a running cluster."),
)


_writing_options = several_options(
    click.option("--max-new-tokens", type=int, help="Generation: the longest text, in tokens."),
    click.option("--temperature", type=float, help="Generation: randomness; 0 is greedy."),
    click.option("--top-p", type=float, help="Generation: sample from this share of the tokens."),
    click.option("--beams", type=int, help="Generation: beams of the search; 1 is greedy."),
    click.option(
        "--stream", is_flag=True, default=None, help="Print a text while it is generated."
    ),
)


@click.command("predict")
@click.argument("reference", metavar="ADAPTER", required=False)
@click.argument("texts", nargs=-1, metavar="[TEXT | FILE]...")
@click.option("--data", help="File of rows or texts, or - for standard input.")
@text_column_option
@click.option(
    "--pair",
    multiple=True,
    help="With TEXT: the second or another text; with --data: its column.",
)
@data_form_options
@click.option(
    "--keep-empty", is_flag=True, help="Return an empty prediction for an input without text."
)
@click.option("--all", "every", is_flag=True, default=None, help="Show each label's probability.")
@_writing_options
@_table_options
@task_option
@max_length_option
@head_option
@backbone_place_option
@registry_option
@require_signature_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    reference: str | None,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: tuple[str, ...],
    task: str | None,
    head: str | None,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
    **more: Any,
) -> None:
    """Predict on each TEXT, each row of a FILE or --input, or each line of standard input.

    ADAPTER is a run folder, an adapter folder or a published name. With --output, all columns of
    the FILE and the predictions are written to a table. Without a text on a terminal, each line
    that you type is answered at once; language models keep the conversation. On standard input,
    tabs separate the texts of an example. --input takes Parquet files of any size; if it is
    stopped, the same command goes on.
    """
    tables = {name: more.pop(name) for name in _TABLE_OPTIONS}
    limit, keep = ({name: more.pop(name)} for name in ("max_length", "keep_empty"))
    if tables["source"] is not None:
        _refuse_beside_input(texts, {"--data": data, "--json": as_json or None, **more})
        tables |= limit | keep
        _predict_table(reference, text, pair, task, head, backbone, registry, **tables)
        return
    reference = _without_input(reference, tables)
    shape = Shape(as_json, bool(more.pop("every")), tables["output"])
    shape.check()
    from adapterhub.backbones.torch_free_checks import check_backbone_options
    from adapterhub.inference.record import read_training_record

    if backbone:
        check_backbone_options(backbone)
    record = read_training_record(reference, registry, head, task)
    writing = _writing(record.task, {name: more.pop(name) for name in _WRITING_OPTIONS}, shape)
    if pair and record.task.fields(record.data) == 1:
        raise DataError("--pair gives a second text, but the adapter was trained on single texts")
    texts, data = _file_among(texts, data, record.task)
    typed = not texts and data is None and sys.stdin.isatty()
    shape.check_use(record.task, typed)
    inputs = None if typed else _read_inputs(record, texts, data, text, pair, more, **keep)
    if inputs is not None and shape.is_picture:
        shape.files(len(inputs.examples))
    with doing("loading torch"):
        from adapterhub.inference.open import open_adapter

    opened = open_adapter(reference, backbone, registry=registry, head=head, task=task, **limit)
    if inputs is None:
        from adapterhub.cli._live import answer_lines

        answer_lines(opened, pair, writing, shape)
    elif writing is not None and writing.stream:
        for example in inputs.examples:
            print_pieces(opened.writing(writing.options).streamed([example], writing.options))
    else:
        _predict(opened, inputs, writing, shape, **keep)


@dataclass(frozen=True)
class _Inputs:
    """The examples to predict on, and the columns of their rows if they come from a file."""

    examples: list[Any]
    choice: ColumnChoice | None = None
    unit: str = "text"

    @property
    def table(self) -> Table | None:
        """The table of the rows, if they come from a file."""
        return self.choice.table if self.choice else None

    @property
    def places(self) -> list[str]:
        """The names of the examples in errors."""
        count = len(self.examples)
        places = self.choice.places(count) if self.choice else []
        return places or [f"{self.unit} {number}" for number in range(1, count + 1)]


def _predict(
    opened: Predictor,
    inputs: _Inputs,
    writing: HowToWrite | None,
    shape: Shape,
    *,
    keep_empty: bool,
) -> None:
    """Predict on all examples; print the predictions, or write them to a table."""
    with doing("predicting"):
        empty = {"keep_empty": keep_empty, "places": inputs.places}
        predictions = answers(opened, inputs.examples, writing, **empty)
    if cut := opened.cut_note(predictions):
        say(cut, err=True)
    if shape.is_picture:
        for file, example in zip(shape.save_pictures(predictions), inputs.examples, strict=True):
            say_text(f"{one_line(str(file))}\t{one_line(opened.task.shown(example)[0], 60)}")
        return
    if shape.output is None:
        for example, prediction in zip(inputs.examples, predictions, strict=True):
            shape.show(opened.task, example, prediction)
        return
    from adapterhub.inference.table_file import input_columns, with_predictions, write_table_file

    columns = input_columns(inputs.table, opened.task, inputs.examples)
    cuts = bool(opened.task.limits(opened.setting))
    table = with_predictions(columns, predictions, shape.every, cuts=cuts)
    write_table_file(Path(shape.output), table)
    say(f"{len(predictions):,} rows: {shape.output}")


def _writing(task: Task, values: dict[str, Any], shape: Shape) -> HowToWrite | None:
    """Return the generation options; None for a task that does not generate text.

    Raises:
        ConfigError: generation options do not apply to the task, or are out of range.
    """
    from adapterhub.tasks.common.language_models import Generation, Writing

    stream = bool(values.pop("stream"))
    options = Writing(**values)
    if not isinstance(task, Generation):
        flags = [*options.given, *["stream"] * stream]
        if flags:
            shown = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
            raise ConfigError(
                f"{shown}: {task.name} does not generate texts",
                expected="an adapter for causal-lm, seq2seq or another task that writes texts",
            )
        return None
    if stream and (shape.as_json or shape.output):
        raise ConfigError("--stream with --json or --output", hint="one of them")
    if stream and options.applied(task).beams != 1:  # type: ignore[attr-defined]
        raise ConfigError("--stream with several beams", hint="--beams 1")
    return HowToWrite(options, stream)


_TABLES = (".csv", ".tsv", ".txt", ".jsonl", ".json", ".parquet", ".xlsx")


def _file_among(
    texts: tuple[str, ...], data: str | None, task: Task
) -> tuple[tuple[str, ...], str | None]:
    """Return the texts and the file; a single text that names a file is used as the file.

    Raises:
        DataError: texts name several tables, or a missing one.
    """
    names = [text for text in texts if text.lower().endswith(_TABLES) and not text.count(" ")]
    if len(texts) == 1 and data is None:
        (name,) = texts
        is_table = bool(names) or is_folder(name) if task.decodes else is_file(name)
        if is_table and is_there(name):
            return (), name
    if names and len(names) == len(texts):
        exists = is_there(names[0])
        raise DataError(
            f"{len(names)} files" if exists else f"no such file: {names[0]}",
            expected="one file of rows, or texts",
            hint="--input 'FOLDER/*.parquet' for several files; echo TEXT | adapterhub predict "
            "ADAPTER for a text that looks like a file",
        )
    return texts, data


def _read_inputs(
    record: TrainingRecord,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: tuple[str, ...],
    form: dict[str, Any],
    *,
    keep_empty: bool,
) -> _Inputs:
    """Return the examples of the command line, of a file or of standard input."""
    from adapterhub.inference.inputs import read_inputs

    task = record.task
    if texts:
        return _Inputs([task.example([first, *pair], record.data) for first in texts])
    if data in (None, "-"):
        return _Inputs(_read_lines(record), unit="line")
    columns = {name: value for name, value in form.items() if value is not None}
    columns |= {"text": text or record.data.text, "pair": pair[0] if pair else record.data.pair}
    with reading(str(data)):
        examples, choice = read_inputs(
            task, str(data), replace(record.data, **columns), keep_empty=keep_empty
        )
    for note in choice.notes:
        say(note, err=True)
    return _Inputs(examples, choice)


def _typed() -> str:
    """Read standard input to its end, as UTF-8 whatever the terminal's encoding."""
    from adapterhub.data.delimited import decode_text

    raw = getattr(sys.stdin, "buffer", None)  # a test's stream may only provide text
    return sys.stdin.read() if raw is None else decode_text(raw.read(), "standard input")


def _read_lines(record: TrainingRecord) -> list[Any]:
    """Read the examples on standard input, one per line, texts separated by tabs."""
    from adapterhub.inference.inputs import texts_of

    if sys.stdin.isatty():
        say("enter one text per line, then Ctrl-D:", err=True)
    lines = [line.rstrip("\n") for line in io.StringIO(_typed(), newline=None)]
    if not lines:
        raise DataError("nothing to predict on", hint='adapterhub predict ADAPTER "a text"')
    task, options = record.task, record.data
    return [task.example(texts_of([line], task, options), options) for line in lines]


def _refuse_beside_input(texts: Sequence[str], others: dict[str, Any]) -> None:
    """Reject arguments that do not fit --input.

    Raises:
        ConfigError: texts, or options of other kinds of data, are set.
    """
    names = [name for name, value in others.items() if value is not None]
    flags = (name.replace("every", "all").replace("_", "-") for name in names)
    shown = [name if name.startswith("-") else f"--{name}" for name in flags]
    if texts or shown:
        raise ConfigError(
            f"--input with {', '.join([*shown, *map(repr, texts)][:5])}",
            expected="Parquet files alone, whose predictions are written to --output",
            hint="--data FILE for files of other formats",
        )


def _without_input(reference: str | None, tables: dict[str, Any]) -> str:
    """Return the adapter, and reject options of Parquet files without --input.

    Raises:
        ConfigError: such an option is set.
        UsageError: the adapter is missing.
    """
    unused = (n for n, v in tables.items() if v not in (None, (), _USUAL.get(n)))
    refused = [name for name in unused if name != "output"]
    if refused:
        flags = [f"--{n.replace('_', '-').replace('adapters', 'adapter')}" for n in refused]
        raise ConfigError(f"{', '.join(flags)} without --input", hint="--input FILES.parquet")
    if reference is None:
        raise click.UsageError("Missing argument 'ADAPTER'.")
    return reference


def _predict_table(
    reference: str | None,
    text: str | None,
    pair: Sequence[str],
    task: str | None,
    head: str | None,
    backbone: str | None,
    registry: str | None,
    *,
    max_length: int | None,
    keep_empty: bool,
    source: str,
    output: str | None,
    route_column: str | None,
    adapters: Sequence[str],
    into: str,
    engine: str,
    workers: int | None,
    ray_address: str | None,
) -> None:
    """Predict on all rows of Parquet files; continue after an interrupted call.

    Raises:
        ConfigError: options are missing or conflict.
    """
    named = _named(reference, route_column, adapters)
    if output is None:
        raise ConfigError(
            "--input without --output", hint="--output FOLDER, or --output FILE.parquet"
        )
    check_engine(engine, workers, ray_address)
    with doing("loading torch"):
        from adapterhub.inference.open import AdapterSource
        from adapterhub.inference.table_job import TableJob, TableOutput, plan_table

    sources = {name: AdapterSource(each, head, task=task) for name, each in named.items()}
    job = TableJob(
        source,
        sources,
        route_column,
        into,
        backbone,
        registry,
        max_length=max_length,
        keep_empty=keep_empty,
    )
    with doing(f"reading {source}"):
        planned = plan_table(job, text, pair[0] if pair else None)
    _predict_missing(TableOutput(output, planned), engine, workers, ray_address)
    rows = sum(part.rows for part in planned.parts)
    say(f"{rows:,} rows in {len(planned.parts):,} parts: {output}")


def _predict_missing(
    written: TableOutput, engine: str, workers: int | None, address: str | None
) -> None:
    """Predict and write the missing parts; report their number."""
    from adapterhub.inference.table_job import predict_here, predict_on_ray

    missing, job, total = written.missing, written.planned.job, len(written.planned.parts)
    if done := total - len(missing):
        say(f"{done:,} of {total:,} parts are there already", err=True)
    if missing:
        on_ray = engine == "ray"
        parts = (
            predict_on_ray(job, missing, workers, address) if on_ray else predict_here(job, missing)
        )
        with counting(sum(part.rows for part in missing), "predicting rows") as progress:
            for part, predicted in parts:
                written.write(part, predicted)
                progress(part.rows)
    written.finish()


def _named(
    reference: str | None, route_column: str | None, adapters: Sequence[str]
) -> dict[str, str]:
    """Return the adapters by their names in the column; "" is the adapter of all rows.

    Raises:
        ConfigError: the adapter is missing, or there are names without a column or the reverse.
    """
    if route_column is None:
        if adapters or reference is None:
            raise ConfigError(
                "--adapter without --route-column" if adapters else "no adapter is named",
                hint="adapterhub predict ADAPTER --input FILES, or --route-column COLUMN "
                "--adapter NAME=ADAPTER",
            )
        return {"": reference}
    named = dict(text.partition("=")[::2] for text in adapters)
    wrong = [text for text in adapters if not all(text.partition("=")) or is_folder(text)]
    if wrong or not named or reference is not None or len(named) < len(adapters):
        raise ConfigError(
            f"--route-column {route_column} needs the adapters that its cells name",
            offenders=wrong or [f"ADAPTER {reference}" for _ in [0] if reference is not None],
            expected="--adapter NAME=ADAPTER once for each name, and no ADAPTER before it",
            hint="--adapter polite=runs/polite --adapter urgent=urgent@v2",
        )
    return named
