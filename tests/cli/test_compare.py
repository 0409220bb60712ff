"""`adapterhub compare` and `report`, and `train --open`."""

import json
import webbrowser
from pathlib import Path

import pytest

from adapterhub.cli.compare import difference_lines
from adapterhub.pages.row_scores import Difference, read_predictions
from tests.kit.runs import predictions, run_folder
from tests.kit.session import refused, succeeded


def rows(right: int, total: int = 40) -> list[dict]:
    given = ("a" if i < right else "b" for i in range(total))
    return [{"label": "a", "prediction": label, "score": 0.9} for label in given]


@pytest.fixture
def runs(tmp_path):
    right = {"head": 20, "lora": 35, "near": 21}
    files = {name: predictions("classes", rows(count)) for name, count in right.items()}
    files |= {"other": predictions("classes", rows(20), data="x"), "old": None}
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
    none = difference_lines("b", "a", Difference("f1", 0.0, 0.0, 0.0))  # no disagreements
    assert none == ["b - a: +0.000 f1 (95 % +0.000 to +0.000)", f"  {chance}"]


def test_runs_on_different_data_are_only_listed(adapterhub, runs, tmp_path):
    words = ("compare", runs["head"], runs["other"])
    refused(adapterhub(*words), "evaluated on different data", "--list")
    code, out, err = adapterhub(*words, "--list")
    assert (code, err) == (0, "")
    assert "other - head" not in out
    # Many runs are rows by their names; one without predictions has the reason.
    words = ("compare", runs["head"], runs["lora"], runs["old"])
    succeeded(adapterhub(*words), "lora - head", "no test for old: no predictions.jsonl")
    out = succeeded(adapterhub("compare", "--list", *runs.values()))
    assert runs.keys() <= {line.split()[0] for line in out.splitlines() if line.strip()}
    assert all(len(line) <= 80 for line in out.splitlines())
    folders = [run_folder(tmp_path / name / "run") for name in ("one", "two")]
    succeeded(adapterhub("compare", "--list", *folders), "one/run", "two/run")


# `adapterhub report` and `train --open`.


@pytest.fixture
def browser(monkeypatch):
    """Return the addresses that a browser was opened with; there is a display."""
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: opened.append(uri) or True)
    for name in ("SSH_CONNECTION", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    return opened


def test_the_page_is_made_anew_and_opened_where_that_can_be(
    adapterhub, tmp_path, browser, monkeypatch
):
    folder = run_folder(tmp_path / "mine", predictions("classes"))
    code, out, err = adapterhub("report", folder)
    assert (code, err) == (0, "")
    assert out == f"report       {folder / 'report.html'}\n"
    assert "Worst mistakes" in (folder / "report.html").read_text()
    assert browser == []
    code, _, err = adapterhub("report", folder, "--open", "--output", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert browser == [(tmp_path / "page.html").as_uri()]
    monkeypatch.setenv("SSH_CONNECTION", "1")
    code, out, err = adapterhub("report", folder, "--open")
    assert (code, "report.html" in out, len(browser)) == (0, True, 1)
    assert "no browser here" in err
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.setattr(webbrowser, "open", lambda uri: False)
    code, _, err = adapterhub("report", folder, "--open")
    assert (code, "no browser was found" in err) == (0, True)


def test_several_runs_are_one_page(adapterhub, tmp_path, browser):
    folders = [run_folder(tmp_path / "runs" / name) for name in ("one", "two")]
    code, out, err = adapterhub("report", *folders, "--open")
    page = tmp_path / "runs" / "runs.html"
    assert (code, err, out) == (0, "", f"report       {page}\n")
    assert browser == [page.as_uri()]
    assert adapterhub("report", *folders, page, "--output", tmp_path / "mine.html")[0] == 0
    assert (tmp_path / "mine.html").read_bytes() == page.read_bytes()


def test_train_shows_curves_and_opens_the_page_or_makes_none(train, browser, tmp_path):
    out = succeeded(train("--open", "train.epochs=3", "train.log_every=2", "train.report=true"))
    (page,) = browser
    assert page.endswith("/report.html")
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert set(lines["train loss"]) & set("▁█")
    assert set(lines["accuracy"]) & set("▁█")
    assert f"adapterhub report {Path(page.removeprefix('file://')).parent} --open" in out
    assert all(len(line) <= 79 or str(tmp_path) in line for line in out.splitlines())
    out = succeeded(train("--steps", 1, output=tmp_path / "none"))  # with train.report=false
    assert "--open" not in out
    names = {path.name for path in (tmp_path / "none").iterdir()}
    assert not {"report.html", "predictions.jsonl"} & names


def test_texts_of_the_data_are_never_published(trained, adapterhub, tmp_path):
    """`publish` of a run takes the files of adapter/ only; push and export read the same folder."""
    (word,) = {row["texts"][0] for row in read_predictions(trained).rows[:1]}
    succeeded(adapterhub("publish", trained, "--registry", tmp_path / "registry"))
    succeeded(adapterhub("export", trained, "--output", tmp_path / "exported"))
    files = [p for f in ("registry", "exported") for p in (tmp_path / f).rglob("*") if p.is_file()]
    assert len(files) > 5
    assert not [p for p in files if p.name in ("report.html", "predictions.jsonl")]
    assert not [p for p in files if word.encode() in p.read_bytes()]
