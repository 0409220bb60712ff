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


def test_mistakes_are_found_before_anything_is_loaded(adapterhub, words, tmp_path):
    refused(adapterhub("bench", "--backbone", "x"), "--train is missing", "--output")
    refused(adapterhub("bench", *words, "--methods", "lara"), "lara", "lora")
    refused(adapterhub("bench", *words, "--rows", "many"), "--rows", "100,500")
    refused(adapterhub("bench", *words, "--lr", "1e-3"), "--lr")
    refused(adapterhub("bench", *words, "train.learning_rate=1"), "a study chooses")
    assert not Path(tmp_path / "study").exists()
