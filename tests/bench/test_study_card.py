"""The section of a card that shows an adapter's method among those of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_adapters import IDENTITY
from studies import made_records

from adapterhub.bench.baselines import Constant, write_constants
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.study import Study
from adapterhub.bench.study_card import study_section
from adapterhub.bench.study_folder import RECORDS, STUDY
from adapterhub.errors import ConfigError
from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.methods._spec import dump_methods, parse_methods

ACCURACY = {"head": 0.6, "lora": 0.9, "mam": float("nan")}


def manifest_of(spec: str, fingerprint: str = "c" * 64) -> Manifest:
    backbone = BackboneRef("acme/bert", None, fingerprint, "bert", identity=IDENTITY)
    return Manifest(name="mine", methods=dump_methods(parse_methods(spec)), backbone=backbone)


@pytest.fixture
def folder(tmp_path: Path, made_study: Study) -> Path:
    (tmp_path / STUDY).write_text(made_study.to_yaml(), encoding="utf-8")
    records = RecordFolder(tmp_path / RECORDS)
    for record in made_records(made_study, ACCURACY):
        records.write(record)
    write_constants(tmp_path, {"mine": Constant("majority class", "classes", "pos", 0.6)})
    return tmp_path


def test_the_method_comes_first_then_those_that_it_is_compared_with(folder: Path) -> None:
    text = study_section(folder, manifest_of("head"))
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["| method", "| head", "| lora", "| majority class"]
    assert "3 methods were compared on mine" in text
    assert "head is worse than lora" in text
    assert "recommends" not in text
    assert "not that of this file" in text


def test_the_recommended_one_is_called_so(folder: Path) -> None:
    assert "It is the method that the study recommends." in study_section(
        folder, manifest_of("lora")
    )


def test_a_method_is_known_by_its_options_not_by_its_words(folder: Path) -> None:
    assert study_section(folder, manifest_of("lora(rank=8)")).count("| lora |") == 1
    with pytest.raises(ConfigError, match="with its options") as error:
        study_section(folder, manifest_of("lora(rank=3)"))
    assert "head" in str(error.value)


def test_another_backbone_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="another backbone"):
        study_section(folder, manifest_of("head", "d" * 64))


def test_of_several_tasks_one_must_be_named(folder: Path, made_study: Study) -> None:
    with pytest.raises(ConfigError, match="no task 'yours'"):
        study_section(folder, manifest_of("head"), "yours")
    tasks: dict[str, object] = {"mine": {}, "other": {}}
    bench = replace(made_study.bench, tasks=tasks)
    (folder / STUDY).write_text(replace(made_study, bench=bench).to_yaml(), encoding="utf-8")
    records = RecordFolder(folder / RECORDS)
    for record in list(records.all()):
        cell = replace(record.cell, task="other")
        records.write(replace(record, key=record.key[::-1], cell=cell))
    with pytest.raises(ConfigError, match="has several tasks") as error:
        study_section(folder, manifest_of("head"))
    assert "--study-task" in str(error.value)
    assert "on other" in study_section(folder, manifest_of("head"), "other")
