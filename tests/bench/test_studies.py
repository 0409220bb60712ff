"""The committed studies, and the scripts of benchmarks/studies but those of test_peers.py."""

from dataclasses import replace
from pathlib import Path

import claims
import general_text
import miniature
import pytest
import several_heads
from run_records import RunRecords

from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.load import meta_model
from adapterhub.bench.cells import Cell
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.study import RECORDS, STUDY, read_study
from adapterhub.methods.common.base import parse_methods
from adapterhub.tasks import parse_task
from tests.kit.selection import cases_of
from tests.kit.studies import made_record

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_read_and_says_how_it_is_run(path):
    assert read_study(path).labels()
    assert f"adapterhub bench REPOSITORY/benchmarks/studies/{path.name}" in path.read_text("utf-8")


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
