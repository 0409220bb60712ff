"""`names.json`: read strictly, written only as a reader accepts it."""

from __future__ import annotations

import json

import pytest

from adapterhub.errors import ConfigError, FileError
from adapterhub.registry import names_file
from adapterhub.registry.names_file import NAMES_FILE, Names, read_names, write_names


def test_what_is_written_is_read(tmp_path):
    assert read_names(tmp_path) == Names()
    names = Names({"best": "v1"}, {"v2": "a\nreason"}, 2)
    write_names(tmp_path, names)
    assert read_names(tmp_path) == names
    assert [path.name for path in tmp_path.iterdir()] == [NAMES_FILE]


def test_earlier_releases_wrote_no_highest_version(tmp_path):
    (tmp_path / NAMES_FILE).write_text('{"tags": {"con": "v1"}, "yanked": {}}')
    assert read_names(tmp_path) == Names({"con": "v1"}, {}, 0)


def test_the_error_names_the_file_and_the_problem(tmp_path):
    (tmp_path / NAMES_FILE).write_text('{"tags": {"best": 3}, "yanked": {}}')
    with pytest.raises(FileError, match=r"names\.json(.|\n)*tags\.best: 3"):
        read_names(tmp_path)


@pytest.mark.parametrize("tags", [{"v1": "v2"}, {"best": "../x"}, {"a b": "v1"}])
def test_invalid_names_are_not_written(tmp_path, tags):
    with pytest.raises(ConfigError):
        write_names(tmp_path, Names(tags))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_for_readers_is_not_written(tmp_path, monkeypatch):
    names = Names({f"tag-{number}": "v1" for number in range(100)})
    write_names(tmp_path, names)
    monkeypatch.setattr(names_file, "MAX_NAMES_BYTES", 1_000)
    with pytest.raises(FileError, match="more than 1000"):
        read_names(tmp_path)
    with pytest.raises(ConfigError, match="invalid tags"):
        write_names(tmp_path, names)
    assert len(json.loads((tmp_path / NAMES_FILE).read_bytes())["tags"]) == 100
