"""A row written as Python source evaluates to the same row."""

from __future__ import annotations

import every_type
import pytest

from adapterhub.anatomy import FAMILIES, Family, Stack
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.family_file import row_text


def test_the_source_of_a_row_evaluates_to_the_row():
    for architecture, row in FAMILIES.items():
        assert eval(row_text(row), {"Family": Family, "Stack": Stack}) == row, architecture


@pytest.mark.parametrize("model_type", ["jamba", "clip", "persimmon"])
def test_the_source_of_what_was_discovered_evaluates_to_it(model_type):
    """Layers that differ, several stacks, parts that are not known."""
    row = discover(every_type.build(model_type, every_type.autos(model_type)[-1]))
    assert eval(row_text(row), {"Family": Family, "Stack": Stack}) == row
