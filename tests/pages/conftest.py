"""Pages are read as they are drawn."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def drawn(charts: None) -> None:
    """Draw the charts of pages."""
