"""Methods override the hooks of their base by name, so a misspelt hook would never be called."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import adapterhub
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import Method

SOURCES = "".join(p.read_text(encoding="utf-8") for p in Path(adapterhub.__path__[0]).rglob("*.py"))
HOOKS = {name for name in dir(Method) if not name.startswith("_")}


def test_every_member_of_a_method_is_a_hook_or_is_used(subtests):
    for name, cls in METHODS.items():
        options = {field.name for field in dataclasses.fields(cls)}
        own = cls.__mro__[: cls.__mro__.index(Method)]
        members = {member for base in own for member in vars(base)} - options
        others = members - HOOKS - set(Method.__annotations__)
        with subtests.test(name):
            assert members & HOOKS
            assert [n for n in others if n[0] != "_" and not re.search(rf"\.{n}\b", SOURCES)] == []
