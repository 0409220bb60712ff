"""`adapterhub bench`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from adapterhub import cli, ray_cluster
from adapterhub.bench.conduct import LocalEngine
from adapterhub.cli import _study
from adapterhub.training.loading import SharedLoader
from tests.kit.data import sentences, write_tsv
from tests.kit.session import home_in, refused, succeeded

SMALL = ("--methods", "head,lora(rank=2, alpha=4)", "--rates", "1", "--seeds", "1", "--steps", "2")


def study_words(backbone, folder):
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(120))]
    source = write_tsv(folder / "mine.tsv", rows)
    return ("--backbone", backbone, "--train", source, "--output", folder / "study", "dtype=fp32")


@pytest.fixture
def words(backbone, tmp_path):
    return study_words(backbone, tmp_path)


@pytest.fixture(scope="module")
def ran(backbone, tmp_path_factory):
    """A study that ran once, and what the command wrote to the screen."""
    folder = tmp_path_factory.mktemp("ran")
    words = ["bench", *study_words(backbone, folder), *SMALL]
    with home_in(folder / "home"):
        result = CliRunner().invoke(cli.group, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return folder / "study", result.stderr


@pytest.fixture
def study(ran, tmp_path):
    """A copy of the folder of a study that ran."""
    return shutil.copytree(ran[0], tmp_path / "study")


def test_flags_alone_run_a_study_and_the_same_command_repeats_nothing(adapterhub, ran, study):
    records = study / "records"
    assert len(list(records.glob("*.json"))) == 2
    assert "rows train" in ran[1]
    assert "head, rate" in ran[1]
    times = {path: path.stat().st_mtime_ns for path in records.iterdir()}
    code, _, err = adapterhub("bench", "--output", study)
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in records.iterdir()} == times
    assert "rate 1.0e-03" not in err


def test_a_shard_ends_with_a_code_of_its_own_until_all_is_done(adapterhub, words, tmp_path):
    small = (*SMALL, "--quiet")
    codes = [adapterhub("bench", *words, *small, "--shard", f"{number}/2") for number in (1, 2)]
    records = len(list((tmp_path / "study" / "records").glob("*.json")))
    assert records == 2
    assert codes[1][0] == 0, codes[1]
    first_had_all = "left to other shards" not in codes[0][1]
    assert codes[0][0] == (0 if first_had_all else 3)


def test_the_engine_is_chosen_by_a_flag(adapterhub, words, monkeypatch):
    calls = []

    class Engine(LocalEngine):
        def __init__(self, contexts, work, workers, address):
            super().__init__(contexts, SharedLoader(), work)
            calls.append((work.is_absolute(), workers, address))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            calls.append("stopped")

    monkeypatch.setattr(_study, "RayEngine", Engine)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: None)
    succeeded(adapterhub("bench", *words, *SMALL, "--engine", "ray", "--workers", "2",
                              "--ray-address", "host:1"))  # fmt: skip
    assert calls == [(True, 2, "host:1"), "stopped"]


def test_flags_of_ray_and_shards_are_checked(adapterhub, words, monkeypatch):
    refused(adapterhub("bench", *words, "--workers", "2"), "--workers", "--engine ray")
    refused(adapterhub("bench", *words, "--shard", "3/2"), "K/N")
    budget = ("--shard", "1/2", "--budget", "1h")
    refused(adapterhub("bench", *words, *budget), "--steps N")
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(adapterhub("bench", *words, "--engine", "ray"), 'pip install "adapterhub[ray]"')


def test_the_table_and_the_reports(adapterhub, words, tmp_path):
    study = tmp_path / "study"
    small = ("--methods", "head,lora(rank=2)", "--rates", "1", "--seeds", "2", "--steps", "2")
    more = ("train.batch_size=8", "--quiet")
    out = succeeded(adapterhub("bench", *words, *small, *more))
    told = "Cannot tell yet: no method has three finished seeds."
    for text in ("bag of words", "majority class", "against", told):
        assert text in out
    page, markdown = (study / "report.html").read_text(), (study / "report.md").read_text()
    assert told in page
    assert told in markdown


def test_the_reports_are_made_anew_from_the_records(adapterhub, study):
    made = {name: (study / name).read_bytes() for name in ("report.html", "report.md")}
    for command in (("bench", "--output", study), ("report", study)):
        for name in made:
            (study / name).unlink()
        succeeded(adapterhub(*command), "report.html")
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
