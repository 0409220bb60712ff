"""`names.json`: read strictly, written only as a reader accepts it."""

from __future__ import annotations

import json

import pytest

from adapterhub.errors import ConfigError, FileError
from adapterhub.registry import version_files
from adapterhub.registry.store import check_tags
from adapterhub.registry.version_files import Names, names_bytes, parse_names


def test_what_is_written_is_read():
    names = Names({"best": "v1"}, {"v2": "a\nreason"}, 2)
    assert parse_names(names_bytes(names, "polite"), "names.json") == names


def test_earlier_releases_wrote_no_highest_version():
    data = b'{"tags": {"con": "v1"}, "yanked": {}}'
    assert parse_names(data, "names.json") == Names({"con": "v1"}, {}, 0)


def test_the_error_names_the_file_and_the_problem():
    with pytest.raises(FileError, match=r"names\.json(.|\n)*tags\.best: 3"):
        parse_names(b'{"tags": {"best": 3}, "yanked": {}}', "names.json")


@pytest.mark.parametrize("tags", [{"v1": "v2"}, {"best": "../x"}, {"a b": "v1"}])
def test_invalid_names_are_not_written(tags):
    with pytest.raises(ConfigError):
        names_bytes(Names(tags), "polite")


def test_a_file_that_is_too_large_for_readers_is_not_written(monkeypatch):
    names = Names({f"tag-{number}": "v1" for number in range(100)})
    data = names_bytes(names, "polite")
    assert len(json.loads(data)["tags"]) == 100
    monkeypatch.setattr(version_files, "MAX_NAMES_BYTES", 1_000)
    with pytest.raises(FileError, match="more than 1000"):
        parse_names(data, "names.json")
    with pytest.raises(ConfigError, match="invalid tags"):
        names_bytes(names, "polite")


@pytest.mark.parametrize("tags", [("v1",), ("1",), ("a b",), ("ok", "")])
def test_invalid_tags_are_listed(tags):
    with pytest.raises(ConfigError) as caught:
        check_tags(tags)
    assert caught.value.offenders == tuple(repr(tag) for tag in tags if tag != "ok")
