"""Comparing runs: different evaluation data are refused."""

from __future__ import annotations

import pytest
from run_folders import predictions, run_folder

from adapterhub.errors import ConfigError
from adapterhub.pages.comparison import check_comparable, pairwise, summary
from adapterhub.pages.run_files import read_run


def test_the_same_data_compare_and_others_do_not(tmp_path):
    runs = [
        read_run(run_folder(tmp_path / name, file))
        for name, file in {
            "a": predictions("classes"),
            "b": predictions("classes"),
            "c": predictions("classes", data="other"),
            "d": None,
        }.items()
    ]
    check_comparable([runs[0], runs[1], runs[3]], ["a", "b", "d"])
    assert [i for i, _ in pairwise([runs[0], runs[1], runs[3]])] == [1]
    assert pairwise([runs[3], runs[0]]) == []
    with pytest.raises(ConfigError, match="evaluated on different data") as error:
        check_comparable(runs[:3], ["a", "b", "c"])
    assert len(error.value.offenders) == 3


def test_a_summary_has_what_the_files_have(tmp_path):
    found = summary(read_run(run_folder(tmp_path)), "a")
    assert (found.seconds, found.memory) == (6.0, 10**9)
    assert (found.trained, found.size, found.rows) == (None, None, None)
