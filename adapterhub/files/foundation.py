"""Adapters that another one was trained on: verified files, and the copies of a saved adapter.

    task/                      an adapter that was trained on another one
      adapter.json             its field `on` names each: name, version, digest, reference
      on/0123456789abcdef/     the files of each, by the start of its digest; they may have an `on`
                               of their own

A folder with its copies is complete. Published versions have no copies: their foundations are
versions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapterhub.errors import FileError
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, FoundationRef, Manifest, from_json
from adapterhub.files.native import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    ON_FOLDER,
    SIGNATURE_FILE,
    check_tensor_file,
    read_manifest,
    write_copy,
)

_DIGITS = 16


@dataclass(frozen=True)
class Foundation:
    """An adapter that others were trained on, with its files here.

    Attributes:
        ref: what a manifest records of it.
        folder: its files.
        on: the adapters that it was trained on itself.
    """

    ref: FoundationRef
    folder: Path
    on: tuple[Foundation, ...] = ()


def copy_of(folder: Path, ref: FoundationRef) -> Path:
    """Return where the folder of an adapter has the copy of one that it was trained on."""
    return folder / ON_FOLDER / ref.digest[:_DIGITS]


def write_copies(folder: Path, foundations: Sequence[Foundation]) -> None:
    """Write verified copies of adapters, and of those below them, into the folder of another one.

    Raises:
        FileError: the files of one changed since they were found.
    """
    for each in foundations:
        target = copy_of(folder, each.ref)
        if target.exists():  # named twice
            continue
        target.mkdir(parents=True)
        _write_copy(target, each)
        write_copies(target, each.on)


def check_foundations(manifest: Manifest, given: Sequence[Foundation]) -> None:
    """Check that the adapters which an adapter was trained on are those given, in order.

    Raises:
        FileError: others, or none.
    """
    if tuple(each.ref.digest for each in given) == tuple(ref.digest for ref in manifest.on):
        return
    raise FileError(
        f"the adapter {manifest.name!r} was trained on other adapters, which are not here",
        offenders=[f"{ref}, sha256 {ref.digest[:12]}" for ref in manifest.on],
        expected="the adapter with those below it",
        hint="ah.load(model, REFERENCE), which brings them along",
    )


def all_below(foundations: Sequence[Foundation]) -> Iterator[Foundation]:
    """Yield adapters and those below them, the lowest of each first."""
    for each in foundations:
        yield from all_below(each.on)
        yield each


def chain_text(foundations: Sequence[Foundation]) -> str:
    """Name adapters with those below them: `domain@v1 (sha256 ...), which is on lang@v1 (...)`."""
    texts = []
    for each in foundations:
        below = f", which is on {chain_text(each.on)}" if each.on else ""
        texts.append(f"{each.ref} (sha256 {each.ref.digest[:12]}){below}")
    return "; ".join(texts)


def copy_problems(folder: Path, manifest: Manifest) -> list[str]:
    """List the copies that the folder of an adapter lacks, or that were altered."""
    problems = []
    for ref in manifest.on:
        copy = copy_of(folder, ref)
        try:
            below = read_manifest(copy, ref.digest)
            check_tensor_file(copy, below)
        except FileError as error:
            problems.append(f"{ref}: {error.problem}")
        else:
            problems += copy_problems(copy, below)
    return problems


def _write_copy(target: Path, foundation: Foundation) -> None:
    """Copy the files of an adapter, if they have the digests that are expected."""
    folder, digest = foundation.folder, foundation.ref.digest
    try:
        files = {MANIFEST_FILE: read_file(folder / MANIFEST_FILE, 0, MAX_MANIFEST_BYTES, digest)}
        for name in (CARD_FILE, SIGNATURE_FILE):
            if (folder / name).is_file():
                files[name] = read_file(folder / name, 0, MAX_CARD_BYTES, None)
        manifest = from_json(files[MANIFEST_FILE], str(folder / MANIFEST_FILE))
        write_copy(target, folder, manifest, files)
    except (UnreadableError, FileError) as error:
        raise FileError(
            f"{folder} is not what {foundation.ref.name!r} was when it was found: {error}",
            expected=f"a manifest with sha256 {digest}, and its tensors",
            hint="load the adapter again",
        ) from None
