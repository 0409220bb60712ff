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
    assert typed("trust hf:acme/* a.pub").startswith(f"trusted for hf:acme/*: key {first['id']}")
    typed(f"trust hf:Acme/* {second['key']}")
    assert keys(typed) == {"hf:acme/*": sorted((first["key"], second["key"]))}
    assert f"hf:acme/* {first['key']} {first['id']}\n" in typed("trust")
    assert typed(f"trust --remove hf:acme/* {first['id']}") == "hf:acme/*: keys that remain: 1\n"
    with pytest.raises(AdapterhubError, match="no such key"):
        typed("trust --remove hf:acme/* a.pub")
    assert "no key is trusted" in typed("trust --remove hf:acme/*")
    assert keys(typed) == {}


def test_the_general_switch(typed):
    typed("trust --require-signatures")
    assert json.loads(typed("trust --json"))["require"] is True
    typed("trust --no-require-signatures")
    assert json.loads(typed("trust --json"))["require"] is False


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("trust hf:acme/*", "adapterhub trust 'hf:acme/*' KEY"),
        ("trust hf:acme a.pub", "hf:OWNER/*"),
        ("trust hf:acme/* a.key", "a.pub"),
        ("trust hf:acme/* missing.pub", "missing"),
        ("trust --remove", "trust --remove NAMESPACE"),
    ],
)
def test_mistakes(typed, line, remedy):
    typed("key new a.key")
    with pytest.raises(AdapterhubError) as error:
        typed(line)
    assert remedy in str(error.value)
    assert keys(typed) == {}
