"""Adapters that several tests open."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.inference.open import AdapterSource
from tests.kit.runs import train_two


@pytest.fixture(scope="session")
def two_adapters(
    backbone: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, AdapterSource]:
    """Train two adapters of one backbone, with two and six classes."""
    return train_two(backbone, tmp_path_factory.mktemp("two"))
