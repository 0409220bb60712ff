"""The methods of other libraries in a study: trained by their own trainer, scored by our code."""

import ast
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers as script
import pytest
from peer_methods import named
from peers import PeerContext, PeerEngine, Worker, plan_peers, run_peer

from adapterhub.bench.cells import Cell
from adapterhub.bench.conduct import run_study
from adapterhub.bench.plan import PlannedStudy
from adapterhub.bench.results import study_results
from adapterhub.bench.study import Study, keep_study, read_study
from adapterhub.errors import ConfigError
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.infer_task import DEFAULT
from tests.kit.studies import planned

WORKER = Path(script.__file__).with_name("peer_worker.py")
LORA = named("peft", ["lora"])


@pytest.fixture
def workers(tmp_path):
    """The worker of peft, the library that shares our environment."""
    worker = Worker("peft", sys.executable, tmp_path / "peft.log")
    yield {"peft": worker}
    worker.close()


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


def test_the_worker_needs_nothing_but_torch_transformers_and_its_library():
    imports = [node for node in ast.walk(ast.parse(WORKER.read_text()))
               if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in imports if isinstance(n, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert roots == {"torch", "transformers", "peft", "adapters"}


@pytest.mark.apart
def test_a_peer_has_the_rows_seeds_and_trials_of_ours_and_a_row_of_the_table(
    study, tmp_path, workers
):
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

    refusing: Any = SimpleNamespace(run=lambda cells: pytest.fail(f"{[*cells]} are run again"))
    assert run_study(plan, folder, refusing).records == state.records
    lost = run_peer(Cell("train", "peft lora", 90, 6, 1e38, 1, "final"), context_of(plan), work)
    assert (lost.status, lost.rows, lost.costs.trained) == ("diverged", None, 0)


def test_peers_get_the_options_of_the_recipe_or_refuse_them(study, tmp_path):
    ours, _, _ = planned(study_of(study), tmp_path)
    (context,) = ours.contexts.values()

    def options(*words: str) -> dict[str, Any]:
        recipe = study_of(study, *words).recipe
        run = replace(context.data.run, task=parse_task(recipe.task or DEFAULT))
        changed = replace(context, recipe=recipe, data=replace(context.data, run=run))
        plan = plan_peers(replace(ours, contexts={"train": changed}), LORA,
                          {"peft": SimpleNamespace()})  # type: ignore[dict-item]  # fmt: skip
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
            options(word)
