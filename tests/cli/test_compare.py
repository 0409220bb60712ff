"""`adapterhub compare`."""

from __future__ import annotations

import json

import pytest

from adapterhub.cli.compare import difference_lines
from adapterhub.pages.row_scores import Difference
from tests.kit.runs import predictions, run_folder
from tests.kit.session import refused, succeeded


def rows(right: int, total: int = 40) -> list[dict]:
    given = ("a" if i < right else "b" for i in range(total))
    return [{"label": "a", "prediction": label, "score": 0.9} for label in given]


@pytest.fixture
def runs(tmp_path):
    files = {
        "head": predictions("classes", rows(20)),
        "lora": predictions("classes", rows(35)),
        "near": predictions("classes", rows(21)),
        "other": predictions("classes", rows(20), data="x"),
        "old": None,
    }
    return {name: run_folder(tmp_path / name, file) for name, file in files.items()}


def test_a_difference_is_said_with_its_interval_and_chance_as_chance(adapterhub, runs):
    code, out, err = adapterhub("compare", runs["head"], runs["lora"])
    assert (code, err) == (0, "")
    assert "lora - head: +0.375 accuracy (95 % +0.225 to +0.525)" in out
    assert "right on 15 of 15 disagreements, p = 6.1e-05" in out
    assert "not significant" not in out
    assert all(len(line) <= 80 for line in out.splitlines())
    found = json.loads(succeeded(adapterhub("compare", runs["head"], runs["lora"], "--json")))
    assert [run["name"] for run in found["runs"]] == ["head", "lora"]
    assert found["differences"][0]["significant"] is True
    chance = "not significant: the difference may be chance"
    succeeded(adapterhub("compare", runs["head"], runs["near"]), chance)
    assert difference_lines("b", "a", Difference("f1", 0.0, 0.0, 0.0)) == [  # no disagreements
        "b - a: +0.000 f1 (95 % +0.000 to +0.000)", f"  {chance}",
    ]  # fmt: skip


def test_runs_on_different_data_are_only_listed(adapterhub, runs):
    words = ("compare", runs["head"], runs["other"])
    refused(adapterhub(*words), "evaluated on different data", "--list")
    code, out, err = adapterhub(*words, "--list")
    assert (code, err) == (0, "")
    assert "other - head" not in out


def test_many_runs_are_rows_by_their_names(adapterhub, runs, tmp_path):
    """One without predictions has the reason."""
    words = ("compare", runs["head"], runs["lora"], runs["old"])
    succeeded(adapterhub(*words), "lora - head", "no test for old: no predictions.jsonl")
    out = succeeded(adapterhub("compare", "--list", *runs.values()))
    for name in runs:
        assert any(line.strip().startswith(name) for line in out.splitlines())
    assert all(len(line) <= 80 for line in out.splitlines())
    folders = [run_folder(tmp_path / name / "run") for name in ("one", "two")]
    succeeded(adapterhub("compare", "--list", *folders), "one/run", "two/run")
