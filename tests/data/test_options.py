"""Options of the data."""

from __future__ import annotations

import pytest

from adapterhub.config.options import from_dict
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError


def test_target_returns_the_file_of_a_split() -> None:
    options = DataOptions(train_target="a.de", eval_target="b.de")
    assert (options.target("train"), options.target("eval")) == ("a.de", "b.de")


@pytest.mark.parametrize("choices", ["options", ["a", "b"]])
def test_choices_are_one_column_or_several(choices: str | list[str]) -> None:
    expected = tuple(choices) if isinstance(choices, list) else choices
    assert from_dict(DataOptions, {"choices": choices}).choices == expected


def test_an_unknown_format_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        from_dict(DataOptions, {"format": "json"})
