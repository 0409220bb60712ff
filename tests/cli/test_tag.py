"""`adapterhub tag`."""

from __future__ import annotations

import json

import pytest

from adapterhub.errors import ConfigError
from tests.kit import registries


def test_tags_are_set_moved_listed_and_removed(typed, tmp_path):
    for seed in (0, 1):
        registries.write_sample(tmp_path / f"made-{seed}", seed)
        typed(f"publish ./made-{seed} --name polite")
    assert typed("tag polite") == "no tag\n"
    assert typed("tag polite@v1 best") == "polite@best is v1\n"
    assert typed("tag polite@v2 best") == "polite@best is v2, before v1\n"
    assert typed("tag polite@v2 best") == "polite@best is v2\n"
    assert typed("tag polite").split() == ["best", "v2"]
    assert json.loads(typed("tag polite good --json")) == {
        "name": "polite", "tags": {"best": "v2", "good": "v2"},
    }  # fmt: skip
    assert typed("tag polite best --remove") == "removed the tag best, which was v2\n"
    with pytest.raises(ConfigError, match="unknown tag"):
        typed("tag polite best --remove")


def test_remove_takes_a_tag(adapterhub):
    assert "--remove takes a TAG" in adapterhub("tag", "polite", "--remove")[2]
