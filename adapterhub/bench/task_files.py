"""Files of a study that have one record for each task, by the task's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from adapterhub.errors import FileError
from adapterhub.files.atomic import replace_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def write_by_task(path: Path, records: Mapping[str, DataclassInstance]) -> None:
    """Write a record for each task.

    Args:
        path: the file.
        records: dataclasses of plain data, by the task's name.
    """
    content = {task: asdict(record) for task, record in records.items()}
    replace_file(path, f"{json.dumps(content)}\n".encode())


def read_by_task(path: Path, kind: type[R], hint: str) -> dict[str, R]:
    """Read the records of the tasks; none if the file does not exist.

    Args:
        path: the file.
        kind: the dataclass.
        hint: what to do with a broken file.

    Raises:
        FileError: the file is broken.
    """
    if not path.is_file():
        return {}
    try:
        content: Mapping[str, dict[str, Any]] = json.loads(path.read_bytes())
        return {task: kind(**fields) for task, fields in content.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path} is broken: {error}",
            expected="the file as adapterhub bench wrote it",
            hint=f"delete {path}: {hint}",
        ) from error
