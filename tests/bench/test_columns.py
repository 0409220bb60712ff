"""The columns of a study's table: what their cells say, and what they are sorted by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterhub.bench.columns import (
    failure_word,
    rate_words,
    score_title,
    seeds_text,
    size_words,
    study_columns,
    verdict_text,
)
from adapterhub.bench.wording import time_words


def cells(task, method):
    found = task.find(method)
    return {column.title: column.cell(found) for column in study_columns(task)}


def test_every_column_of_a_trained_method(made_results):
    (task,) = made_results
    found = cells(task, "head")
    assert list(found) == [
        "accuracy", "95 % interval", "against lora", "seeds", "fit gap", "calibration error",
        "learning rate", "trials", "good rates", "trained", "of backbone", "files", "training",
        "peak memory", "tokens/s", "attached", "routed", "merged", "loading",
    ]  # fmt: skip
    head = task.find("head")
    assert found["accuracy"].number == head.estimate.value
    assert found["accuracy"].text.startswith(f"{100 * head.estimate.value:.1f} ± ")
    assert found["against lora"].text.startswith("-")
    assert ", worse (p < 0.001)" in found["against lora"].text
    texts = {name: cell.text for name, cell in found.items()}
    assert texts["seeds"] == "3"
    assert (texts["learning rate"], texts["trials"]) == ("1e-3", "5")
    assert (texts["trained"], texts["of backbone"]) == ("1,010", "0.01 %")
    assert (texts["files"], texts["training"], texts["peak memory"]) == ("5.0 kB", "4.0 s", "1 GB")
    assert (texts["attached"], texts["routed"], texts["merged"], texts["loading"]) == (
        "1.10x", "1.20x", "cannot be merged", "20 ms",
    )  # fmt: skip
    assert cells(task, "lora")["merged"].text == "1x"


def test_a_method_that_diverged_and_one_that_is_not_trained(made_results):
    (task,) = made_results
    mam, majority = cells(task, "mam"), cells(task, "majority class")
    assert (mam["accuracy"].text, mam["accuracy"].number) == ("diverged", None)
    assert mam["against lora"].text == "-"
    assert majority["trained"].text == "-"
    assert majority["accuracy"].text == "66.5"
    assert failure_word(task.find("lora")) == "not run"


def test_columns_that_nobody_has_are_left_out(made_results):
    (task,) = made_results
    methods = tuple(replace(found, calibration=None, costs=None) for found in task.methods)
    titles = {column.title for column in study_columns(replace(task, methods=methods))}
    assert not titles & {"calibration error", "trained", "merged", "loading"}
    assert "accuracy" in titles


def test_the_baseline_and_what_is_not_known(made_results):
    (task,) = made_results
    assert verdict_text(task, task.find("lora")) == "baseline"
    head = task.find("head")
    unknown = replace(head, comparison=replace(head.comparison, corrected=None))
    assert verdict_text(task, unknown).endswith(", not known")
    even = replace(head, comparison=replace(head.comparison, value=-1e-7))
    assert verdict_text(task, even).startswith("+0.0, ")


def test_failed_seeds_are_counted(made_results):
    found = made_results[0].find("lora")
    one, *rest = found.finals
    finals = (replace(one, status="diverged"), *rest)
    assert seeds_text(replace(found, finals=finals)) == "2 of 3 (1 diverged)"


def test_an_edge_is_said(made_results):
    (task,) = made_results
    column = next(c for c in study_columns(task) if c.title == "learning rate")
    assert column.cell(replace(task.find("lora"), at_edge=True)).text == "1e-3 (edge)"


def test_a_loss_says_that_lower_is_better(made_results):
    score = replace(made_results[0].score, name="loss")
    assert score_title(replace(made_results[0], score=score)) == "loss, lower is better"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "-"), (1e-3, "1e-3"), (3.16e-3, "3.2e-3"), (9.99e-3, "1e-2"), (0.5, "5e-1"),
     (1.0, "1e0")],
)  # fmt: skip
def test_rate_words(rate, text):
    assert rate_words(rate) == text


def test_sizes_and_times():
    assert [size_words(n) for n in (5, 5000, 123_456, 2e6, 1.5e9, 2e11)] == [
        "5 B", "5.0 kB", "123 kB", "2.0 MB", "1.5 GB", "200 GB",
    ]  # fmt: skip
    assert [time_words(n) for n in (0.5, 59, 150, 9000)] == ["0.5 s", "59 s", "2 min", "2.5 h"]
