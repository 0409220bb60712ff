"""Each registered task trains, evaluates and predicts on the command line, and learns."""

from __future__ import annotations

import json

import pytest
from fixtures import json_lines
from task_cases import CASES

from adapterhub.backbones.load import load_backbone
from adapterhub.data.options import DataOptions
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.tasks import TASKS, Setting, parse_task

LEARN = ("--method", "full", "train.learning_rate=3e-3", "train.tensorboard=false")


def test_each_task_has_a_case():
    assert CASES.keys() == TASKS.keys()
    assert len(CASES) > 5
    assert all(parse_task(case.task).name == name for name, case in CASES.items())


@pytest.mark.parametrize("name", sorted(CASES))
def test_train_eval_predict(name, adapterhub, backbones, tmp_path):
    case = CASES[name]
    file = case.data(tmp_path)
    run = tmp_path / "run"
    code, out, err = adapterhub(
        "train", "--backbone", backbones(case.backbone), "--task", case.task, "--train", file,
        "--eval", file, "--output", run, *LEARN, f"train.epochs={case.epochs}", *case.words,
        "--quiet",
    )  # fmt: skip
    assert code == 0, err
    manifest = json.loads((run / "adapter/adapter.json").read_text())
    assert manifest["task"] == name
    code, out, err = adapterhub("eval", run, "--data", file, "--json")
    assert code == 0, err
    metrics = json.loads(out)
    main = parse_task(case.task).main_metric
    saved = {k: v for k, v in manifest["metrics"].items()}
    assert {k: v for k, v in metrics.items() if k != "examples"} == pytest.approx(saved, abs=1e-5)
    assert case.least is None or metrics[main] >= case.least, metrics
    assert case.most is None or metrics[main] <= case.most, metrics
    code, out, err = adapterhub("predict", run, *case.predict, "--json")
    assert code == 0, err
    (row,) = json_lines(out)
    assert case.key in row
    code, out, err = adapterhub("predict", run, *case.predict)
    assert code == 0, err
    assert out.count("\n") == 1
    code, out, err = adapterhub("predict", run, "--data", file, "--json")
    assert code == 0, err
    assert len(json_lines(out)) == metrics["examples"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_metrics_are_those_that_the_task_names(name, backbones, tmp_path):
    case = CASES[name]
    task = parse_task(case.task)
    examples = task.read(str(case.data(tmp_path)), DataOptions(), "train")[:6]
    labels = task.labels(examples)
    model, tokenizer = load_backbone(str(backbones(case.backbone)), task=task.head, labels=labels)
    rows = task.encode(examples, Setting(tokenizer, 32, labels, positions=64), labelled=True)
    metrics = task.evaluate(model, rows, 4)
    assert tuple(metrics) == task.metric_names(examples)
    assert task.main_metric in metrics
    assert task.lower_is_better == metrics.keys() & LOWER_IS_BETTER
