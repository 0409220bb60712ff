"""The committed studies."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertConfig

from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.load import meta_model
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.study import read_study
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import parse_methods
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.infer_task import DEFAULT
from tests.kit.selection import cases_of

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture
def minilm(tmp_path):
    """The sites of a model of MiniLM's shape, without weights."""
    BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ).save_pretrained(tmp_path)
    return anatomy_of(meta_model(str(tmp_path), task="classification"))


def counts_of(name: str, anatomy: Anatomy) -> dict[str, int]:
    labels = read_study(STUDIES / f"{name}.yaml").labels().items()
    return {n: sum(m.count(anatomy) for m in parse_methods(spec)) for n, spec in labels}


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_read_and_says_how_it_is_run(path):
    assert read_study(path).labels()
    assert f"adapterhub bench REPOSITORY/benchmarks/studies/{path.name}" in path.read_text("utf-8")


def test_parameters_are_as_many_as_the_studies_say(minilm):
    counts = counts_of("he2022", minilm)
    assert len(counts) == 8
    assert max(counts.values()) <= 1.005 * min(counts.values())
    comment = (STUDIES / "he2022.yaml").read_text("utf-8")
    assert all(f"{count:,}" in comment for count in counts.values())
    counts = counts_of("low-data", minilm)
    assert counts["prefix(length=5)"] == 23_040
    assert round(counts["prefix(length=5)"] / counts["full"], 4) == 0.001, "a thousandth"


def test_the_reference_study_has_the_methods_of_its_time_that_are_not_built_from_others():
    study = read_study(STUDIES / "glue.yaml")
    names = {method.name for spec in study.labels().values() for method in parse_methods(spec)}
    assert names <= METHODS.keys() - {"adapterfusion"}
    assert len(study.labels()) == len(names) == 25
    assert study.baseline == "lora"
    assert list(study.tasks()) == list(study.tests()) == ["sst2", "cola", "mrpc", "rte", "stsb"]
    metrics = {
        name: each.train.best_metric or parse_task(each.task or DEFAULT).main_metric
        for name, each in study.tasks().items()
    }
    assert metrics == {
        "sst2": "accuracy", "cola": "matthews", "mrpc": "accuracy", "rte": "accuracy",
        "stsb": "pearson",
    }  # fmt: skip


RECORDED = sorted(STUDIES.glob("*/records"))


@pytest.fixture(scope="module", params=cases_of(RECORDED), ids=lambda path: path.parent.name)
def committed(request):
    """The folder of a study with its records, which are read once."""
    return request.param.parent, list(RecordFolder(request.param).all())


def test_committed_records_are_those_of_the_recipe(committed):
    folder, records = committed
    study = read_study(STUDIES / f"{folder.name}.yaml")
    assert records
    assert {record.cell.method for record in records} <= {*study.labels(), *study.bench.recorded}
    assert {record.cell.task for record in records} <= set(study.tasks())
    assert {record.status for record in records} <= {"done", "diverged"}
    assert all(record.rows for record in records if record.cell.stage == "final")


def test_a_study_with_a_report_is_complete(committed):
    """Records are committed as they come; a report is, when all methods have all seeds."""
    folder, records = committed
    study = read_study(STUDIES / f"{folder.name}.yaml")
    finals = [record.cell for record in records if record.cell.stage == "final"]
    ran = {(cell.task, cell.method, cell.seed) for cell in finals}
    seeds = range(1, study.bench.seeds + 1)
    whole = {(t, m, s) for t in study.tasks() for m in study.labels() for s in seeds}
    assert ran >= whole or not (folder / "report.md").exists()
    reported = {report.parent / "records" for report in STUDIES.glob("*/report.md")}
    assert reported <= {*RECORDED}
