"""Comparing runs: different evaluation data are refused."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from adapterhub.errors import ConfigError
from adapterhub.pages.comparison import (
    RUNS_PAGE,
    check_comparable,
    overlay_chart,
    pairwise,
    runs_page,
    write_runs_page,
)
from adapterhub.pages.page import read_run
from tests.kit.runs import predictions, run_folder


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


def test_runs_are_named_by_their_folders_and_overlaid(tmp_path):
    folders = [run_folder(tmp_path / name) for name in ("a/one", "a/two", "b/two")]
    path = write_runs_page(folders)
    page = path.read_text()
    assert path == tmp_path / RUNS_PAGE
    for name in ("one", "a/two", "b/two"):
        assert f'<th scope="row"><bdi>{name}</bdi></th>' in page
    for title in ("Training loss", "Evaluation: accuracy", "Evaluation: loss", "Learning rate",
                  "Examples per second", "Peak memory so far, GB"):  # fmt: skip
        assert title in page
    assert page.count("<svg") == 6
    assert "lower is better" in page


def test_different_evaluation_data_are_said(tmp_path):
    runs = [read_run(run_folder(tmp_path / d, predictions("classes", data=d))) for d in "ab"]
    assert "different data" in runs_page(runs)
    assert "different data" not in runs_page(runs[:1])


def test_runs_with_different_metrics_and_gaps_make_a_page(tmp_path):
    one = run_folder(tmp_path / "one")
    other = run_folder(tmp_path / "other", metric="f1")
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] = None
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = runs_page([read_run(one), read_run(other)])
    assert "Evaluation: f1" in page


def test_lines_have_their_names_at_their_ends():
    lines = {f"run {n}": [(1, n), (2, n / 2)] for n in range(9)}
    svg = overlay_chart({**lines, "none": [(1, None)]}, "step")
    texts = set(ElementTree.fromstring(svg).itertext())
    assert set(lines) <= texts
    assert "none" not in texts
