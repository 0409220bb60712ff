"""The copies of the adapters that a saved one was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.errors import FileError, OutputError
from adapterhub.files.manifest import FoundationRef, from_json, to_json
from adapterhub.files.native import (
    Foundation,
    Saved,
    all_below,
    chain_text,
    check_foundations,
    copy_of,
    copy_problems,
    replaceable,
    write_copies,
)
from tests.kit import registries


@pytest.fixture
def foundation(tmp_path: Path) -> Foundation:
    folder = registries.write_sample(tmp_path / "lang", 1, card="the card")
    saved = Saved.at(folder)
    return Foundation(FoundationRef("lang", saved.digest, "v1", "lang@v1"), saved)


def test_copies_are_adapters_with_copies(foundation: Foundation, tmp_path: Path) -> None:
    top = registries.write_sample(tmp_path / "top", 2)
    saved = replace(Saved.at(top), on=(foundation,))
    upper = Foundation(FoundationRef("upper", saved.digest), saved)
    (tmp_path / "target").mkdir()
    write_copies(tmp_path / "target", [upper, upper])
    copy = copy_of(tmp_path / "target", upper.ref)
    assert Saved.at(copy).read()[0] == Saved.at(top).manifest
    below = copy_of(copy, foundation.ref)
    assert Saved.at(below).digest == foundation.ref.digest
    assert (below / "README.md").read_text() == "the card\n"
    file = foundation.saved.folder / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"x\n")
    (tmp_path / "other").mkdir()
    with pytest.raises(FileError, match="is not what 'lang' was"):
        write_copies(tmp_path / "other", [foundation])


def test_the_manifest_names_them_and_older_files_keep_their_bytes(foundation: Foundation) -> None:
    manifest = foundation.saved.manifest
    assert b'"on"' not in to_json(manifest)
    stacked = replace(manifest, on=(foundation.ref,))
    assert from_json(to_json(stacked)).on == (foundation.ref,)
    saved = replace(foundation.saved, manifest=stacked, on=(foundation,))
    check_foundations(saved)
    for given in ((), (foundation, foundation)):
        with pytest.raises(FileError, match="which are not here"):
            check_foundations(replace(saved, on=given))
    for wrong in ({"digest": "ab"}, {"reference": "/home/me/lang"}, {"reference": "../x"},
                  {"name": "a/../b"}):  # fmt: skip
        with pytest.raises(OutputError, match="cannot be written"):
            to_json(replace(manifest, on=(replace(foundation.ref, **wrong),)))


def test_a_chain_is_named_from_above_and_listed_from_below(foundation: Foundation) -> None:
    saved = replace(foundation.saved, on=(foundation,))
    upper = Foundation(FoundationRef("upper", "b" * 64), saved)
    assert list(all_below([upper])) == [foundation, upper]
    digest = foundation.ref.digest[:12]
    assert chain_text([upper]) == (
        f"upper (sha256 {'b' * 12}), which is on lang@v1 (sha256 {digest})"
    )


def test_missing_and_altered_copies_are_listed(foundation: Foundation, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    manifest = replace(foundation.saved.manifest, on=(foundation.ref,))
    saved = replace(foundation.saved, folder=folder, manifest=manifest)
    (problem,) = copy_problems(saved)
    assert problem.startswith("lang@v1: ")
    folder.mkdir()
    write_copies(folder, [foundation])
    assert copy_problems(saved) == []
    file = copy_of(folder, foundation.ref) / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    (problem,) = copy_problems(saved)
    assert "damaged" in problem


def test_only_a_folder_of_copies_is_replaced(foundation: Foundation, tmp_path: Path) -> None:
    folder = registries.write_sample(tmp_path / "task", 3)
    assert "on" not in replaceable(folder)
    write_copies(folder, [foundation])
    assert "on" in replaceable(folder)
    (folder / "on" / "thesis.txt").write_text("the only copy")
    assert "on" not in replaceable(folder)
