"""The copies of the adapters that a saved one was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sample_adapters

from adapterhub.errors import FileError
from adapterhub.files.foundation import (
    Foundation,
    all_below,
    chain_text,
    check_foundations,
    copy_of,
    copy_problems,
    write_copies,
)
from adapterhub.files.manifest import FoundationRef, from_json, to_json
from adapterhub.files.native import read_adapter, read_manifest, replaceable
from adapterhub.registry.published_files import digest_of


@pytest.fixture
def foundation(tmp_path: Path) -> Foundation:
    folder = sample_adapters.write(tmp_path / "lang", 1, card="the card")
    return Foundation(FoundationRef("lang", digest_of(folder), "v1", "lang@v1"), folder)


def test_copies_are_adapters_with_copies(foundation: Foundation, tmp_path: Path) -> None:
    top = sample_adapters.write(tmp_path / "top", 2)
    upper = Foundation(FoundationRef("upper", digest_of(top)), top, on=(foundation,))
    (tmp_path / "target").mkdir()
    write_copies(tmp_path / "target", [upper, upper])
    copy = copy_of(tmp_path / "target", upper.ref)
    assert read_adapter(copy)[0] == read_manifest(top)
    below = copy_of(copy, foundation.ref)
    assert digest_of(below) == foundation.ref.digest
    assert (below / "README.md").read_text() == "the card\n"


@pytest.mark.parametrize("name", ["adapter.json", "adapter.safetensors"])
def test_altered_files_are_not_copied(foundation: Foundation, tmp_path: Path, name: str) -> None:
    file = foundation.folder / name
    file.write_bytes(file.read_bytes()[:-2] + b"x\n")
    (tmp_path / "target").mkdir()
    with pytest.raises(FileError, match="is not what 'lang' was"):
        write_copies(tmp_path / "target", [foundation])


def test_the_manifest_names_them_and_older_files_keep_their_bytes(foundation: Foundation) -> None:
    manifest = read_manifest(foundation.folder)
    assert b'"on"' not in to_json(manifest)
    stacked = replace(manifest, on=(foundation.ref,))
    assert from_json(to_json(stacked)).on == (foundation.ref,)
    check_foundations(stacked, [foundation])
    for given in ([], [foundation, foundation]):
        with pytest.raises(FileError, match="which are not here"):
            check_foundations(stacked, given)


@pytest.mark.parametrize(
    ("field", "value"),
    [("digest", "ab"), ("reference", "/home/me/lang"), ("reference", "../x"), ("name", "a/../b")],
)
def test_a_manifest_with_a_wrong_record_is_refused(
    foundation: Foundation, field: str, value: str
) -> None:
    from adapterhub.errors import OutputError

    ref = replace(foundation.ref, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="cannot be written"):
        to_json(replace(read_manifest(foundation.folder), on=(ref,)))


def test_a_chain_is_named_from_above_and_listed_from_below(foundation: Foundation) -> None:
    upper = Foundation(FoundationRef("upper", "b" * 64), Path("upper"), on=(foundation,))
    assert list(all_below([upper])) == [foundation, upper]
    digest = foundation.ref.digest[:12]
    assert chain_text([upper]) == (
        f"upper (sha256 {'b' * 12}), which is on lang@v1 (sha256 {digest})"
    )


def test_missing_and_altered_copies_are_listed(foundation: Foundation, tmp_path: Path) -> None:
    manifest = replace(read_manifest(foundation.folder), on=(foundation.ref,))
    folder = tmp_path / "task"
    (problem,) = copy_problems(folder, manifest)
    assert problem.startswith("lang@v1: ")
    folder.mkdir()
    write_copies(folder, [foundation])
    assert copy_problems(folder, manifest) == []
    file = copy_of(folder, foundation.ref) / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    (problem,) = copy_problems(folder, manifest)
    assert "damaged" in problem


def test_only_a_folder_of_copies_is_replaced(foundation: Foundation, tmp_path: Path) -> None:
    folder = sample_adapters.write(tmp_path / "task", 3)
    assert "on" not in replaceable(folder)
    write_copies(folder, [foundation])
    assert "on" in replaceable(folder)
    (folder / "on" / "thesis.txt").write_text("the only copy")
    assert "on" not in replaceable(folder)
