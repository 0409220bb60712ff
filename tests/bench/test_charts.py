"""The charts of a study: valid SVG of the page's colours, which name every method."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from studies import made_records

from adapterhub.bench.charts import (
    cost_chart,
    count_words,
    learning_chart,
    rates_chart,
    rows_chart,
    score_range,
    seeds_chart,
)
from adapterhub.bench.results import study_results
from adapterhub.pages.figures import COLOURS


def texts(svg):
    tree = ElementTree.fromstring(svg)
    assert not any(colour in svg for colour in COLOURS)
    return [text.strip() for text in tree.itertext() if text.strip()]


def test_seeds_are_shown_with_the_name_of_each_method(made_results):
    found = texts(seeds_chart(made_results[0]))
    assert {"head", "lora", "majority class", "accuracy"} <= set(found)
    assert "mam" not in found  # it has no score


@pytest.mark.parametrize("log", [False, True])
def test_costs_name_their_points_and_leave_out_what_has_none(made_results, log):
    found = texts(cost_chart(made_results[0], lambda c: c.all_trained, "parameters", log=log))
    assert {"head", "lora", "parameters", "accuracy"} <= set(found)
    assert "majority class" not in found
    if log:
        assert {"1k", "10k"} <= set(found)


def test_without_costs_there_is_no_chart(made_results):
    assert cost_chart(made_results[0], lambda c: None, "x") is None
    methods = tuple(replace(each, costs=None) for each in made_results[0].methods)
    assert cost_chart(replace(made_results[0], methods=methods), lambda c: 1.0, "x") is None


def test_rates_are_the_ticks(made_results):
    (task,) = made_results
    assert {"1e-4", "1e-3", "1e-2"} <= set(texts(rates_chart(task, "lora")))
    assert texts(rates_chart(task, "mam"))  # its runs diverged: crosses
    assert rates_chart(task, "majority class") is None


def test_learning_curves(made_results):
    (task,) = made_results
    assert "step" in texts(learning_chart(task, "lora"))
    assert learning_chart(task, "mam") is None


def test_scores_by_rows_need_several(made_results):
    (task,) = made_results
    assert rows_chart([task]) is None
    found = texts(rows_chart([task, replace(task, rows=1000)]))
    assert {"100", "1k", "lora", "head"} <= set(found)


def test_equal_costs_and_scores_are_drawn(made_results):
    (task,) = made_results
    same = task.find("lora")
    methods = tuple(replace(same, method=f"m{n}") for n in range(12))
    svg = cost_chart(replace(task, methods=methods), lambda c: 1.0, "x", log=True)
    assert {f"m{n}" for n in range(12)} <= set(texts(svg))


@pytest.mark.parametrize(
    ("value", "text"),
    [(300, "300"), (3000, "3k"), (2e6, "2M"), (1e9, "1G"), (0.001, "0.001"), (1e-4, "1e-4")],
)
def test_count_words(value, text):
    assert count_words(value) == text


def test_a_very_wide_interval_does_not_hide_the_others(made_study):
    accuracy = {"head": 0.7, "lora": 0.8, "mam": 0.75}
    (task,) = study_results(made_study, made_records(made_study, accuracy), {})
    before = score_range(task)
    wide = replace(task.methods[0].estimate, low=0.01, high=0.99)
    other = replace(task, methods=(replace(task.methods[0], estimate=wide), *task.methods[1:]))
    low, high = score_range(other)
    assert before[0] - 2 <= low
    assert high <= before[1] + 2
    alone = replace(task, methods=other.methods[:1])
    assert score_range(alone)[0] < 1  # nothing else is there


def test_of_many_methods_those_that_matter_have_names(made_study):
    bench = replace(made_study.bench, methods=tuple(f"lora(rank={n})" for n in range(1, 19)))
    study = replace(made_study, bench=replace(bench, baseline="lora(rank=7)"))
    accuracy = {f"lora(rank={n})": 0.6 + 0.01 * n for n in range(1, 19)}
    (task,) = study_results(study, made_records(study, accuracy), {})
    svg = cost_chart(task, lambda costs: costs.train_seconds, "seconds")
    named = {text for text in texts(svg) if text.startswith("lora(rank")}
    assert "lora(rank=7)" in named
    assert task.advice.method in named
    assert len(named) < 18
