"""`adapterhub trust`."""

from __future__ import annotations

import json

import pytest

from adapterhub.errors import AdapterhubError

pytest.importorskip("cryptography")


def keys(typed):
    return json.loads(typed("trust --json"))["trusted"]


def test_keys_are_added_listed_and_removed(typed):
    first, second = (json.loads(typed(f"key new {n}.key --json")) for n in ("a", "b"))
    assert typed("trust a.pub") == f"trusted: key {first['id']}\n"
    typed(f"trust {second['key']}")
    assert keys(typed) == sorted((first["key"], second["key"]))
    assert f"{first['key']} {first['id']}\n" in typed("trust")
    assert typed(f"trust --remove {first['id']}") == f"no longer trusted: key {first['id']}\n"
    with pytest.raises(AdapterhubError, match="no key"):
        typed("trust --remove a.pub")
    assert typed("trust --remove b.pub") == f"no longer trusted: key {second['id']}\n"
    assert keys(typed) == []


def test_the_general_switch(typed):
    typed("trust --require-signatures")
    assert json.loads(typed("trust --json"))["require"] is True
    typed("trust --no-require-signatures")
    assert json.loads(typed("trust --json"))["require"] is False


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("trust a.key", "a.pub"),
        ("trust missing.pub", "missing"),
        ("trust --remove", "trust --remove KEY"),
    ],
)
def test_mistakes(typed, line, remedy):
    typed("key new a.key")
    with pytest.raises(AdapterhubError) as error:
        typed(line)
    assert remedy in str(error.value)
    assert keys(typed) == []
