"""Several tasks as one task of a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.training.task_mixture import MixedRows, TaskMixture, TaskRows, TaskSwitch
from tests.kit.data import word_tokenizer
from tests.kit.tiny_models import model as tiny_model

SETTING = Setting(word_tokenizer("<s>", "</s>"), 16, ("neg", "pos"))


def mixture(second: str = "regression", weight: float = 1.0) -> TaskMixture:
    tasks = {"one": parse_task("classification"), "two": parse_task(second)}
    return TaskMixture(tasks, {"one": 1.0, "two": weight})


def mixed_rows(
    tasks: TaskMixture, labels: Sequence[str] = ("pos", "neg", "1.5", "2")
) -> tuple[MixedRows, list[str]]:
    """Return two rows of each task, and a list that gets the tasks that are entered."""
    entered: list[str] = []
    switch = TaskSwitch("one", entered.append)
    texts = ["the movie was good", "a plot", "the end", "bad film"]
    examples = [Example(text, None, label) for text, label in zip(texts, labels, strict=True)]
    parts = {}
    for name, own in (("one", examples[:2]), ("two", examples[2:])):
        encoded = tasks.tasks[name].encode(own, SETTING, labelled=True)
        parts[name] = TaskRows(
            encoded.task, SETTING, encoded.examples, encoded.rows, encoded.owners, name, switch
        )
    rows = [row for part in parts.values() for row in part.rows]
    return MixedRows(tasks, SETTING, tuple(examples), rows, (), parts, switch), entered


def test_a_batch_enters_its_task() -> None:
    rows, entered = mixed_rows(mixture())
    assert rows.starts == (0, 2)
    assert rows.sizes == {"one": 2, "two": 2}
    assert rows.batch([3, 2])["labels"].tolist() == [2.0, 1.5]
    assert rows.batch([0])["labels"].tolist() == [1]
    assert entered == ["two", "one"]
    assert rows.switch.current == "one"


def test_the_loss_is_that_of_the_task_of_the_batch_times_its_weight() -> None:
    tasks = mixture(weight=0.25)
    rows, _ = mixed_rows(tasks)
    loss = tasks.loss(rows)
    assert loss is not None
    output = SimpleNamespace(loss=torch.tensor(2.0))
    for index, expected in ((0, 2.0), (2, 0.5)):
        assert loss(output, rows.batch([index])) == expected
    assert loss(SimpleNamespace(loss=None), {}) is None


def test_each_task_is_evaluated_on_its_own_rows() -> None:
    tasks = mixture("classification")
    rows, entered = mixed_rows(tasks, labels=("pos", "neg", "pos", "pos"))
    counts = {"one/neg": 1, "one/pos": 1, "two/neg": 0, "two/pos": 2}
    assert tasks.label_counts(rows) == counts
    model = tiny_model("bert", "classification", num_labels=2).eval()
    predictions: list = []
    metrics = tasks.evaluate(model, rows, 2, predictions)
    assert entered == ["one", "two"]
    assert [p.label for p in predictions] == [p.label for p in tasks.predict(model, rows, 2)]
    assert len(predictions) == 4
    mains = metrics["one/accuracy"], metrics["two/accuracy"]
    assert metrics["mean"] == sum(mains) / 2
    right = [p.label == e.label for p, e in zip(predictions, rows.examples, strict=True)]
    assert mains == (sum(right[:2]) / 2, sum(right[2:]) / 2)


def test_metrics_have_the_name_of_the_task_and_a_mean() -> None:
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


def test_examples_have_no_task_in_common() -> None:
    tasks = mixture()
    for refused in (
        lambda: tasks.read("a.tsv", DataOptions(), "train"),
        lambda: tasks.encode((), SETTING, labelled=True),
        lambda: tasks.metrics((), ()),
    ):
        with pytest.raises(ConfigError, match="no rows in common"):
            refused()
