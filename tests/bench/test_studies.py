"""The committed studies, and the scripts of benchmarks/studies but those of test_peers.py."""

from __future__ import annotations

import argparse
import gzip
import itertools
import math
from dataclasses import replace
from pathlib import Path

import claims
import forgetting
import general_text
import good_rates
import miniature
import pytest
import several_heads
import winners
from run_records import RunRecords
from transformers import BertConfig

from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.load import meta_model
from adapterhub.bench.baselines import Constant, write_baselines
from adapterhub.bench.cells import Cell
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.study import RECORDS, STUDY, Study, read_study
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import parse_methods
from adapterhub.pages.row_scores import row_score
from adapterhub.recipe.recipe import read_draft
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.infer_task import DEFAULT
from tests.kit.selection import cases_of
from tests.kit.studies import made_record, made_records

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
    """Records are committed as they come; a report is, when all methods have all seeds."""
    folder, records = committed
    study = read_study(STUDIES / f"{folder.name}.yaml")
    assert records
    assert {record.cell.method for record in records} <= {*study.labels(), *study.bench.recorded}
    assert {record.cell.task for record in records} <= set(study.tasks())
    assert {record.status for record in records} <= {"done", "diverged"}
    finals = [record for record in records if record.cell.stage == "final"]
    assert all(record.rows for record in finals)
    ran = {(final.cell.task, final.cell.method, final.cell.seed) for final in finals}
    seeds = range(1, study.bench.seeds + 1)
    whole = {(t, m, s) for t in study.tasks() for m in study.labels() for s in seeds}
    assert ran >= whole or not (folder / "report.md").exists()
    reported = {report.parent / "records" for report in STUDIES.glob("*/report.md")}
    assert reported <= {*RECORDED}


# The scripts start on small data, and their tables are those of the guides.


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "guide", "count"),
    [
        (general_text, "continued-pretraining", 3 * len(general_text.METHODS)),
        (several_heads, "multi-task", 3),
    ],
    ids=["general_text", "several_heads"],
)
def test_a_guide_has_the_table_of_the_committed_records(script, guide, count, tmp_path):
    """They are packed, and read in the order in which they came."""
    name = script.__name__.replace("_", "-")
    records = RunRecords(ROOT / "benchmarks" / "studies" / name).read()
    assert len(records) == count
    assert script.table(records) in (ROOT / f"docs/guides/{guide}.md").read_text("utf-8")
    again = RunRecords(tmp_path / "again")
    for record in records:
        again.add(record)
    assert again.pack().name == "records.jsonl.gz"
    again.add({"seed": 1})
    assert again.read() == [*records, {"seed": 1}]


def test_the_news_to_train_on_and_to_hold_are_disjoint(tmp_path):
    (tmp_path / "mrpc").mkdir()
    rows = [f"1\t{i}\t{i}\tsentence number {i}\tanother" for i in range(10)]
    text = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows])
    (tmp_path / "mrpc" / "train.tsv").write_text("\ufeff" + text + "\n", encoding="utf-8")
    files = general_text.write_news(tmp_path, tmp_path)
    news, held = (set(file.read_text().splitlines()) for file in files)
    assert len(news) == len(held) == 5
    assert not news & held


@pytest.mark.parametrize("tasks", [["mrpc"], ["stsb"], list(several_heads.TASKS)])
def test_recipes_of_heads_are_valid_and_take_as_many_steps(tmp_path, tasks):
    recipe = read_draft(None, (), several_heads.recipe_of(tmp_path, tasks, 7, 150))
    assert (recipe.train.max_steps, recipe.seed) == (150 * len(tasks), 7)
    assert list(recipe.tasks) == (tasks if len(tasks) > 1 else [])


@pytest.mark.parametrize(
    ("score", "curve", "expected"),
    [
        (("classes",), {1e-4: [0.795], 1e-3: [0.8], 1e-2: [0.791], 1.0: [0.5]}, (1e-3, 1e-4, 1e-2)),
        (("classes",), {1e-4: [0.77], 1e-3: [0.77, 0.83], 1e-2: [0.7]}, (1e-3, 1e-4, 1e-3)),
        (("classes",), {1e-4: [math.nan], 1e-3: [0.9], 1e-2: [0.9, math.inf]}, (1e-3, 1e-3, 1e-3)),
        (("losses",), {1e-4: [2.01], 1e-3: [2.0], 1e-2: [2.03]}, (1e-3, 1e-4, 1e-3)),
        (("texts", "bleu"), {1e-4: [29.1], 1e-3: [30.0], 1e-2: [28.0]}, (1e-3, 1e-4, 1e-3)),
        (("classes",), {1e-4: [math.nan], 1e-3: []}, None),
    ],
)
def test_rates_as_good_as_the_best_but_for_a_point_or_the_spread_over_seeds_are_good(
    score, curve, expected
):
    found = good_rates.good_rates(curve, row_score(*score))
    assert (found and (found.best, found.low, found.high)) == expected


def test_no_row_of_a_study_pre_trains_the_miniature(tmp_path, monkeypatch):
    monkeypatch.setattr(miniature, "PRETRAINING", 30)
    for name in ("multi30k", "gsm8k"):
        (tmp_path / name).mkdir()
    for split, language in itertools.product(("train", "val"), ("en", "de")):
        lines = "".join(f"{language} {split} line {n}\n" for n in range(40))
        packed = gzip.compress(lines.encode())
        (tmp_path / f"multi30k/{split}.{language}.gz").write_bytes(packed)
    row = '{"question": "How many?", "answer": "4"}\n'
    (tmp_path / "gsm8k/train.jsonl").write_text(row, encoding="utf-8")
    files = miniature.write_data(tmp_path, tmp_path / "data")
    own = {text for path in files.values() for text in miniature._texts(path)}
    written = sorted((tmp_path / "data").glob("*.t*.jsonl"))
    studies = {text for path in written for text in miniature._texts(path)}
    assert "en train line 29" in own
    assert {"de train line 30", "de val line 0"} <= studies
    assert not {text.removeprefix(miniature.TO_GERMAN) for text in studies} & own


@pytest.mark.parametrize(
    ("study", "name"), [("miniature-seq2seq", "encoder-decoder"), ("miniature-causal", "decoder")]
)
def test_every_method_fits_the_miniature(study, name, tmp_path):
    recipe = read_study(Path(miniature.__file__).with_name(f"{study}.yaml"))
    (task,) = recipe.tasks().values()
    assert task.backbone == name
    miniature.MINIATURES[name].config.save_pretrained(tmp_path)
    anatomy = anatomy_of(meta_model(str(tmp_path), task=parse_task(task.task).head))
    size = sum(p.numel() for p in anatomy.parameters().values())
    assert 1.5e6 < size < 3e6
    for label, spec in recipe.labels().items():
        assert 0 < sum(method.count(anatomy) for method in parse_methods(spec)) <= size, label


def test_the_record_of_forgetting_has_each_test_row_before_and_after(backbone, tmp_path):
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        rows = [f"a {('bad', 'good')[n % 2]} film {n} {split}\t{n % 2}" for n in range(40)]
        text = "\n".join(["sentence\tlabel", *rows, ""])
        (tmp_path / f"sst2/{split}.tsv").write_text(text, encoding="utf-8")
    read = forgetting.read_task(tmp_path, "sst2")
    assert read["test"].texts[1] == ("a good film 1 dev",)
    assert read["test"].labels[:4] == [0, 1, 0, 1]
    names = ["lora", "lora, one per task"]
    data = dict.fromkeys(forgetting.TASKS, read)
    found = forgetting.study(data, names, str(backbone), seeds=1, steps=3)
    assert list(found["approaches"]) == names
    for runs in found["approaches"].values():
        sides = [side for run in runs for side in run.values()]
        assert [len(side) for side in sides] == [40] * 3
        assert {digit for side in sides for digit in side} <= {"0", "1"}
    assert all(run["before"] == run["after"] for run in found["approaches"][names[1]])


def written(study: Study, folder: Path, accuracy: dict[str, float]) -> None:
    (folder / STUDY).write_text(study.to_yaml(), encoding="utf-8")
    records = RecordFolder(folder / RECORDS)
    for record in made_records(study, accuracy | {"mam": math.nan}):
        records.write(record)


def test_the_winner_is_trained_for_epochs_with_its_rate_and_published(made_study, tmp_path):
    written(made_study, tmp_path, {"head": 0.6, "lora": 0.9})
    ((task, method, words),) = winners.winners(tmp_path, tmp_path / "runs", 3)
    assert (task, method, words[0]) == ("mine", "lora", "train")
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--method"], float(pairs["--lr"]), pairs["--epochs"]) == ("lora", 1e-3, "3")
    assert pairs["--output"] == str(tmp_path / "runs" / "mine")
    assert "--steps" not in words
    options = argparse.Namespace(output=tmp_path / "runs", registry=tmp_path / "registry")
    line = winners.published(task, method, options)
    assert line[:2] == ["publish", str(tmp_path / "runs" / "mine")]
    assert line[-2:] == ["--registry", str(tmp_path / "registry")]


def test_a_task_on_which_nothing_was_shown_to_learn_has_no_winner(made_study, tmp_path):
    written(made_study, tmp_path, {"head": 0.5, "lora": 0.53})
    assert len(list(winners.winners(tmp_path, tmp_path / "runs", 3))) == 1
    write_baselines(tmp_path, {"mine": Constant("majority class", "classes", "pos", 0.6)}, {})
    assert list(winners.winners(tmp_path, tmp_path / "runs", 3)) == []


# The claims of textbooks, on planted studies, of which it is known whether a claim holds

CLAIMS = {  # methods, and their accuracies where the claim holds and where it does not
    "small prefix": (("prefix(length=5)", "full"), (0.90, 0.90), (0.80, 0.90)),
    "he2022: parallel": (("parallel(size=94)", "pfeiffer(size=94)"), (0.90, 0.80), (0.80, 0.90)),
    "peers": (("lora", "prefix", "peft lora", "peft prefix"), (0.86, 0.90, 0.86, 0.85),
              (0.80, 0.90, 0.90, 0.90)),
}  # fmt: skip


def verdict_of(name: str, folder: Path, accuracy: dict[str, float], test_rows: int = 1200) -> str:
    """Return the verdict on a claim after a study whose first method is the baseline."""
    flags = {"backbone": "sentence-transformers/all-MiniLM-L6-v2", "data": {"train": "sst2.tsv"},
             "train": {"batch_size": 16}}  # fmt: skip
    peers = [method for method in accuracy if method.startswith("peft ")]
    own = [method for method in accuracy if method not in peers]
    bench = {"methods": own, "recorded": peers, "baseline": own[0], "steps": 120}
    folder.mkdir()
    text = read_study(None, (), flags, bench).to_yaml()
    (folder / STUDY).write_text(text, encoding="utf-8")
    records = RecordFolder(folder / RECORDS)
    for number, (method, value) in enumerate(accuracy.items()):
        for seed in (1, 2, 3, 4):
            cell = Cell("sst2", method, 100, 120, 1e-3, seed, "final")
            made = made_record(cell, 10_000 + number, value, test_rows)
            records.write(replace(made, costs=replace(made.costs, trained=10**4, head=0)))
    (found,) = [each for each in claims.check_claims([folder]) if each.name == name]
    assert all(each.what in claims.as_markdown([found]) for each in found.checks)
    return found.verdict if found.checks else "not checked"


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_on_one_study_holds_fails_or_cannot_be_told(name, tmp_path, monkeypatch):
    monkeypatch.setattr("checks.RESAMPLES", 999)
    methods, *outcomes = CLAIMS[name]
    holds, fails = (dict(zip(methods, each, strict=True)) for each in outcomes)
    equal = dict.fromkeys(methods, 0.85)
    assert verdict_of(name, tmp_path / "holds", holds) == "holds"
    assert verdict_of(name, tmp_path / "fails", fails) == "does not hold"
    assert verdict_of(name, tmp_path / "few", equal, 60) == "cannot be told"
