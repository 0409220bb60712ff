"""Several tasks as one task of a run: its batches, heads and metrics, and an exact resume."""

import json
import signal
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.files.native import Saved
from adapterhub.inference.open import open_adapter
from adapterhub.loop.report import Reporter, Several
from adapterhub.recipe.recipe import Recipe, parse_mixing
from adapterhub.tasks import parse_task
from adapterhub.training.plan import plan_of
from adapterhub.training.run import RunOutcome, prepare, run
from adapterhub.training.task_mixture import MixedRows, TaskMixture, mixed_order
from tests.kit.data import HEADS, mixed_recipe, write_json_lines, write_tasks
from tests.kit.runs import Notes, final_bytes, forks, killed, lines, quiet


def mixture(second: str = "regression", weight: float = 1.0) -> TaskMixture:
    tasks = {"one": parse_task("classification"), "two": parse_task(second)}
    return TaskMixture(tasks, {"one": 1.0, "two": weight})


def test_metrics_have_the_name_of_the_task_and_a_mean():
    """Losses have a mean of their own, and none with scores."""
    names = mixture().metric_names(())
    assert (mixture().main_metric, names[0]) == ("mean", "mean")
    assert {"one/accuracy", "two/pearson"} <= set(names)
    assert mixture().fields(DataOptions(pair="b")) == 2
    losses = TaskMixture({name: parse_task("masked-lm") for name in "ab"}, {})
    assert losses.main_metric.startswith("mean/")
    assert (losses.varies, mixture().varies) == (True, False)
    with pytest.raises(ConfigError, match="no mean"):
        mixture("masked-lm")


@pytest.fixture(scope="module")
def ended(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, RunOutcome]:
    """A finished run, to read."""
    recipe = mixed_recipe(backbone, tmp_path_factory.mktemp("mixture"))
    return recipe, run(recipe, quiet(recipe))


def batches_of(recipe: Recipe, epochs: int = 3) -> tuple[MixedRows, list[list[list[int]]]]:
    prepared = prepare(recipe)
    rows, mixing = prepared.train, parse_mixing(recipe.mixing)
    assert isinstance(rows, MixedRows)
    options, seed = prepared.options, recipe.seed
    return rows, [mixed_order(rows, mixing, options, epoch, seed) for epoch in range(epochs)]


@pytest.mark.parametrize("mixing", ["size", "equal", "temperature(t=2)"])
def test_a_step_has_rows_of_one_task_and_a_task_sees_all_its_rows_in_turn(
    backbone, tmp_path, mixing
):
    recipe = mixed_recipe(backbone, tmp_path, f"mixing={mixing}", "train.gradient_accumulation=2")
    rows, epochs = batches_of(recipe, epochs=8)
    bounds = [*rows.starts, len(rows.rows)]
    seen: list[Counter[int]] = [Counter(), Counter(), Counter()]
    for epoch in epochs:
        assert len(epoch) == 2 * 7  # 53 rows in steps of 8
        for first, second in zip(epoch[::2], epoch[1::2], strict=True):
            owners = {n for n in range(3) for i in first + second if bounds[n] <= i < bounds[n + 1]}
            assert len(owners) == 1
            seen[owners.pop()].update(first + second)
    for number, counts in enumerate(seen):
        of_task = range(bounds[number], bounds[number + 1])
        assert set(counts) == set(of_task)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_run_trains_every_head_and_each_opens_alone(ended):
    recipe, outcome = ended
    folder = Path(recipe.output)
    mains = [outcome.metrics[n] for n in ("mood/accuracy", "thing-2/accuracy", "length/pearson")]
    assert outcome.metrics["mean"] == pytest.approx(sum(mains) / 3)
    assert outcome.result.metric == "mean"
    logged = [line["metrics"] for line in lines(folder / "metrics.jsonl")
              if line["event"] == "eval"]  # fmt: skip
    assert all({"mean", "mood/accuracy", "length/mse"} <= metrics.keys() for metrics in logged)
    manifest, tensors = Saved.at(outcome.folder).read()
    assert {name: record.labels for name, record in manifest.heads.items()} == HEADS
    assert tensors["heads.thing-2.classifier.weight"].shape[0] == 3
    for name, labels in HEADS.items():
        opened = open_adapter(outcome.folder, head=name)
        adapter = opened.model.config
        assert opened.setting.labels == labels
        assert adapter.num_labels == max(len(labels), 1)
        rows = opened.task.read(
            str(folder.parent / "data" / f"{name}-dev.tsv"), recipe.tasks[name].data, "eval"
        )
        metric = opened.task.main_metric
        assert opened.evaluate(rows)[metric] == pytest.approx(
            outcome.metrics[f"{name}/{metric}"], abs=1e-5
        )


def test_the_cache_of_frozen_layers_changes_nothing_beyond_bf16(backbone, tmp_path):
    """The best evaluation is that of one task."""
    losses, notes = {}, Notes()
    for where in ("off", "memory"):
        words = ("method=lora(layers=top 1)", "train.best_metric=length/mse")
        recipe = mixed_recipe(backbone, tmp_path / where, *words, f"train.frozen_cache={where}")
        result = run(recipe, notes).result
        assert result.best["length/mse"] == min(record["length/mse"] for record in result.history)
        losses[where] = [record["mean"] for record in result.history]
    assert sum("computed once for 80 rows" in note for note in notes.notes) == 1
    assert losses["memory"] == pytest.approx(losses["off"], abs=0.1)


@forks
def test_killed_and_resumed_gives_the_same_bytes(backbone, tmp_path):
    tasks = write_tasks(tmp_path / "data")
    words = ["train.save_every=3", "train.gradient_accumulation=2", "mixing=temperature(t=2)"]
    whole, cut = (
        mixed_recipe(backbone, tmp_path / name, *words, tasks=tasks) for name in ("whole", "cut")
    )
    run(whole, quiet(whole))
    killed(lambda: run(cut, Several([quiet(cut), Notes(3, signal.SIGKILL)])))
    last = Path(cut.output, "checkpoints", "last", "progress.json")
    assert json.loads(last.read_text())["progress"]["step"] == 3
    run(cut, quiet(cut), resume=True)
    assert final_bytes(Path(cut.output)) == final_bytes(Path(whole.output))
    with pytest.raises(ConfigError, match="would have no effect") as error:
        run(replace(cut, mixing="equal"), Reporter(), resume=True)
    assert any("mixing" in line for line in error.value.offenders)


def test_one_row_equal_labels_and_a_missing_evaluation(backbone, tmp_path):
    tasks = write_tasks(tmp_path / "data")
    one = tmp_path / "one.tsv"
    one.write_text("text\tlabel\nthe movie was good\t1.5\n", encoding="utf-8")
    tasks["length"]["data"] = {"train": str(one), "eval": "none"}
    tasks["again"] = tasks["mood"]  # the same labels
    outcome = run(mixed_recipe(backbone, tmp_path, "mixing=equal", tasks=tasks), Reporter())
    assert not any(name.startswith("length") for name in outcome.metrics)
    mains = [outcome.metrics[f"{n}/accuracy"] for n in ("mood", "thing-2", "again")]
    assert outcome.metrics["mean"] == pytest.approx(sum(mains) / 3)
    assert set(Saved.at(outcome.folder).read()[0].heads) == set(tasks)


def test_tasks_that_pool_differently_are_refused(backbone, tmp_path):
    """And tasks whose models are of different classes."""
    tasks = write_tasks(tmp_path / "data")
    row = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}
    tagged = str(write_json_lines(tmp_path / "tags.jsonl", [row] * 4))
    tags = {"tags": {"task": "tagging", "data": {"train": tagged, "eval": tagged}}}
    pooled = {"mood": tasks["mood"] | {"task": "classification(pooling=max)"}}
    for other, expected, offender in (
        (tags, "different classes", "tags: tagging"),
        (pooled, "pool differently", "mood: pooling=max"),
    ):
        with pytest.raises(ConfigError, match=expected) as error:
            prepare(mixed_recipe(backbone, tmp_path, tasks=tasks | other))
        assert any(offender in line for line in error.value.offenders)


def test_the_plan_tells_the_steps_of_each_task(backbone, tmp_path):
    recipe = mixed_recipe(backbone, tmp_path, "train.max_steps=20", "mixing=equal")
    prepared = prepare(recipe)
    plan = plan_of(prepared)
    assert {each.name: each.rows for each in plan.tasks} == {"mood": 24, "thing-2": 20, "length": 9}
    assert [each.weight for each in plan.tasks] == [1.0, 1.0, 0.5]
    counts = prepared.data.task.label_counts(prepared.train)
    assert counts.keys() == {f"{name}/{label}" for name, own in HEADS.items() for label in own}
    assert sum(counts.values()) == 24 + 20
    output = SimpleNamespace(loss=torch.tensor(2.0))
    for index, expected in ((0, 2.0), (-1, 1.0)):  # the loss is times the weight
        batch = prepared.train.batch([range(53)[index]])
        assert prepared.own_loss(output, batch) == expected
    assert prepared.own_loss(SimpleNamespace(loss=None), {}) is None
    assert sum(each.steps for each in plan.tasks) == 20
    rows, epochs = batches_of(recipe, epochs=2)
    starts = [bisect_right(rows.starts, batch[0]) - 1 for epoch in epochs for batch in epoch]
    assert [each.steps for each in plan.tasks] == [starts[:20].count(n) for n in range(3)]
    heads = [site for site, _, _ in plan.sites if site.startswith("heads.")]
    assert heads == [f"heads.{name}.classifier" for name in HEADS]


def test_a_run_may_start_from_an_adapter_with_several_heads(ended, tmp_path):
    recipe, first = ended
    words = {"output": str(tmp_path / "second"), "from_": str(first.folder), "method": None}
    second = run(replace(recipe, **words), Reporter())
    (manifest, tensors), before = Saved.at(second.folder).read(), Saved.at(first.folder).read()[1]
    assert set(tensors) == set(before)
    assert manifest.training["from"]["name"] == "run"
    alone = replace(recipe.of_task("mood"), output=str(tmp_path / "alone"),
                    from_=str(first.folder), method=None)  # fmt: skip
    assert Saved.at(run(alone, Reporter()).folder).read()[0].heads == {}


def test_text_to_text_tasks_share_one_head(backbones, tmp_path):
    tasks = {}
    for name, target in (("mood", "good"), ("copy", "film")):
        file = tmp_path / f"{name}.tsv"
        rows = [f"the movie was {word}\t{target}" for word in ("good", "bad", "dull")] * 4
        file.write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
        spec = {"seq2seq": {"template": f"{name}: {{text}}", "metric": "exact"}}
        data = {"train": str(file), "eval": str(file)}
        tasks[name] = {"task": spec, "data": data}
    outcome = run(mixed_recipe(backbones("t5"), tmp_path, tasks=tasks), Reporter())
    assert {"mean", "mood/exact_match", "copy/loss"} <= outcome.metrics.keys()
    manifest, tensors = Saved.at(outcome.folder).read()
    assert [record.head for record in manifest.heads.values()] == [None, None]
    assert not any(name.startswith("head") for name in tensors)
    opened = open_adapter(outcome.folder, head="copy")
    assert opened.task.template == "copy: {text}"
    with pytest.raises(ConfigError, match="2 heads"):
        open_adapter(outcome.folder)
