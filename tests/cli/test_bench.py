"""`adapterhub bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import refused
from fixtures import sentences, write_tsv

SMALL = ("--methods", "head,lora(rank=2, alpha=4)", "--rates", "1", "--seeds", "1", "--steps", "2")


@pytest.fixture
def words(backbone, tmp_path):
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(120))]
    source = write_tsv(tmp_path / "mine.tsv", rows)
    return ("--backbone", backbone, "--train", source, "--output", tmp_path / "study", "dtype=fp32")


def test_flags_alone_run_a_study_and_the_same_command_repeats_nothing(adapterhub, words, tmp_path):
    code, _, err = adapterhub("bench", *words, *SMALL)
    assert code == 0, err
    records = tmp_path / "study" / "records"
    assert len(list(records.glob("*.json"))) == 2
    assert "rows train" in err
    assert "head, rate" in err
    times = {path: path.stat().st_mtime_ns for path in records.iterdir()}
    code, _, err = adapterhub("bench", "--output", tmp_path / "study")
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in records.iterdir()} == times
    assert "rate 1.0e-03" not in err


def test_the_table_and_the_reports(adapterhub, words, tmp_path):
    study = tmp_path / "study"
    small = ("--methods", "head,lora(rank=2)", "--rates", "1", "--seeds", "2", "--steps", "2")
    code, out, err = adapterhub("bench", *words, *small, "train.batch_size=8", "--quiet")
    assert code == 0, err
    for text in ("majority class", "against", "Take ", "cannot be told apart"):
        assert text in out
    page, markdown = (study / "report.html").read_text(), (study / "report.md").read_text()
    assert "Take " in page
    assert "Take " in markdown


def test_the_reports_are_made_anew_from_the_records(adapterhub, words, tmp_path):
    study = tmp_path / "study"
    assert adapterhub("bench", *words, *SMALL)[0] == 0
    made = {name: (study / name).read_bytes() for name in ("report.html", "report.md")}
    for command in (("bench", "--output", study), ("report", study)):
        for name in made:
            (study / name).unlink()
        code, out, err = adapterhub(*command)
        assert code == 0, err
        assert "report.html" in out
        assert {name: (study / name).read_bytes() for name in made} == made


def test_a_study_in_which_all_fails_says_why(adapterhub, words, tmp_path):
    methods = ("--methods", "lora(sites=[nowhere])", "--rates", "1", "--seeds", "1", "--steps", "2")
    refused(adapterhub("bench", *words, *methods), "no tested run", "no such site")
    assert len(list((tmp_path / "study" / "records").glob("*.json"))) == 1


def test_mistakes_are_found_before_anything_is_loaded(adapterhub, words, tmp_path):
    refused(adapterhub("bench", "--backbone", "x"), "--train is missing", "--output")
    refused(adapterhub("bench", *words, "--methods", "lara"), "lara", "lora")
    refused(adapterhub("bench", *words, "--rows", "many"), "--rows", "100,500")
    refused(adapterhub("bench", *words, "--lr", "1e-3"), "--lr")
    refused(adapterhub("bench", *words, "train.learning_rate=1"), "a study chooses")
    assert not Path(tmp_path / "study").exists()
