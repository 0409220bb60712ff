"""The user's folders of a test, or of what a session prepares before its tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def home_in(folder: Path, cache: Path | None = None) -> Iterator[None]:
    """Set the user's registry, trusted keys, record of versions and cache to those of a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CACHE_HOME", str(cache or folder / "cache"))
        patch.setenv("ADAPTERHUB_STATE", str(folder / "state"))
        for variable in ("ADAPTERHUB_TRUST", "ADAPTERHUB_REQUIRE_SIGNATURES"):
            patch.delenv(variable, raising=False)
        yield
