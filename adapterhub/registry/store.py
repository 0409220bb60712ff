"""What a store of adapters can do, whatever it is made of.

A store keeps versions of adapters. A version is one adapter's files, and never changes; a tag is a
name for a version, and may move. What a folder, the Hub or a server keep them in is their own
affair: the same conformance suite holds for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class Entry:
    """One published version of an adapter, as a search shows it.

    `reference` is what a user types to get it, `digest` the sha256 of its manifest, and so of all
    that the adapter computes with; `size` counts bytes, `parameters` trained numbers.
    """

    reference: str
    name: str
    version: str
    digest: str
    backbone: str
    fingerprint: str
    methods: tuple[str, ...]
    task: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    size: int = 0
    parameters: int = 0
    yanked: str | None = None


@dataclass(frozen=True)
class Query:
    """Which versions to find: each given field must hold; what is None or empty matches all.

    `backbone` is an id or a fingerprint, `text` words that occur in the name, task, backbone,
    methods or card. Without `all_versions` only the newest of a name is found, and never one that
    was yanked. `sort` is a metric (best first), `size` (smallest first) or `name`.
    """

    text: str = ""
    backbone: str | None = None
    task: str | None = None
    method: str | None = None
    tags: tuple[str, ...] = ()
    metric: str | None = None
    sort: str = "name"
    all_versions: bool = False
    limit: int = 50


@dataclass(frozen=True)
class Publication:
    """What a publisher adds to an adapter's files."""

    name: str
    version: str | None = None
    tags: tuple[str, ...] = ()
    visibility: Literal["public", "private"] = "public"


class Store(Protocol):
    """A place of published adapters."""

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """The version that is meant: the newest that was not yanked, unless one is named by its
        number or by a tag. `backbone`, an id or fingerprint, decides between backbones.

        Raises:
            RegistryError: nothing of that name or version, or one on several backbones.
        """

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """The verified files of a version, in `folder` or where the store keeps them.

        Raises:
            RegistryError: the store cannot be reached. FileError: what came is not what was
                published. OutputError: `folder` cannot be written.
        """

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder. The bytes that are there already publish as the same
        version.

        Raises:
            RegistryError: the version is taken by other bytes, or the store refuses the writer.
            FileError: the folder holds no sound adapter.
        """

    def search(self, query: Query) -> list[Entry]:
        """The versions that a query finds."""

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """All versions of a name, oldest first, yanked ones too.

        Raises:
            RegistryError: nothing of that name.
        """

    def yank(self, entry: Entry, reason: str) -> None:
        """Take a version out of searches and of what a bare name means. Who pinned it gets it
        still, with the reason."""
