"""The committed studies."""

from __future__ import annotations

from pathlib import Path

from adapterhub.bench.study import read_study
from adapterhub.methods import METHODS
from adapterhub.tasks import parse_task

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


def test_the_reference_study_has_every_method_that_is_not_built_from_others() -> None:
    study = read_study(STUDIES / "glue.yaml")
    assert set(study.labels()) == set(METHODS) - {"adapterfusion"}
    assert len(study.labels()) == 25
    assert study.baseline == "lora"
    assert list(study.tasks()) == list(study.tests()) == ["sst2", "cola", "mrpc", "rte", "stsb"]
    metrics = {
        name: each.train.best_metric or parse_task(each.task).main_metric
        for name, each in study.tasks().items()
    }
    assert metrics == {
        "sst2": "accuracy", "cola": "matthews", "mrpc": "accuracy", "rte": "accuracy",
        "stsb": "pearson",
    }  # fmt: skip
