"""The predictions of a bare language model by a prompt, kept in the folder of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterhub.bench.records import PredictedRows
from adapterhub.bench.task_files import read_by_task, write_by_task

ZERO_SHOT = "zero-shot.json"
ZERO_SHOT_NAME = "zero-shot prompt"


@dataclass(frozen=True)
class PromptedRows:
    """What the bare backbone predicts on the test rows of a task.

    Attributes:
        key: the digest of data, backbone, kernels and prompt.
        columns: label, prediction and its probability among the labels, for each test row; empty
            if the backbone cannot predict.
        note: why it cannot, if the user may want to know.
    """

    key: str
    columns: dict[str, list[Any]] = field(default_factory=dict)
    note: str = ""

    def rows(self, like: PredictedRows) -> PredictedRows | None:
        """Return the predictions if they are on the same rows as others; else None."""
        same = self.columns.get("label") == like.columns.get("label")
        return PredictedRows(like.kind, self.columns) if same and like.kind == "classes" else None


def write_prompted(folder: Path, prompted: Mapping[str, PromptedRows]) -> None:
    """Write the predictions by a prompt of a study's tasks.

    Args:
        folder: the folder of the study.
        prompted: by the task's name.
    """
    write_by_task(folder / ZERO_SHOT, prompted)


def read_prompted(folder: Path) -> dict[str, PromptedRows]:
    """Read the predictions by a prompt of a study's tasks; none if there are none.

    Raises:
        FileError: the file is broken.
    """
    return read_by_task(folder / ZERO_SHOT, PromptedRows, "adapterhub bench predicts again")
