"""Rows are shared by all models of a family, so they cannot be modified."""

from __future__ import annotations

import dataclasses

import pytest

from adapterhub.anatomy.family import Family, Stack

STACK = Stack("encoder", "layers", {"attn.q": "q"})


def test_rows_are_immutable():
    row = Family(("new",), (STACK,), ("embeddings",))
    for value in (row, STACK):
        for name in (field.name for field in dataclasses.fields(value)):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, name, None)


def test_a_row_claims_nothing_that_it_does_not_state():
    assert STACK.norms is STACK.bias is STACK.body is None
    assert STACK.root == ""
    assert not STACK.fused
