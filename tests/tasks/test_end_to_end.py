"""Each registered task trains, evaluates and predicts on the command line, and learns."""

from __future__ import annotations

import json
from contextlib import nullcontext
from statistics import mean

import pytest

from adapterhub.pages.figures import prediction_sections
from adapterhub.pages.row_scores import read_predictions
from adapterhub.tasks import TASKS, parse_task
from tests.kit.data import json_lines
from tests.kit.selection import ALL, cases_of
from tests.kit.session import charts_drawn, succeeded
from tests.kit.task_cases import CASES

# A chart shows a kind of outcomes, whatever the task: drawn for one task of each.
DRAWN = CASES if ALL else {parse_task(CASES[n].task).outcomes: n for n in sorted(CASES)}.values()
# All train, evaluate and predict; those that run long enough to learn change with the commit.
LEARNED = cases_of(sorted(CASES))
LEARN = ("--method", "full", "train.learning_rate=3e-3", "train.tensorboard=false")


def test_each_task_has_a_case():
    # A pipeline of diffusers has a file of its own: test_text_to_image.py.
    assert CASES.keys() == TASKS.keys() - {"text-to-image"}
    assert all(parse_task(case.task).name == name for name, case in CASES.items())


def check_report(run, manifest):
    """The report has the sections of the task; the predictions give the metrics of the adapter."""
    predictions = read_predictions(run)
    assert predictions is not None
    assert predictions.task == manifest["task"]
    assert predictions.kind == parse_task(manifest["training"]["recipe"]["task"]).outcomes
    page = (run / "report.html").read_text()
    for section in (*prediction_sections(predictions), "curves", "facts"):
        assert f'<section id="{getattr(section, "id", section)}">' in page
    mistakes = [r for r in predictions.rows if r.get("label", r) != r.get("prediction")]
    assert not mistakes or any(row["texts"][0].split()[0] in page for row in mistakes)
    score, value = SCORES[predictions.kind](predictions.rows)
    expected = manifest["metrics"].get(score, value)
    assert value == pytest.approx(expected, abs=1e-4), score


SCORES = {
    "classes": lambda rows: ("accuracy", mean(r["label"] == r["prediction"] for r in rows)),
    "sets": lambda rows: ("micro_f1", entity_f1(rows)),
    "choices": lambda rows: ("accuracy", mean(r["right"] for r in rows)),
    "numbers": lambda rows: ("mse", mean((r["label"] - r["prediction"]) ** 2 for r in rows)),
    "spans": lambda rows: ("f1", entity_f1(rows)),
    "texts": lambda rows: ("exact_match", mean(r["label"] == r["prediction"] for r in rows)),
    "losses": lambda rows: (
        "loss", sum(r["loss"] * r["tokens"] for r in rows) / sum(r["tokens"] for r in rows),
    ),
}  # fmt: skip


def entity_f1(rows):
    right = sum(span in row["label"] for row in rows for span in row["prediction"])
    return 2 * right / sum(len(row["label"]) + len(row["prediction"]) for row in rows)


@pytest.mark.parametrize("name", sorted(CASES))
def test_train_eval_predict(name, adapterhub, backbones, tmp_path):
    case = CASES[name]
    epochs = case.epochs if name in LEARNED else 2
    file = case.data(tmp_path)
    run = tmp_path / "run"
    with charts_drawn() if name in DRAWN else nullcontext():
        succeeded(adapterhub(
            "train", "--backbone", backbones(case.backbone), "--task", case.task, "--train", file,
            "--eval", file, "--output", run, *LEARN, f"train.epochs={epochs}", *case.words,
            "--quiet",
        ))  # fmt: skip
    manifest = json.loads((run / "adapter/adapter.json").read_text())
    assert manifest["task"] == name
    check_report(run, manifest)

    def printed(*words):
        return succeeded(adapterhub(*words))

    metrics = json.loads(printed("eval", run, "--data", file, "--json"))
    del metrics["intervals"]
    examples, main = metrics.pop("examples"), parse_task(case.task).main_metric
    assert metrics == pytest.approx(manifest["metrics"], abs=1e-5)
    if name in LEARNED:
        assert case.least is None or metrics[main] >= case.least, metrics
        assert case.most is None or metrics[main] <= case.most, metrics
    (row,) = json_lines(printed("predict", run, *case.asked(file), "--json"))
    assert case.key in row
    assert printed("predict", run, *case.asked(file)).count("\n") == 1
    assert len(json_lines(printed("predict", run, "--data", file, "--json"))) == examples
