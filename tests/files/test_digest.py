"""Digests of files and of their beginnings."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from adapterhub.files.atomic import FileDigest, file_digest


@pytest.mark.parametrize("most", [None, 0, 1, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_the_digest_of_a_file_or_its_beginning(tmp_path: Path, most: int | None) -> None:
    data = bytes(range(256)) * ((3 << 20) // 256) + b"end"
    (tmp_path / "file").write_bytes(data)
    part = data if most is None else data[:most]
    expected = FileDigest(len(part), hashlib.sha256(part).hexdigest())
    assert file_digest(tmp_path / "file", most) == expected
