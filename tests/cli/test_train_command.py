"""The command that trains what a study recommends: it runs, with the study's options."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from adapterhub.bench.baselines import Constant
from adapterhub.bench.results import study_results
from adapterhub.bench.study import read_study
from adapterhub.cli._study import train_commands
from tests.kit.data import sentences, write_tsv
from tests.kit.session import succeeded
from tests.kit.studies import made_records

BEST = "lora(rank=2)"
ACCURACY = {"head": 0.6, BEST: 0.95}


@pytest.fixture
def study(backbone, tmp_path):
    source = write_tsv(tmp_path / "my data.tsv", sentences(40))
    flags = {"backbone": str(backbone), "output": str(tmp_path / "study"),
             "data": {"train": str(source)}}  # fmt: skip
    words = ["dtype=fp32", "train.batch_size=8", "train.report=false", "seed=0"]
    return read_study(None, words, flags, {"methods": tuple(ACCURACY), "baseline": BEST})


def test_the_command_trains_the_winner(adapterhub, study, tmp_path):
    study = replace(study, bench=replace(study.bench, steps=80))
    results = study_results(study, made_records(study, ACCURACY), {})
    ((place, line),) = train_commands(study, results, tmp_path / "study").items()
    assert place == ("my data", 100)
    program, *words = shlex.split(line)
    assert program == "adapterhub"
    succeeded(adapterhub(*words))
    recipe = (tmp_path / "study" / "best" / "recipe.yaml").read_text()
    for option in ("batch_size: 8", "max_steps: 80", "learning_rate: 0.001", "dtype: fp32"):
        assert option in recipe
    assert "rank: 2" in recipe or "rank=2" in recipe


@pytest.mark.parametrize(("rows", "usual"), [(1000, 375), (100, 156)])
def test_after_short_runs_of_a_budget_nothing_is_recommended(study, tmp_path, rows, usual):
    """The runs have 80 steps; a command of a study with a budget takes as many as `train`."""
    study = replace(study, bench=replace(study.bench, budget="8m", steps=80, rates=3))
    results = study_results(study, made_records(study, ACCURACY, rows=rows), {})
    advice = results[0].advice
    (line,) = train_commands(study, results, tmp_path).values()
    assert f"--method '{BEST}'" in line
    assert "--steps" not in line
    if usual <= 2 * 80:
        assert advice.method == BEST
        assert "--lr 0.001" in line
        return
    assert (advice.method, advice.candidate, advice.best) == (None, BEST, BEST)
    assert f"80 steps, where adapterhub train takes {usual}" in " ".join(advice.reasons)
    assert "budget of about 38 min" in " ".join(advice.reasons)  # 4.7 times as many steps
    assert not advice.reasons[0].startswith("Take")
    assert "--lr" not in line


def test_only_the_largest_number_of_rows_of_a_task_has_a_command(study, tmp_path):
    records = [*made_records(study, ACCURACY, rows=50), *made_records(study, ACCURACY, rows=100)]
    assert [*train_commands(study, study_results(study, records, {}), tmp_path)] == [
        ("my data", 100)
    ]


def test_tasks_have_folders_of_their_own(study, tmp_path):
    tasks = {"one": {"data": {"train": "1.tsv"}}, "two": {"data": {"train": "2.tsv"}}}
    both = replace(study, bench=replace(study.bench, tasks=tasks))
    found = train_commands(both, study_results(both, made_records(both, ACCURACY), {}), tmp_path)
    for name, number in (("one", 1), ("two", 2)):
        line = found[name, 100]
        assert f"--train {number}.tsv" in line
        assert f"best-{name}" in line


def test_a_spec_that_is_no_text_is_quoted(study, tmp_path):
    both = [{"lora": {"rank": 2}}]
    label = "lora(rank=2)"
    other = replace(study, bench=replace(study.bench, methods=("head", both), baseline=label))
    results = study_results(other, made_records(other, {"head": 0.6, label: 0.95}), {})
    (line,) = train_commands(other, results, tmp_path).values()
    words = shlex.split(line)
    assert words[words.index("--method") + 1] == '[{"lora": {"rank": 2}}]'


def test_what_is_not_trained_has_no_command(study, tmp_path):
    constants = {"my data": Constant("majority class", "classes", "pos", 0.6)}
    accuracy = {"head": 0.5, BEST: 0.5}
    results = study_results(study, made_records(study, accuracy), constants)
    assert results[0].advice.method == "majority class"
    assert train_commands(study, results, tmp_path) == {}
