"""Adapters that several tests open."""

import pytest

from tests.kit.runs import train_two


@pytest.fixture(scope="session")
def two_adapters(backbone, tmp_path_factory):
    """Train two adapters of one backbone, with two and six classes."""
    return train_two(backbone, tmp_path_factory.mktemp("two"))
