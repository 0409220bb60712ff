"""Pages are read as they are drawn."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def drawn(charts: None) -> None:
    """Draw the charts of pages."""
