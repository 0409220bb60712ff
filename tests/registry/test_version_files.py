"""Copies of published versions are verified before they appear."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterhub.errors import FileError
from adapterhub.files.native import Saved
from adapterhub.registry.version_files import (
    DATE_FILE,
    copy_adapter,
    copy_files,
    date_now,
    name_to_publish,
    parse_date,
)
from tests.kit import registries


@pytest.mark.parametrize(
    ("folder", "own", "name"),
    [("mine/adapter", "default", "mine"), ("mine", "default", "mine"),
     ("mine/adapter", "polite", "polite"), ("my run/adapter", "default", "default")],
)  # fmt: skip
def test_an_adapter_without_a_name_is_called_as_its_run(tmp_path, folder, own, name):
    saved = Saved.at(registries.write_sample(tmp_path / folder))
    assert name_to_publish(replace(saved, manifest=replace(saved.manifest, name=own))) == name


def test_only_a_verified_copy_appears(tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    (folder / "adapter.safetensors").write_bytes(b"broken")
    with pytest.raises(FileError):
        copy_adapter(folder, tmp_path / "copy", Saved.at(folder).digest)
    assert not (tmp_path / "copy").exists()
    copy_files(folder, tmp_path / "copy", ("adapter.json", "missing"))
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["adapter.json"]


def test_the_date_of_a_version_is_beside_its_files_and_in_no_copy(tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    published = copy_adapter(folder, tmp_path / "v1", Saved.at(folder).digest, date=date_now())
    text = parse_date((published / DATE_FILE).read_bytes())
    assert text is not None
    assert text[:2] == "20"
    assert text[-1] == "Z"
    copy = copy_adapter(published, tmp_path / "copy", Saved.at(folder).digest)
    assert not (copy / DATE_FILE).exists()


@pytest.mark.parametrize(
    "data", [b"", b"yesterday", b"2026-13-01T00:00:00Z", b"\xff", b"2026-11-22T00:00:00Z" * 9]
)
def test_what_is_no_date_is_ignored(data):
    assert parse_date(data) is None
