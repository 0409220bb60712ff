"""`adapterhub predict --input`: predictions on Parquet files, into Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import say
from adapterhub.errors import ConfigError
from adapterhub.status import counting, doing

if TYPE_CHECKING:
    from adapterhub.inference.table_job import TableOutput

TABLE_OPTIONS = ("source", "output", "route_column", "adapters", "into", "engine", "workers",
                 "ray_address")  # fmt: skip
_USUAL = {"into": "prediction", "engine": "local"}


def refuse_beside_input(texts: Sequence[str], others: dict[str, Any]) -> None:
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


def refuse_without_input(tables: dict[str, Any]) -> None:
    """Refuse options of Parquet files without --input.

    Raises:
        ConfigError: some are given.
    """
    given = [n for n, v in tables.items() if v not in (None, (), _USUAL.get(n))]
    if given:
        flags = [f"--{n.replace('_', '-').replace('adapters', 'adapter')}" for n in given]
        raise ConfigError(f"{', '.join(flags)} without --input", hint="--input FILES.parquet")


def table_options(command: Any) -> Any:
    """Add the options of predictions on Parquet files."""
    flags = (
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
    for flag in reversed(flags):
        command = flag(command)
    return command


def predict_table(
    reference: str | None,
    *,
    source: str,
    output: str | None,
    text: str | None,
    pair: Sequence[str],
    task: str | None,
    head: str | None,
    backbone: str | None,
    registry: str | None,
    route_column: str | None,
    adapters: Sequence[str],
    into: str,
    engine: str,
    workers: int | None,
    ray_address: str | None,
) -> None:
    """Predict on all rows of Parquet files; go on where an earlier call was stopped.

    Args:
        reference: the adapter of all rows.
        source: the files.
        output: where the rows and their predictions are written.
        text: the text column.
        pair: the column with the second texts.
        task: the task of adapters that record none.
        head: which of several heads.
        backbone: where to load the backbone from.
        registry: the folder of the local registry.
        route_column: the column that names each row's adapter.
        adapters: NAME=ADAPTER for each name.
        into: the name of the new column.
        engine: local or ray.
        workers: the workers of the cluster.
        ray_address: the address of the cluster.

    Raises:
        ConfigError: options are missing, or do not go together.
    """
    named = _named(reference, route_column, adapters)
    if output is None:
        raise ConfigError(
            "--input without --output", hint="--output FOLDER, or --output FILE.parquet"
        )
    _check_engine(engine, workers, ray_address)
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
    """Predict and write the parts that are not there yet; say how many are.

    Args:
        written: the output.
        engine: local or ray.
        workers: the workers of the cluster.
        address: the address of the cluster.
    """
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


def _check_engine(engine: str, workers: int | None, address: str | None) -> None:
    """Refuse options of Ray without it, and Ray where it is not installed.

    Args:
        engine: local or ray.
        workers: the workers of the cluster.
        address: the address of the cluster.

    Raises:
        ConfigError: they do not go together.
    """
    given = {"--workers": workers, "--ray-address": address}
    if engine == "local" and (of_ray := [n for n, v in given.items() if v is not None]):
        raise ConfigError(f"{' and '.join(of_ray)} without Ray", hint="--engine ray")
    if engine == "ray":
        from adapterhub.ray_cluster import import_ray

        import_ray()  # before anything is read


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
