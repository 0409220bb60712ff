"""`adapterhub yank`."""

from __future__ import annotations

import pytest

from adapterhub.errors import RegistryError
from tests.kit import registries


def test_a_yanked_version_is_hidden_but_still_loads(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert typed("yank polite@v1 --reason wrong") == "yanked polite@v1: wrong\n"
    assert "polite@v1" not in typed("list")
    with pytest.raises(RegistryError, match="all versions of 'polite' are yanked"):
        typed("pull polite")
    with pytest.warns(UserWarning, match=r"polite@v1 was yanked: wrong"):
        typed("pull polite@v1")
