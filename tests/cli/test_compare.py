"""`adapterhub compare`."""

from __future__ import annotations

import json

import pytest

from adapterhub.cli.compare import difference_lines
from adapterhub.pages.row_scores import Difference
from tests.kit.runs import predictions, run_folder


def rows(right: int, total: int = 40) -> list[dict]:
    return [
        {"label": "a", "prediction": "a" if i < right else "b", "score": 0.9} for i in range(total)
    ]


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


def test_a_difference_is_said_with_its_interval(adapterhub, runs):
    code, out, err = adapterhub("compare", runs["head"], runs["lora"])
    assert (code, err) == (0, "")
    assert "lora - head: +0.375 accuracy (95 % +0.225 to +0.525)" in out
    assert "right on 15 of 15 disagreements, p = 6.1e-05" in out
    assert "not significant" not in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_chance_is_said_to_be_chance(adapterhub, runs):
    code, out, _ = adapterhub("compare", runs["head"], runs["near"])
    assert code == 0
    assert "not significant: the difference may be chance" in out


def test_runs_on_different_data_are_only_listed(adapterhub, runs):
    code, _, err = adapterhub("compare", runs["head"], runs["other"])
    assert code == 2
    assert "evaluated on different data" in err
    assert "--list" in err
    code, out, err = adapterhub("compare", runs["head"], runs["other"], "--list")
    assert (code, err) == (0, "")
    assert "other - head" not in out


def test_a_run_without_predictions_is_listed_with_the_reason(adapterhub, runs):
    code, out, _ = adapterhub("compare", runs["head"], runs["lora"], runs["old"])
    assert code == 0
    assert "lora - head" in out
    assert "no test for old: no predictions.jsonl" in out


def test_many_runs_are_rows(adapterhub, runs):
    code, out, _ = adapterhub("compare", "--list", *runs.values())
    assert code == 0
    for name in runs:
        assert any(line.strip().startswith(name) for line in out.splitlines())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json(adapterhub, runs):
    code, out, _ = adapterhub("compare", runs["head"], runs["lora"], "--json")
    assert code == 0
    found = json.loads(out)
    assert [run["name"] for run in found["runs"]] == ["head", "lora"]
    assert found["differences"][0]["significant"] is True


def test_runs_of_the_same_name_are_told_apart(adapterhub, tmp_path):
    folders = [run_folder(tmp_path / name / "run") for name in ("one", "two")]
    code, out, _ = adapterhub("compare", "--list", *folders)
    assert code == 0
    assert "one/run" in out
    assert "two/run" in out


def test_one_run_is_refused(adapterhub, runs):
    code, _, err = adapterhub("compare", runs["head"])
    assert code == 2
    assert "nothing to compare" in err


def test_difference_lines_without_disagreements():
    assert difference_lines("b", "a", Difference("f1", 0.0, 0.0, 0.0)) == [
        "b - a: +0.000 f1 (95 % +0.000 to +0.000)",
        "  not significant: the difference may be chance",
    ]
