"""Predict on the rows of Parquet files, part by part: a part is a row group of a file.

A column may name the adapter of each row. The rows of an adapter are predicted together, and come
back in the order of the file, with all their columns and one more: the prediction as JSON text, as
`adapterhub predict --json` prints it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from adapterhub._version import __version__
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.parquet import opened_parquet
from adapterhub.data.row_stream import files_digest, list_files
from adapterhub.data.table import Table, table_of_rows
from adapterhub.data.tables import keep_table
from adapterhub.errors import ConfigError, DataError
from adapterhub.inference.open_several import AdapterSource, open_several
from adapterhub.inference.record import read_training_record
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.pull import pull

ONLY = ""  # the name of the adapter of all rows
_AT_ONCE = 8192  # rows that are encoded together


@dataclass(frozen=True)
class TablePart:
    """Rows that are predicted and written together."""

    number: int
    file: str
    group: int
    rows: int

    @property
    def name(self) -> str:
        """The name of the file with its predictions."""
        return f"part-{self.number:06}.parquet"


@dataclass(frozen=True)
class TableJob:
    """What is predicted on which rows.

    Attributes:
        source: a Parquet file, a folder or pattern of them, or a URL of one of these.
        adapters: the adapters, by the names in the column `route`.
        route: the column that names the adapter of a row; None: there is one adapter.
        into: the name of the new column.
        backbone: where to load the backbone from.
        registry: the folder of the local registry.
        options: the columns of the texts, for each adapter.
        batch_size: rows per forward pass.
    """

    source: str
    adapters: Mapping[str, AdapterSource]
    route: str | None = None
    into: str = "prediction"
    backbone: str | None = None
    registry: str | None = None
    options: Mapping[str, DataOptions] = field(default_factory=dict)
    batch_size: int = 64


@dataclass(frozen=True)
class PlannedTable:
    """A job whose columns and adapters were checked, its parts, and what identifies it."""

    job: TableJob
    parts: tuple[TablePart, ...]
    identity: str


def plan_table(job: TableJob, text: str | None = None, pair: str | None = None) -> PlannedTable:
    """Divide a job into parts, and check it; no model is loaded.

    Args:
        job: the job.
        text: the column with the texts, if not the one of the training.
        pair: the column with the second texts, likewise.

    Raises:
        DataError: the files are missing, are no Parquet files, differ in their columns, lack a
            column, or name an adapter that is not given.
        RegistryError: an adapter cannot be found.
        FileError: the files of an adapter are broken.
    """
    files = list_files(job.source)
    parts, schema = _parts(files)
    if job.into in schema.names:
        raise DataError(
            f"{job.source} has a column {job.into!r} already", hint="--into NAME of the new column"
        )
    if job.route is not None:
        _check_route(job, parts, schema)
    folders = {name: pull(each.reference, registry=job.registry) for name, each in
               job.adapters.items()}  # fmt: skip
    adapters = {
        name: replace(each, digest=digest_of(folders[name])) for name, each in job.adapters.items()
    }
    options = {
        name: _options(job, each, parts[0], text, pair) for name, each in job.adapters.items()
    }
    job = replace(job, adapters=adapters, options=options)
    record = {
        "rows": files_digest(files),
        "adapters": {name: [each.digest, each.head, each.task] for name, each in adapters.items()},
        "columns": {name: [each.text, each.pair] for name, each in options.items()},
        "route": job.route,
        "into": job.into,
        "version": __version__,
    }
    identity = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return PlannedTable(job, tuple(parts), identity)


class TableWorker:
    """Predicts parts of a job, in this process or on a node of a cluster.

    Args:
        job: the job.
        threads: the threads that torch may use; None: as many as it likes.
        driver: the version and the working folder where the job was started.
    """

    def __init__(
        self, job: TableJob, threads: int | None = None, driver: tuple[str, str] | None = None
    ) -> None:
        import torch

        version, folder = driver or (__version__, ".")
        if version != __version__:
            raise ConfigError(
                f"this node has adapterhub {__version__}, the job was started with {version}",
                expected="the same release of adapterhub on every node",
            )
        if threads:
            torch.set_num_threads(threads)
        if Path(folder).is_dir():  # paths of adapters and rows may be relative
            os.chdir(folder)
        self.job = job
        self.adapters = open_several(job.adapters, job.backbone, job.registry)

    def predict(self, part: TablePart) -> Any:
        """Return the rows of a part with their predictions, a pyarrow table.

        Raises:
            DataError: rows cannot be read, or are invalid.
        """
        import pyarrow

        done = [self._predicted(rows, start, part) for rows, start in _slices(part)]
        return pyarrow.concat_tables(done)

    def _predicted(self, rows: Any, start: int, part: TablePart) -> Any:
        """Add the predictions of some rows, of which the first is number `start` of its group."""
        import pyarrow

        job = self.job
        names = [ONLY] * rows.num_rows if job.route is None else rows[job.route].to_pylist()
        found: list[str] = [""] * rows.num_rows
        for name in dict.fromkeys(names):
            indices = [index for index, each in enumerate(names) if each == name]
            own = rows.take(indices)
            places = [f"{start + index + 1} of group {part.group}" for index in indices]
            examples = self._examples(name, own, places, part.file)
            predictions = self.adapters.predict(name, examples, job.batch_size)
            for index, prediction in zip(indices, predictions, strict=True):
                found[index] = json.dumps(prediction.as_dict(), ensure_ascii=False)
        return rows.append_column(job.into, pyarrow.array(found, pyarrow.string()))

    def _examples(self, name: str, rows: Any, places: Sequence[str], file: str) -> list[Any]:
        options, task = self.job.options[name], self.adapters.predictors[name].task
        table = _table(rows, places, file)
        keep_table(table, file, options, PREDICT)
        return task.read(file, options, PREDICT, labelled=False)


def _parts(files: Mapping[str, str]) -> tuple[list[TablePart], Any]:
    """Return a part for each row group, and the schema of all files.

    Raises:
        DataError: a file is no Parquet file, or has other columns than the first one.
    """
    parts: list[TablePart] = []
    schema: Any = None
    for file in files:
        with opened_parquet(
            file, "Parquet files for --input; --data reads other formats"
        ) as opened:
            found = opened.schema_arrow.remove_metadata()
            if schema is not None and not found.equals(schema):
                raise DataError(
                    f"{file} has other columns than {next(iter(files))}",
                    offenders=[f"{field.name}: {field.type}" for field in found],
                    expected=", ".join(f"{field.name}: {field.type}" for field in schema),
                )
            schema = found
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                if rows:
                    parts.append(TablePart(len(parts), file, group, rows))
    if not parts:
        raise DataError(f"{', '.join(files)}: no rows")
    return parts, schema


def _slices(part: TablePart) -> Iterator[tuple[Any, int]]:
    """Yield the rows of a part, some at a time, and the number of the first of them."""
    import pyarrow

    start = 0
    with opened_parquet(part.file) as opened:
        for batch in opened.iter_batches(batch_size=_AT_ONCE, row_groups=[part.group]):
            yield pyarrow.Table.from_batches([batch]).replace_schema_metadata(None), start
            start += batch.num_rows


def _table(rows: Any, places: Sequence[str], file: str) -> Table:
    names = rows.column_names
    return table_of_rows(file, names, places, lambda name: rows.column(name).to_pylist())


def _check_route(job: TableJob, parts: Sequence[TablePart], schema: Any) -> None:
    """Refuse a column that is missing, or names adapters that are not given.

    Raises:
        DataError: it does.
    """
    unknown: dict[str, int] = {}
    if job.route not in schema.names:
        raise DataError(
            f"{job.source} has no column {job.route!r}",
            expected=f"one of {', '.join(schema.names)}",
            hint="--route-column COLUMN",
        )
    for file in dict.fromkeys(part.file for part in parts):
        with opened_parquet(file) as opened:
            for batch in opened.iter_batches(batch_size=65_536, columns=[job.route]):
                for name in batch.column(0).to_pylist():
                    if name not in job.adapters:
                        unknown[str(name)] = unknown.get(str(name), 0) + 1
    if unknown:
        raise DataError(
            f"the column {job.route!r} names adapters that are not given",
            offenders=[f"{name!r}: {count:,} rows" for name, count in unknown.items()],
            expected=f"one of {', '.join(job.adapters)}",
            hint="--adapter NAME=ADAPTER for each name in the column",
        )


def _options(
    job: TableJob, source: AdapterSource, part: TablePart, text: str | None, pair: str | None
) -> DataOptions:
    """Return the columns that an adapter reads, chosen in the first rows.

    Args:
        job: the job.
        source: the adapter.
        part: the first part.
        text: the column with the texts, if the user named it.
        pair: the column with the second texts, likewise.
    """
    record = read_training_record(source.reference, job.registry, source.head, source.task)
    options = replace(
        record.data,
        text=text or record.data.text,
        pair=pair or record.data.pair,
        skip_empty=False,
    )
    rows, _ = next(_slices(part))
    names = [str(number) for number in range(1, rows.num_rows + 1)]
    table = _table(rows, names, part.file)
    keep_table(table, part.file, options, PREDICT)
    _, choice = record.task.fitted(part.file, options, PREDICT, labelled=False)
    return choice.options


def described_job(planned: PlannedTable) -> dict[str, Any]:
    """Return a job in plain values, for a file next to its output."""
    job = planned.job
    return {
        "identity": planned.identity,
        "parts": len(planned.parts),
        "adapters": {name: asdict(each) for name, each in job.adapters.items()},
        "route": job.route,
        "into": job.into,
    }
