"""The output of a job on Parquet files: one file for each part, each written at once or not at all.

A job that was stopped, by `kill -9` as well, is continued by the same command: parts whose file is
there are done. `_job.json` says which job the files are of, so that no other one adds to them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

from adapterhub.data.row_stream import reach_bucket
from adapterhub.errors import OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.inference.table_job import PlannedTable, TablePart, described_job

JOB = "_job.json"


class TableOutput:
    """Where the parts of a job are written.

    Args:
        location: a folder, the URL of a folder in a bucket, or the name of one Parquet file, whose
            parts are beside it until all are there.
        planned: the job.

    Raises:
        OutputError: another job, or something else, is there.
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
        """Write which job the output is of, or compare it."""
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
        if not self.remote and Path(self.folder).exists() and any(Path(self.folder).iterdir()):
            raise OutputError(f"{self.folder} is not empty", hint="another --output")
        if not self.remote:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._write(path, json.dumps(record, indent=2, sort_keys=True).encode())

    @property
    def missing(self) -> list[TablePart]:
        """The parts that are not written yet."""
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
        if not self.remote:
            return Path(path).exists()
        system, inside = _system(path)
        system.invalidate_cache()
        return bool(system.exists(inside))

    def _read(self, path: str) -> bytes:
        if not self.remote:
            return Path(path).read_bytes()
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
