"""`adapterhub registry verify`, `reindex` and `gc`."""

from __future__ import annotations

import pytest
import sample_adapters

from adapterhub.errors import FileError


def test_a_damaged_version_is_found(typed, tmp_path):
    sample_adapters.write(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert "all versions are intact" in typed("registry verify")
    (stored,) = (tmp_path / "registry").rglob("adapter.safetensors")
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(FileError, match="damaged versions in") as error:
        typed("registry verify")
    assert any("polite" in offender for offender in error.value.offenders)


def test_the_index_is_rebuilt_and_leftovers_are_counted(typed, tmp_path):
    sample_adapters.write(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert "1 name indexed" in typed("registry reindex")
    assert "0 leftovers removed" in typed("registry gc")
