"""The methods of other libraries in a study: trained by their own trainer, scored by our code."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peer_worker
import peers as script
import pytest
from peer_methods import PEERS, PeerMethod, named
from peers import PeerContext, PeerEngine, Worker, plan_peers, run_peer

from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.load import meta_model
from adapterhub.bench.cells import Cell
from adapterhub.bench.conduct import run_study
from adapterhub.bench.plan import PlannedStudy
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.results import study_results
from adapterhub.bench.study import Study, keep_study, read_study
from adapterhub.errors import ConfigError
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.infer_task import DEFAULT
from tests.kit import selection
from tests.kit.data import sentences, write_tsv
from tests.kit.selection import long_table
from tests.kit.studies import planned

WORKER = Path(script.__file__).with_name("peer_worker.py")
HERE = ("peft", "transformers")  # adapters needs another transformers
LORA = named("peft", ["lora"])


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    logs = tmp_path_factory.mktemp("workers")
    found = {name: Worker(name, sys.executable, logs / f"{name}.log") for name in HERE}
    yield found
    for worker in found.values():
        worker.close()


def numbers(tmp_path: Path) -> Path:
    rows = [(f"{text} {n}", str(float(label == "pos") + n % 3 / 10))
            for n, (text, label) in enumerate(sentences(150))]  # fmt: skip
    return write_tsv(tmp_path / "train.tsv", rows)


def study_of(study: Study, *words: str, **bench: Any) -> Study:
    """Return the small study with other options; `words` are those of the recipe."""
    flags = {"backbone": study.recipe.backbone, "output": study.recipe.output,
             "data": {"train": study.recipe.data.train}}  # fmt: skip
    own = {"methods": ("head",), "rates": 1, "seeds": 2, "steps": 6, **bench}
    return read_study(None, ["dtype=fp32", *words], flags, own)


def context_of(plan: PlannedStudy) -> PeerContext:
    (context,) = plan.contexts.values()
    assert isinstance(context, PeerContext)
    return context


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The steps that each run evaluates."""
    found: list[tuple[int, ...]] = []
    ask = Worker.ask

    def remembering(self: Worker, *given: Any) -> dict[str, Any]:
        result = ask(self, *given)
        if "evaluations" in result:
            found.append(tuple(each["step"] for each in result["evaluations"]))
        return result

    monkeypatch.setattr(Worker, "ask", remembering)
    return found


def test_the_worker_needs_nothing_but_torch_transformers_and_its_library() -> None:
    imports = [node for node in ast.walk(ast.parse(WORKER.read_text()))
               if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in imports if isinstance(n, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert roots == {"torch", "transformers", "peft", "adapters"}


@pytest.mark.apart
def test_a_peer_has_the_rows_seeds_and_trials_of_ours_and_a_row_of_the_table(
    study: Study,
    tmp_path: Path,
    workers: dict[str, Worker],
    evaluated: list[tuple[int, ...]],
) -> None:
    ours, folder, engine = planned(study_of(study, rates=2), tmp_path)
    run_study(ours, folder, engine)
    plan = plan_peers(ours, LORA, workers)
    work = tmp_path / "work"
    state = run_study(plan, folder, PeerEngine({"train": context_of(plan)}, work))
    records = state.records
    assert {record.status for record in records} == {"done"}
    assert {record.cell.method for record in records} == {"peft lora"}
    finals = [record for record in records if record.cell.stage == "final"]
    assert [record.cell.seed for record in finals] == [1, 2]
    assert len(records) >= 4
    assert not list(work.iterdir()), "checkpoints are left"
    context, record = ours.contexts["train"], finals[0]
    assert record.rows
    rows = record.rows.columns
    assert rows["label"] == [example.label for example in context.data.test]
    right = [a == b for a, b in zip(rows["label"], rows["prediction"], strict=True)]
    assert record.tested["accuracy"] == pytest.approx(sum(right) / len(right))
    assert set(evaluated) == {(2, 4, 6)}
    assert (record.costs.trained, record.costs.head > 0) == (LORA[0].method.count(
        script.backbone_of(context)), True)  # fmt: skip
    own = next(r for r in folder.all() if r.cell.method == "head" and r.rows)
    assert own.rows
    assert own.rows.columns["label"] == rows["label"]
    assert own.origin["data"] == record.origin["data"]
    assert record.origin["versions"].keys() == {"peft", "torch", "transformers", "python"}

    named_study = keep_study(replace(ours.study, bench=replace(
        ours.study.bench, recorded=("peft lora",))), tmp_path / "study")  # fmt: skip
    (result,) = study_results(named_study, folder.all(), {})
    assert [each.method for each in result.methods] == ["head", "peft lora"]
    assert result.find("peft lora").comparison is not None
    assert result.advice.method is None, "two seeds are too few for advice"

    class Refusing:
        def run(self, cells: Any) -> Any:
            raise AssertionError([*cells])

    assert run_study(plan, folder, Refusing()).records == state.records


def test_rows_are_evaluated_by_length_and_returned_in_their_order() -> None:
    part = [{"input_ids": [0] * length} for length in (5, 2, 9, 2)]
    order = peer_worker.by_length(part)
    assert order == [1, 3, 0, 2]
    logits = np.array([[float(i), -float(i)] for i in order])
    assert peer_worker.outputs(logits, order) == [[float(i), -float(i)] for i in range(4)]
    assert peer_worker.outputs((logits, "hidden states"), order)[2] == [2.0, -2.0]
    logits[1, 0] = float("nan")
    with pytest.raises(peer_worker.NotFiniteError):
        peer_worker.outputs(logits, order)


@pytest.mark.apart
def test_numbers_are_scored_by_our_metrics(
    study: Study,
    tmp_path: Path,
    workers: dict[str, Worker],
    evaluated: list[tuple[int, ...]],
) -> None:
    data = replace(study.recipe.data, train=str(numbers(tmp_path)))
    study = replace(study, recipe=replace(study.recipe, data=data))
    ours, _, _ = planned(study_of(study, "task=regression"), tmp_path)
    context = context_of(plan_peers(ours, named("peft", ["ia3"]), workers))
    cell = Cell("train", "peft ia3", 90, 5, 1e-3, 1, "final")
    record = run_peer(cell, context, tmp_path / "work")
    assert (record.status, record.error, record.metric) == ("done", "", "pearson")
    assert record.rows
    label, predicted = (record.rows.columns[name] for name in ("label", "prediction"))
    assert label == [float(example.label) for example in context.data.test]
    again = context.score(context.data.test, [[value] for value in predicted]).metrics
    assert again == pytest.approx(record.tested, abs=1e-3)
    assert evaluated == [(2, 4, 5)], "the last step is evaluated"


# By default with the process that other tests have started.
@pytest.mark.apart
@pytest.mark.parametrize(
    ("library", "method", "label"),
    [("peft", "lora", "peft lora"), *[("transformers", "full", "trainer full")] * selection.ALL],
)
def test_a_run_that_is_lost_has_diverged(
    library: str, method: str, label: str, study: Study, tmp_path: Path, workers: dict[str, Worker]
) -> None:
    ours, _, _ = planned(study_of(study), tmp_path)
    context = context_of(plan_peers(ours, named(library, [method]), workers))
    lost = run_peer(Cell("train", label, 90, 6, 1e38, 1, "final"), context, tmp_path)
    assert (lost.status, lost.rows, lost.costs.trained) == ("diverged", None, 0)
    assert "not finite" in lost.error or "nan" in lost.error
    broken = replace(context, specs={label: {}}, workers={label: workers["peft"]})
    failed = run_peer(Cell("train", label, 90, 6, 1e-3, 1, "final"), broken, tmp_path)
    assert (failed.status, failed.error) == ("failed", "KeyError: 'class'")


class Pretending:
    """A worker that evaluates twice, and has loaded another checkpoint than the best."""

    def __init__(self, version: str = "1.0", **settings: Any) -> None:
        self.hello = {"library": "other", "version": version, "device": "cpu", "versions": {},
                      "settings": {"dtype": "fp32", **settings}}  # fmt: skip

    def ask(self, job: dict[str, Any], scored: Any) -> dict[str, Any]:
        labels = job["rows"]["select"]["labels"]
        good = [[float(label == 0), float(label == 1)] for label in labels]
        bad = [row[::-1] for row in good]
        scored(good)
        return {"status": "done", "logits": {"select": bad}, "evaluations": [], "costs": {}}


@pytest.mark.apart
def test_a_checkpoint_that_is_not_the_best_one_is_no_result(
    study: Study, tmp_path: Path, workers: dict[str, Worker]
) -> None:
    ours, _, _ = planned(study_of(study), tmp_path)
    context = context_of(plan_peers(ours, LORA, workers))
    context = replace(context, workers={"peft lora": Pretending()})
    cell = Cell("train", "peft lora", 90, 6, 1e-3, 0, "search")
    record = run_peer(cell, context, tmp_path / "work")
    assert record.status == "failed"
    assert record.error == "the best checkpoint scored 1.0000, and 0.0000 loaded"


@pytest.mark.apart
def test_the_key_has_library_version_settings_and_options_but_no_names(
    study: Study, tmp_path: Path, workers: dict[str, Worker]
) -> None:
    ours, _, _ = planned(study_of(study), tmp_path)
    plain = context_of(plan_peers(ours, LORA, workers))
    cell = Cell("train", "peft lora", 90, 6, 1e-3, 0, "search")

    def key(context: PeerContext = plain, worker: Any = None, at: Cell = cell) -> str:
        worker = worker or Pretending()
        return replace(context, workers={at.method: worker}).key(at)

    decayed = replace(plain.recipe.train, weight_decay=0.5)
    others = [
        key(worker=Pretending("1.1")),
        key(worker=Pretending(head="another")),
        key(at=replace(cell, seed=1)),
        key(replace(plain, specs={"peft lora": {"class": "LoraConfig", "options": {"r": 2}}})),
        key(replace(plain, recipe=replace(plain.recipe, train=decayed))),
        key(replace(plain, backbone="another")),
    ]
    assert len({key(), *others}) == 1 + len(others)
    renamed = replace(plain, specs={"theirs": plain.specs["peft lora"]})
    assert key(renamed, at=replace(cell, method="theirs")) == key()
    assert plain.key(cell) != ours.contexts["train"].key(replace(cell, method="head"))


def test_peers_get_the_options_of_the_recipe_or_refuse_them(study: Study, tmp_path: Path) -> None:
    def options(*words: str) -> dict[str, Any]:
        ours, _, _ = planned(study_of(study, *words), tmp_path)
        plan = plan_peers(ours, LORA, {"peft": SimpleNamespace()})  # type: ignore[dict-item]
        return context_of(plan).options(Cell("train", "peft lora", 90, 200, 1e-3, 0, "search"))

    plain = {"lr_scheduler_type": "linear", "warmup_steps": 12, "gradient_accumulation_steps": 1}
    assert options() == plain
    assert options("train.weight_decay=0.5", "train.length_grouped=false") == {
        **plain, "weight_decay": 0.5
    }  # fmt: skip
    weighted = "task={classification: {class_weights: balanced}}"
    for word, said in (("train.schedule=slanted", "slanted"), ("train.patience=2", "patience"),
                       ("task=multiple-choice", "multiple-choice"), ("quantize=int8", "quantize"),
                       (weighted, "class_weights")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            refused(study, tmp_path, word)


def refused(study: Study, tmp_path: Path, word: str) -> None:
    """Plan peers of a study with one option more, without loading its backbone."""
    ours, _, _ = planned(study_of(study), tmp_path)
    (context,) = ours.contexts.values()
    recipe = study_of(study, word).recipe
    run = replace(context.data.run, task=parse_task(recipe.task or DEFAULT))
    changed = replace(context, recipe=recipe, data=replace(context.data, run=run))
    plan = plan_peers(replace(ours, contexts={"train": changed}), LORA,
                      {"peft": SimpleNamespace()})  # type: ignore[dict-item]  # fmt: skip
    context_of(plan).options(Cell("train", "peft lora", 90, 200, 1e-3, 0, "search"))


@pytest.mark.apart
@long_table("peer", [p for p in PEERS if p.library in HERE], ids=lambda p: p.label)
def test_a_peer_trains_as_many_parameters_as_ours(
    peer: PeerMethod, study: Study, workers: dict[str, Worker]
) -> None:
    """Of adapters, which needs another environment, --sizes of the script prints them."""
    folder = study.recipe.backbone
    anatomy = anatomy_of(meta_model(folder, task="classification"))
    config = peer.configuration(anatomy)
    job = {"do": "count", "folder": folder, "config": config, "classes": 2}
    found = workers[peer.library].ask(job)
    assert found["trained"] == peer.method.count(anatomy)
    assert found["head"] > 0


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.label)
def test_a_configuration_is_json_and_has_our_width(peer: PeerMethod, study: Study) -> None:
    anatomy = anatomy_of(meta_model(study.recipe.backbone, task="classification"))
    config = peer.configuration(anatomy)
    assert json.loads(json.dumps(config)) == config
    for part in (config, *config.get("options", {}).values()):
        if isinstance(part, dict) and "reduction_factor" in part.get("options", {}):
            width = next(iter(anatomy.select(["ffn"]))).d_out
            assert width // part["options"]["reduction_factor"] == peer.method.size


def test_an_environment_that_cannot_train_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho No module named adapters >&2\nexit 1\n")
    broken.chmod(0o700)
    worker = Worker("adapters", str(broken), tmp_path / "log")
    with pytest.raises(SystemExit, match=r"(?s)cannot train with adapters.*No module named"):
        _ = worker.hello
    worker.close()


def test_the_command_names_its_methods_and_tasks(study: Study) -> None:
    assert len({peer.label for peer in PEERS}) == len(PEERS)
    with pytest.raises(SystemExit, match="peft lara: one of lora, dora"):
        named("peft", ["lara"])
    two = replace(study, bench=replace(study.bench, tasks={"a": {}, "b": {}}))
    assert list(script.of_tasks(two, ["b"]).bench.tasks) == ["b"]
    with pytest.raises(SystemExit, match="--tasks c: one of a, b"):
        script.of_tasks(two, ["c"])


def test_the_study_of_the_folder_keeps_all_its_tasks(study: Study, tmp_path: Path) -> None:
    tasks: dict[str, object] = {"a": {}, "b": {}}
    whole = replace(study, bench=replace(study.bench, tasks=tasks))
    part = script.of_tasks(whole, ["b"])
    script.keep(replace(part, recipe=replace(part.recipe, dtype="bf16")), whole, LORA, tmp_path)
    kept = read_study(tmp_path / "study.yaml")
    assert list(kept.bench.tasks) == ["a", "b"]
    assert (kept.recipe.dtype, kept.bench.recorded) == ("bf16", ("peft lora",))
    assert RecordFolder(tmp_path).read("0") is None


def test_the_table_of_the_guide_is_that_of_the_report() -> None:
    root = Path(script.__file__).parents[2]
    guide = (root / "docs/guides/bench.md").read_text(encoding="utf-8")
    report = (root / "benchmarks/studies/glue/report.md").read_text(encoding="utf-8")
    cells = [[c.strip() for c in line.replace("\\", "").split("|")[1:-1]]
             for line in report.split("\n## ")[1].splitlines() if line.startswith("|")]  # fmt: skip
    titles, scores = cells[0], {row[0]: row for row in cells[2:]}
    places = [
        next(i for i, t in enumerate(titles) if t.startswith(n)) for n in ("sst2", "mrpc", "stsb")
    ]
    names = {(p.ours, p.label.split()[0]): p.label for p in PEERS}
    shown, ours = 0, ""
    for line in guide.split("| method | SST-2")[1].split("\n\n")[0].splitlines()[2:]:
        method, *left, by, first, second, third = [c.strip() for c in line.split("|")[1:-1]]
        ours = method or ours
        rows = [(names[ours, by.lower()], [first, second, third])]
        rows += [(ours, left)] if method else []
        for name, found in rows:
            assert found == [scores[name][place].rstrip("*") for place in places], name
            shown += 1
    assert shown == 8 + 6
