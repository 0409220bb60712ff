"""`adapterhub predict`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_json, say, say_text
from adapterhub.cli._options import (
    backbone_place_option,
    check_engine,
    data_form_options,
    head_option,
    registry_option,
    require_signature_option,
    several_options,
    task_option,
    text_column_option,
)
from adapterhub.errors import ConfigError, DataError, one_line
from adapterhub.status import counting, doing, reading

if TYPE_CHECKING:
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.inference.table_job import TableOutput


_TABLE_OPTIONS = ("source", "output", "route_column", "adapters", "into", "engine", "workers",
                  "ray_address")  # fmt: skip
_USUAL = {"into": "prediction", "engine": "local"}
_table_options = several_options(
    click.option(
        "--input", "source", metavar="FILES", help="Parquet: a file, folder, pattern or URL."
    ),
    click.option(
        "--output", metavar="PATH", help="With --input: a folder or URL, or one Parquet file."
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
    click.option("--workers", type=int, metavar="N", help="Ray: how many workers."),
    click.option("--ray-address", metavar="HOST:PORT", help="Ray: a running cluster."),
)


@click.command("predict")
@click.argument("reference", metavar="ADAPTER", required=False)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--data", help="File of texts, or - for standard input.")
@text_column_option
@click.option(
    "--pair",
    multiple=True,
    help="With TEXT: the second or a further text; with --data: its column.",
)
@data_form_options
@_table_options
@task_option
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
    """Predict on each TEXT, each row of --data or --input, or each line of standard input.

    ADAPTER is a run folder, an adapter folder or a published name. On standard input, tabs
    separate the texts of an example. --input takes Parquet files of any size; their rows and
    predictions are written to --output. If it is stopped, the same command goes on.
    """
    tables = {name: more.pop(name) for name in _TABLE_OPTIONS}
    if tables["source"] is not None:
        _refuse_beside_input(texts, {"--data": data, "--json": as_json or None, **more})
        _predict_table(reference, text, pair, task, head, backbone, registry, **tables)
        return
    _refuse_without_input(tables)
    if reference is None:
        raise click.UsageError("Missing argument 'ADAPTER'.")
    from adapterhub.backbones.early_checks import check_backbone_options
    from adapterhub.inference.record import read_training_record

    if backbone:
        check_backbone_options(backbone)
    record = read_training_record(reference, registry, head, task)
    examples = _examples(record, texts, data, text, pair, more)
    with doing("loading torch"):
        from adapterhub.inference.open import open_adapter

    opened = open_adapter(reference, backbone, registry=registry, head=head, task=task)
    for example, prediction in zip(examples, opened.predict(examples), strict=True):
        shown = record.task.shown(example)
        if as_json:
            print_json({record.task.input_name: shown[0], **prediction.as_dict()})
        else:
            # The whole text, however long: it is the user's own, or was asked for.
            say_text("\t".join(one_line(t, sys.maxsize) for t in (str(prediction), *shown)))


def _examples(
    record: TrainingRecord,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: tuple[str, ...],
    form: dict[str, Any],
) -> list[Any]:
    """Return the examples of the command line, of a file or of standard input."""
    from adapterhub.data.options import PREDICT

    task = record.task
    if pair and task.fields(record.data) == 1:
        raise DataError("--pair gives a second text, but the adapter was trained on single texts")
    if texts:
        return [task.example([first, *pair], record.data) for first in texts]
    if data in (None, "-"):
        return _read_lines(record)
    given = {name: value for name, value in form.items() if value is not None}
    given |= {"text": text or record.data.text, "pair": pair[0] if pair else record.data.pair}
    options = replace(record.data, **given, skip_empty=False)
    with reading(str(data)):
        _, choice = task.fitted(str(data), options, PREDICT, labelled=False)
        examples = task.read(str(data), choice.options, PREDICT, labelled=False)
    for note in choice.notes:
        say(note, err=True)
    return examples


def _typed() -> str:
    """Read standard input to its end; it is UTF-8 whatever the terminal's encoding is."""
    from adapterhub.data.decode import decode_text

    raw = getattr(sys.stdin, "buffer", None)  # a test's stream may have texts only
    return sys.stdin.read() if raw is None else decode_text(raw.read(), "standard input")


def _read_lines(record: TrainingRecord) -> list[Any]:
    """Read the examples on standard input, one per line, texts separated by tabs."""
    if sys.stdin.isatty():
        say("enter one text per line, then Ctrl-D:", err=True)
    lines = [line.rstrip("\n") for line in io.StringIO(_typed(), newline=None)]
    if not lines:
        raise DataError("nothing to predict on", hint='adapterhub predict ADAPTER "a text"')
    tabs = record.task.fields(record.data) - 1
    return [record.task.example(line.split("\t", tabs), record.data) for line in lines]


def _refuse_beside_input(texts: Sequence[str], others: dict[str, Any]) -> None:
    """Refuse what does not go with --input.

    Raises:
        ConfigError: texts, or options of other kinds of data, are given.
    """
    found = [name for name, value in others.items() if value is not None]
    given = [name if name.startswith("-") else f"--{name}" for name in found]
    if texts or given:
        raise ConfigError(
            f"--input with {', '.join([*given, *map(repr, texts)][:5])}",
            expected="Parquet files alone, whose predictions are written to --output",
            hint="--data FILE for files of other formats",
        )


def _refuse_without_input(tables: dict[str, Any]) -> None:
    """Refuse options of Parquet files without --input.

    Raises:
        ConfigError: some are given.
    """
    given = [n for n, v in tables.items() if v not in (None, (), _USUAL.get(n))]
    if given:
        flags = [f"--{n.replace('_', '-').replace('adapters', 'adapter')}" for n in given]
        raise ConfigError(f"{', '.join(flags)} without --input", hint="--input FILES.parquet")


def _predict_table(
    reference: str | None,
    text: str | None,
    pair: Sequence[str],
    task: str | None,
    head: str | None,
    backbone: str | None,
    registry: str | None,
    *,
    source: str,
    output: str | None,
    route_column: str | None,
    adapters: Sequence[str],
    into: str,
    engine: str,
    workers: int | None,
    ray_address: str | None,
) -> None:
    """Predict on all rows of Parquet files; go on where an earlier call was stopped.

    Raises:
        ConfigError: options are missing, or do not go together.
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
    job = TableJob(source, sources, route_column, into, backbone, registry)
    with doing(f"reading {source}"):
        planned = plan_table(job, text, pair[0] if pair else None)
    _predict_missing(TableOutput(output, planned), engine, workers, ray_address)
    rows = sum(part.rows for part in planned.parts)
    say(f"{rows:,} rows in {len(planned.parts):,} parts: {output}")


def _predict_missing(
    written: TableOutput, engine: str, workers: int | None, address: str | None
) -> None:
    """Predict and write the parts that are not there yet; say how many are."""
    from adapterhub.inference.table_job import predict_here, predict_on_ray

    missing, job, total = written.missing, written.planned.job, len(written.planned.parts)
    if done := total - len(missing):
        say(f"{done:,} of {total:,} parts are there already", err=True)
    if missing:
        on_ray = engine == "ray"
        found = (
            predict_on_ray(job, missing, workers, address) if on_ray else predict_here(job, missing)
        )
        with counting(sum(part.rows for part in missing), "predicting rows") as progress:
            for part, predicted in found:
                written.write(part, predicted)
                progress(part.rows)
    written.finish()


def _named(
    reference: str | None, route_column: str | None, adapters: Sequence[str]
) -> dict[str, str]:
    """Return the adapters by their names in the column; "" is that of all rows.

    Raises:
        ConfigError: there is no adapter, or names without a column, or a column without names.
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
    wrong = [text for text in adapters if not all(text.partition("="))]
    if wrong or not named or reference is not None or len(named) < len(adapters):
        raise ConfigError(
            f"--route-column {route_column} needs the adapters that its cells name",
            offenders=wrong or [f"ADAPTER {reference}" for _ in [0] if reference is not None],
            expected="--adapter NAME=ADAPTER once for each name, and no ADAPTER before it",
            hint="--adapter polite=runs/polite --adapter urgent=urgent@v2",
        )
    return named
