"""Readable rows, and errors in data, for the tests of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.batches import IGNORED


def words_of(tokenizer, ids: list[int]) -> list[str]:
    """Return the tokens of ids, without ignored labels."""
    return tokenizer.convert_ids_to_tokens([i for i in ids if i != IGNORED])


def read_error(task: str, file: Path, text: str) -> str:
    """Write a data file, read it for a task, and return the error message."""
    file.write_text(text)
    with pytest.raises(AdapterhubError) as error:
        parse_task(task).read(str(file), DataOptions(), "train")
    return str(error.value)
