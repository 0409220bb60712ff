"""What the bare language model predicts by a prompt, as a row of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from fixtures import write_tsv
from studies import made_records, planned

from adapterhub.bench import zero_shot
from adapterhub.bench.prompted_rows import PromptedRows, read_prompted
from adapterhub.bench.results import study_results
from adapterhub.bench.study import Study, read_study
from adapterhub.bench.zero_shot import (
    language_model_of,
    predict_tasks,
    prompt_key,
    prompt_of,
)

KINDS = {"gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq", "bart": "seq2seq"}


@pytest.mark.parametrize(("architecture", "kind"), KINDS.items())
def test_the_checkpoint_says_whether_it_is_a_language_model(
    architecture: str, kind: str, backbones: Any
) -> None:
    assert language_model_of(str(backbones(architecture))) == kind


def test_an_encoder_is_one_only_with_its_head(backbone: Path, tmp_path: Path) -> None:
    assert language_model_of(str(backbone)) is None
    config = transformers.AutoConfig.from_pretrained(backbone)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    assert language_model_of(str(tmp_path)) == "masked-lm"


def test_a_prompt_has_the_texts_and_the_names() -> None:
    assert prompt_of(["so good", "a pair"], ["yes", "no"]) == "so good\na pair\nOne of yes, no:"


@pytest.fixture
def lm_study(backbones: Any, tmp_path: Path) -> Study:
    rows = [(f"the movie was {n}", ("good", "bad")[n % 2]) for n in range(60)]
    source = write_tsv(tmp_path / "mine.tsv", rows)
    flags = {"backbone": str(backbones("gpt2")), "output": str(tmp_path / "study"),
             "data": {"train": str(source)}}  # fmt: skip
    return read_study(None, ["dtype=fp32"], flags, {"methods": ("head",), "steps": 2})


def test_the_test_rows_are_predicted_once(
    lm_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, _ = planned(lm_study, tmp_path)
    context = plan.contexts["mine"]
    assert predict_tasks(plan.contexts, tmp_path) == []
    found = read_prompted(tmp_path)["mine"]
    assert found.key == prompt_key(context)
    assert found.columns["label"] == [example.label for example in context.data.test]
    assert set(found.columns["prediction"]) <= {"good", "bad"}
    assert all(0.5 <= score <= 1 for score in found.columns["score"])
    monkeypatch.setattr(zero_shot, "load_backbone", lambda *a, **k: pytest.fail("loaded again"))
    assert predict_tasks(plan.contexts, tmp_path) == []
    assert read_prompted(tmp_path)["mine"] == found


def test_what_takes_too_long_is_left_out_and_said(
    lm_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, _ = planned(lm_study, tmp_path)
    monkeypatch.setattr(zero_shot, "MOST_TOKENS", {"cpu": 10})
    monkeypatch.setattr(zero_shot, "MOST", 10)
    (note,) = predict_tasks(plan.contexts, tmp_path)
    assert "left out" in note
    assert predict_tasks(plan.contexts, tmp_path) == [note]


def test_backbones_without_such_a_head_have_no_row(study: Study, tmp_path: Path) -> None:
    plan, _, _ = planned(study, tmp_path)
    assert predict_tasks(plan.contexts, tmp_path) == []
    assert read_prompted(tmp_path) == {}


def test_labels_that_are_numbers_have_no_row(lm_study: Study, tmp_path: Path) -> None:
    plan, _, _ = planned(lm_study, tmp_path)
    context = plan.contexts["mine"]
    run = replace(context.data.run, labels=("0", "1"))
    numbered = replace(context, data=replace(context.data, run=run))
    assert predict_tasks({"mine": numbered}, tmp_path) == []
    assert not read_prompted(tmp_path)


def test_it_stands_beside_the_methods_with_an_interval(made_study: Study) -> None:
    records = made_records(made_study, {"head": 0.6, "lora": 0.9})
    rows = next(record.rows for record in records if record.rows)
    columns = {**rows.columns, "prediction": ["pos"] * len(rows.columns["label"])}
    prompted = {"mine": PromptedRows("key", columns)}
    (task,) = study_results(made_study, records, {}, prompted=prompted)
    found = task.find("zero-shot prompt")
    assert found.estimate.value == pytest.approx(133 / 200, abs=0.01)
    assert found.estimate.low is not None
    assert found.costs is None
    assert found.comparison is not None
    assert found.comparison.verdict == "worse"
