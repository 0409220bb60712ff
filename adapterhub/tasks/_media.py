"""What all tasks share whose examples are files, pictures or sounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.data.media import MediaFile, open_media
from adapterhub.data.options import DataOptions
from adapterhub.tasks._base import Task
from adapterhub.tasks._rows import Row, Setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MediaTask(Task):
    """A task on files: each row has one, which is decoded for each batch."""

    decodes = True

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Decode the bytes of a file.

        Raises:
            ValueError: it is broken, or of another kind.
        """

    @abstractmethod
    def process(self, decoded: list[Any], setting: Setting) -> dict[str, Tensor]:
        """Return the model inputs for some decoded files."""

    def example(self, fields: Sequence[str], options: DataOptions) -> MediaFile:
        """Open the file of a path."""
        return open_media(fields[0], self.decode)

    def shown(self, example: MediaFile) -> list[str]:
        """Return the name of the file."""
        return [example.name]

    def file_row(self, example: MediaFile, setting: Setting) -> Row:
        """Return the row of a file, without what is learned of it."""
        return {"file": example}

    def size(self, row: Row) -> int:
        """Return 1: all files take as much."""
        return 1

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """Return no limit: nothing is truncated to a number of tokens."""
        return []

    def inputs(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the files of some rows, and make model inputs of them."""
        return self.process([row["file"].decoded(self.decode) for row in rows], setting)

    def show_inputs(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the shapes of what the model gets of a row."""
        inputs = self.inputs([row], setting)
        return {name: " x ".join(map(str, t.shape[1:])) for name, t in inputs.items()}
