"""Files with a record for each task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from adapterhub.bench.task_files import read_by_task, write_by_task
from adapterhub.errors import FileError


@dataclass(frozen=True)
class Pair:
    name: str
    value: float = 0.0


def test_records_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    assert read_by_task(path, Pair, "") == {}
    pairs = {"sst2": Pair("a", 1.5), "rte": Pair("b")}
    write_by_task(path, pairs)
    assert read_by_task(path, Pair, "") == pairs


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"a": {"other": 1}}', b"\xff"])
def test_a_broken_file_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pairs.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match="is broken") as error:
        read_by_task(path, Pair, "it is made again")
    assert f"delete {path}: it is made again" in str(error.value)
