"""What a transaction changes of what can be downloaded, noted where it is written.

The gate reads these notes at the end of the transaction (gate.py). A transaction with notes that
did not pass it is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from sqlalchemy import Connection

from adapterhub.hub.blobs import Blobs, StagedBlob

CHANGES = "adapterhub_changes"
"""The option of a connection that has the notes of its transaction."""


@dataclass(frozen=True)
class NewVersion:
    """A version that was added: its repository, number and commit, and the highest one before."""

    repository: int
    number: int
    commit: str
    before: int


@dataclass
class Changes:
    """What a transaction has changed.

    Attributes:
        commits: commits by repository; of each, whether it is new, or has a new ref.
        moved: repositories that have another name, and the namespace that they were in.
        granted: files that a repository may name since.
        versions: versions that were added.
        refs: branches and tags that were deleted or moved, by repository: kind and name.
        files: files that were received; the gate puts them in their places.
        are_admitted: whether the gate has admitted all of this.
    """

    commits: dict[tuple[int, str], bool] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    granted: set[tuple[int, str]] = field(default_factory=set)
    versions: list[NewVersion] = field(default_factory=list)
    refs: set[tuple[int, str, str]] = field(default_factory=set)
    files: list[StagedBlob] = field(default_factory=list)
    are_admitted: bool = False

    @property
    def repositories(self) -> set[int]:
        """The repositories that are other ones by now."""
        found = {*self.moved, *(each.repository for each in self.versions)}
        found |= {own for own, _ in self.commits} | {own for own, _ in self.granted}
        return found | {own for own, _, _ in self.refs}

    def check_admitted(self) -> None:
        """Refuse to end a transaction that has passed by the gate.

        Raises:
            RuntimeError: it has: a mistake of this program.
        """
        if not self.are_admitted and (self.repositories or self.files):
            raise RuntimeError("what can be downloaded changes in `changing` alone")


def changes_of(connection: Connection) -> Changes:
    """Return the notes of the transaction of a connection."""
    found: Changes = connection.get_execution_options()[CHANGES]
    return found


def received_reader(connection: Connection, folder: Blobs) -> Callable[[str, int], bytes]:
    """Return what reads a file, also one that is not yet in its place."""
    received = {staged.info.sha256: staged.path for staged in changes_of(connection).files}

    def read(sha256: str, most: int) -> bytes:
        with suppress(KeyError, FileNotFoundError), open(received[sha256], "rb") as file:
            return file.read(most)
        return folder.read(sha256, most)

    return read
