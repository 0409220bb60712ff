"""benchmarks/studies/winners.py on a study that is only written down."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import winners

from adapterhub.bench.baselines import Constant, write_baselines
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.study import RECORDS, STUDY, Study
from tests.kit.studies import made_records


def test_the_winner_is_trained_for_epochs_with_its_rate_and_published(
    made_study: Study, tmp_path: Path
) -> None:
    (tmp_path / STUDY).write_text(made_study.to_yaml(), encoding="utf-8")
    records = RecordFolder(tmp_path / RECORDS)
    for record in made_records(made_study, {"head": 0.6, "lora": 0.9, "mam": float("nan")}):
        records.write(record)
    ((task, method, words),) = winners.winners(tmp_path, tmp_path / "runs", 3)
    assert (task, method) == ("mine", "lora")
    assert words[0] == "train"
    pairs = dict(itertools.pairwise(words))
    assert pairs["--method"] == "lora"
    assert float(pairs["--lr"]) == 1e-3
    assert pairs["--epochs"] == "3"
    assert pairs["--output"] == str(tmp_path / "runs" / "mine")
    assert "--steps" not in words
    options = argparse.Namespace(output=tmp_path / "runs", registry=tmp_path / "registry")
    line = winners.published(task, method, options)
    assert line[:2] == ["publish", str(tmp_path / "runs" / "mine")]
    assert line[-2:] == ["--registry", str(tmp_path / "registry")]


def test_a_task_on_which_nothing_was_shown_to_learn_has_no_winner(
    made_study: Study, tmp_path: Path
) -> None:
    (tmp_path / STUDY).write_text(made_study.to_yaml(), encoding="utf-8")
    records = RecordFolder(tmp_path / RECORDS)
    for record in made_records(made_study, {"head": 0.5, "lora": 0.53, "mam": float("nan")}):
        records.write(record)
    assert len(list(winners.winners(tmp_path, tmp_path / "runs", 3))) == 1
    write_baselines(tmp_path, {"mine": Constant("majority class", "classes", "pos", 0.6)}, {})
    assert list(winners.winners(tmp_path, tmp_path / "runs", 3)) == []
