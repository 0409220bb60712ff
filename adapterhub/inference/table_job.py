"""Predict on the rows of Parquet files, part by part: a part is a row group of a file.

A column may name the adapter of each row. The rows of an adapter are predicted together. Results
keep the order of the file and all its columns, plus one: the prediction as JSON text, as printed by
`adapterhub predict --json`.

Parts are predicted in this process, or on a Ray cluster, whose workers read their rows and load
their adapters themselves. The predictions return to the process that started the job, which is the
only one that writes. If a worker dies, it is restarted and its part is predicted again. The output
has one file for each part, written atomically. A job that was stopped, even by `kill -9`, is
continued by the same command: parts whose file exists are done. `_job.json` identifies the job of
the files, so that other jobs cannot add to them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from adapterhub._version import __version__
from adapterhub.config.user_folders import is_folder, is_there
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.parquet import columns_in_structs, opened_parquet, values_of
from adapterhub.data.row_stream import files_digest, list_files, reach_bucket
from adapterhub.data.table import Table, table_of_rows
from adapterhub.data.tables import keep_table
from adapterhub.errors import AdapterhubError, ConfigError, DataError, OutputError, TrainingError
from adapterhub.files.atomic import finished_names, replace_file
from adapterhub.files.native import Saved
from adapterhub.inference.inputs import without_missing
from adapterhub.inference.open import AdapterSource, open_several
from adapterhub.inference.record import read_training_record
from adapterhub.ray_cluster import connect_ray, import_ray, share_out
from adapterhub.registry.pull import pull
from adapterhub.status import doing

ONLY = ""  # the adapter name for all rows
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
    """The rows, the adapters and the new column of a job.

    `source` is a Parquet file, a folder or pattern of them, or a URL of one of these. The column
    `route` names the adapter of a row; None means a single adapter. `options` are the columns of
    the texts, for each adapter.
    """

    source: str
    adapters: Mapping[str, AdapterSource]
    route: str | None = None
    into: str = "prediction"
    backbone: str | None = None
    registry: str | None = None
    options: Mapping[str, DataOptions] = field(default_factory=dict)
    batch_size: int = 64
    max_length: int | None = None
    keep_empty: bool = False


@dataclass(frozen=True)
class PlannedTable:
    """A job with checked columns and adapters, its parts, and its identity."""

    job: TableJob
    parts: tuple[TablePart, ...]
    identity: str


def plan_table(job: TableJob, text: str | None = None, pair: str | None = None) -> PlannedTable:
    """Divide a job into parts, and check it; do not load a model.

    `text` and `pair` name the columns with the texts, if they differ from the training columns.

    Raises:
        DataError: the files are missing, are not Parquet files, differ in their columns, lack a
            column, or name an adapter that was not passed in.
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
        name: replace(each, digest=Saved.at(folders[name]).digest)
        for name, each in job.adapters.items()
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

    `driver` is the version and the working folder of the process that started the job.
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
        if is_folder(folder):  # paths of adapters and rows may be relative
            os.chdir(folder)
        self.job = job
        self.adapters = open_several(job.adapters, job.backbone, job.registry, job.max_length)

    def predict(self, part: TablePart) -> Any:
        """Return the rows of a part with their predictions, as a pyarrow table.

        Raises:
            DataError: rows cannot be read, or are invalid.
        """
        import pyarrow

        done = [self._predicted(rows, start, part) for rows, start in _slices(part)]
        return pyarrow.concat_tables(done)

    def _predicted(self, rows: Any, start: int, part: TablePart) -> Any:
        """Add predictions to some rows; the first one is number `start` of its group."""
        import pyarrow

        job = self.job
        names = [ONLY] * rows.num_rows if job.route is None else rows[job.route].to_pylist()
        answers: list[str] = [""] * rows.num_rows
        for name in dict.fromkeys(names):
            indices = [index for index, each in enumerate(names) if each == name]
            own = rows.take(indices)
            places = [f"{start + index + 1} of group {part.group}" for index in indices]
            examples = self._examples(name, own, places, part.file)
            named = [f"{part.file}, row {place}" for place in places]
            predictions = self.adapters.predict(
                name, examples, job.batch_size, keep_empty=job.keep_empty, places=named
            )
            for index, prediction in zip(indices, predictions, strict=True):
                cut = {"truncated": prediction.truncated} if prediction.truncated else {}
                answers[index] = json.dumps(prediction.as_dict() | cut, ensure_ascii=False)
        return rows.append_column(job.into, pyarrow.array(answers, pyarrow.string()))

    def _examples(self, name: str, rows: Any, places: Sequence[str], file: str) -> list[Any]:
        options, task = self.job.options[name], self.adapters.predictors[name].task
        table = _table(rows, places, file)
        if self.job.keep_empty:
            table = without_missing(table, options)
        keep_table(table, file, options, PREDICT)
        return task.read(file, options, PREDICT, labelled=False)


def _parts(files: Mapping[str, str]) -> tuple[list[TablePart], Any]:
    """Return a part for each row group, and the schema of all files.

    Raises:
        DataError: a file is not a Parquet file, or its columns differ from the first one.
    """
    parts: list[TablePart] = []
    schema: Any = None
    for file in files:
        with opened_parquet(
            file, "Parquet files for --input; --data reads other formats"
        ) as opened:
            own = opened.schema_arrow.remove_metadata()
            if schema is not None and not own.equals(schema):
                raise DataError(
                    f"{file} has other columns than {next(iter(files))}",
                    offenders=[f"{field.name}: {field.type}" for field in own],
                    expected=", ".join(f"{field.name}: {field.type}" for field in schema),
                )
            schema = own
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                if rows:
                    parts.append(TablePart(len(parts), file, group, rows))
    if not parts:
        raise DataError(f"{', '.join(files)}: no rows")
    return parts, schema


def _slices(part: TablePart) -> Iterator[tuple[Any, int]]:
    """Yield the rows of a part in slices, with the number of the first row of each."""
    import pyarrow

    start = 0
    with opened_parquet(part.file) as opened:
        for batch in opened.iter_batches(batch_size=_AT_ONCE, row_groups=[part.group]):
            yield pyarrow.Table.from_batches([batch]).replace_schema_metadata(None), start
            start += batch.num_rows


def _table(rows: Any, places: Sequence[str], file: str) -> Table:
    names = (*rows.column_names, *columns_in_structs(rows.schema))
    return table_of_rows(file, names, places, lambda name: values_of(rows, name))


def _check_route(job: TableJob, parts: Sequence[TablePart], schema: Any) -> None:
    """Check that the column of adapters exists, and that its adapters were passed in.

    Raises:
        DataError: the column is missing, or an adapter is.
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
    """Return the columns that an adapter reads, chosen from the first rows."""
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


JOB = "_job.json"


class TableOutput:
    """The place for the parts of a job.

    `location` is a folder, the URL of a folder in a bucket, or the name of one Parquet file. The
    parts of such a file are stored next to it until it is complete.

    Raises:
        OutputError: the place contains another job, or something else.
    """

    def __init__(self, location: str, planned: PlannedTable) -> None:
        self.location, self.planned = location, planned
        self.remote = "://" in location
        self.file = None if self.remote or not location.endswith(".parquet") else Path(location)
        self.folder = f"{location}.parts" if self.file else location.rstrip("/")
        if self.remote and location.endswith(".parquet"):
            raise OutputError(
                f"{location} is one file in a bucket", expected="the URL of a folder for the parts"
            )
        if self.file is not None and self.file.exists():
            raise OutputError(f"{self.file} is already there", hint="another --output")
        reach_bucket(location)
        self._begin()

    def _begin(self) -> None:
        """Write the identity of the job of this output, or compare it."""
        record = described_job(self.planned)
        path = self._path(JOB)
        if self._exists(path):
            if json.loads(self._read(path)).get("identity") == record["identity"]:
                return
            raise OutputError(
                f"{self.folder} has the output of another job",
                expected="the same rows, adapters, columns and release, to continue it",
                hint="another --output",
            )
        if not self.remote and is_there(self.folder) and finished_names(Path(self.folder)):
            raise OutputError(f"{self.folder} is not empty", hint="another --output")
        if not self.remote:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._write(path, json.dumps(record, indent=2, sort_keys=True).encode())

    @property
    def missing(self) -> list[TablePart]:
        """The parts that have not been written yet."""
        return [part for part in self.planned.parts if not self._exists(self._path(part.name))]

    def write(self, part: TablePart, rows: Any) -> None:
        """Write the rows of a part; a crash leaves the whole file or none."""
        from pyarrow.parquet import write_table

        content = io.BytesIO()
        write_table(rows, content)
        self._write(self._path(part.name), content.getvalue())

    def finish(self) -> None:
        """Join the parts, if the output is one file."""
        from pyarrow.parquet import ParquetFile, ParquetWriter

        if self.file is None:
            return
        staged = self.file.with_name(f".{self.file.name}.new")
        paths = [Path(self.folder, part.name) for part in self.planned.parts]
        with ParquetWriter(staged, ParquetFile(paths[0]).schema_arrow) as joined:
            for path in paths:
                joined.write_table(ParquetFile(path).read())
        os.replace(staged, self.file)
        shutil.rmtree(self.folder)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _exists(self, path: str) -> bool:
        system, inside = _system(path)
        system.invalidate_cache()
        return bool(system.exists(inside))

    def _read(self, path: str) -> bytes:
        system, inside = _system(path)
        return bytes(system.cat_file(inside))

    def _write(self, path: str, data: bytes) -> None:
        if not self.remote:
            replace_file(Path(path), data)
            return
        system, inside = _system(path)
        system.pipe_file(inside, data)


def _system(path: str) -> tuple[Any, str]:
    import fsspec

    system, inside = fsspec.core.url_to_fs(path)
    return system, str(inside)


RESTARTS = 3  # of a worker


def predict_here(job: TableJob, parts: Iterable[TablePart]) -> Iterator[tuple[TablePart, Any]]:
    """Yield each part with its rows and predictions, in order."""
    worker = TableWorker(job)
    for part in parts:
        yield part, worker.predict(part)


def predict_on_ray(
    job: TableJob,
    parts: Iterable[TablePart],
    workers: int | None = None,
    address: str | None = None,
) -> Iterator[tuple[TablePart, Any]]:
    """Yield each part with its rows and predictions, in the order in which the workers finish.

    By default, there is one worker for each GPU, or for every 4 CPUs of a node. `address` is
    HOST:PORT of a running cluster; None: Ray's default, or this machine.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
        TrainingError: workers died too often.
    """
    ray = import_ray()
    started = not ray.is_initialized()
    try:
        if started:
            with doing("starting Ray"):
                connect_ray(ray, address)
        yield from _collected(ray, job, list(parts), workers)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AdapterhubError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        if isinstance(cause := getattr(error, "cause", None), AdapterhubError):
            raise cause from None
        raise TrainingError(
            f"a worker of the Ray cluster died more than {RESTARTS} times, or could not start",
            offenders=[_reason(error)],
            expected="memory for a process with torch and the adapters of the job",
            hint="fewer --workers; the same command goes on with the parts that are missing",
        ) from error
    finally:
        if started:
            ray.shutdown()


def _collected(
    ray: Any, job: TableJob, parts: list[TablePart], workers: int | None
) -> Iterator[tuple[TablePart, Any]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actors = []
    shared = ray.put(job)
    for share in share_out(ray.nodes(), workers)[: len(parts)]:
        kind = ray.remote(TableWorker).options(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_restarts=RESTARTS,
            max_task_retries=RESTARTS,
            # Soft: if its node is lost, the worker may start on another one.
            scheduling_strategy=NodeAffinitySchedulingStrategy(share.node, soft=True),
        )
        actors.append(kind.remote(shared, max(1, share.cpus), (__version__, os.getcwd())))
    waiting, running = list(reversed(parts)), {}
    try:
        for actor in actors:
            part = waiting.pop()
            running[actor.predict.remote(part)] = actor, part
        while running:
            ready, _ = ray.wait(list(running), num_returns=1)
            actor, part = running.pop(ready[0])
            rows = ray.get(ready[0])
            if waiting:
                following = waiting.pop()
                running[actor.predict.remote(following)] = actor, following
            yield part, rows
    finally:
        for actor in actors:
            ray.kill(actor)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
