"""The charts of a study: valid SVG of the page's colours, which name every method."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from adapterhub.bench.report import (
    count_words,
    rates_chart,
    rows_chart,
    score_range,
    seeds_chart,
)
from adapterhub.bench.results import study_results
from adapterhub.pages.figures import COLOURS
from tests.kit.studies import made_records

pytestmark = pytest.mark.usefixtures("charts")


def texts(svg):
    tree = ElementTree.fromstring(svg)
    assert not any(colour in svg for colour in COLOURS)
    return [text.strip() for text in tree.itertext() if text.strip()]


def test_seeds_are_shown_with_the_name_of_each_method(made_results):
    found = texts(seeds_chart(made_results[0]))
    assert {"head", "lora", "majority class", "accuracy"} <= set(found)
    assert "mam" not in found  # it has no score


def test_rates_are_the_ticks(made_results):
    (task,) = made_results
    assert {"1e-4", "1e-3", "1e-2"} <= set(texts(rates_chart(task, "lora")))
    assert texts(rates_chart(task, "mam"))  # its runs diverged: crosses
    assert rates_chart(task, "majority class") is None


def test_scores_by_rows_need_several(made_results):
    (task,) = made_results
    assert rows_chart([task]) is None
    found = texts(rows_chart([task, replace(task, rows=1000)]))
    assert {"100", "1k", "lora", "head"} <= set(found)


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
