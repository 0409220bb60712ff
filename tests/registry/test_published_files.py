"""Copies of published versions are verified before they appear."""

from __future__ import annotations

import pytest
import sample_adapters

from adapterhub.errors import FileError
from adapterhub.registry.published_files import copy_adapter, copy_files, digest_of


def test_only_a_verified_copy_appears(tmp_path):
    folder = sample_adapters.write(tmp_path / "made")
    (folder / "adapter.safetensors").write_bytes(b"broken")
    with pytest.raises(FileError):
        copy_adapter(folder, tmp_path / "copy", digest_of(folder))
    assert not (tmp_path / "copy").exists()
    copy_files(folder, tmp_path / "copy", ("adapter.json", "missing"))
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["adapter.json"]
