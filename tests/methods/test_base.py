"""Methods override the hooks of their base by name, so a misspelt hook would never be called."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import adapterhub
from adapterhub.methods import METHODS
from adapterhub.methods._base import Method

SOURCES = "".join(p.read_text(encoding="utf-8") for p in Path(adapterhub.__path__[0]).rglob("*.py"))
HOOKS = {name for name in dir(Method) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_member_of_a_method_is_a_hook_or_is_used(name):
    cls = METHODS[name]
    options = {field.name for field in dataclasses.fields(cls)}
    members = {n for base in cls.__mro__[: cls.__mro__.index(Method)] for n in vars(base)} - options
    assert members & HOOKS
    others = members - HOOKS - set(Method.__annotations__)
    assert [n for n in others if n[0] != "_" and not re.search(rf"\.{n}\b", SOURCES)] == []
