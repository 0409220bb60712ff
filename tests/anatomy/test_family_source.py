"""A row written as Python source evaluates to the same row."""

from __future__ import annotations

import pytest

from adapterhub.anatomy import FAMILIES, Family, Stack
from adapterhub.anatomy.discovery import REQUIRED
from adapterhub.anatomy.family_source import row_text


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_source_of_a_row_evaluates_to_the_row(architecture):
    row = FAMILIES[architecture]
    assert eval(row_text(row), {"Family": Family, "Stack": Stack}) == row


def test_missing_required_roles_are_left_open():
    text = row_text(
        Family(("new",), (Stack("decoder", "layers", {"attn.q": "q"}),), ("wte",)), REQUIRED
    )
    assert '"attn.q": "q"' in text
    assert text.count("...") == len(REQUIRED) - 1
