"""What methods cost: in words, and which costs least."""

from __future__ import annotations

import numpy as np

from adapterhub.bench.method_costs import MethodCost, cheapest, cost_texts
from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.pages.row_scores import row_score


def runs(name, right):
    columns = np.stack([np.arange(100) < right, np.ones(100)], axis=1).astype(float)
    return RepeatedRuns(name, row_score("classes"), (columns, columns))


def test_the_fewest_parameters_come_first_then_time_then_memory_then_the_mean():
    able = [runs("a", 80), runs("b", 81), runs("c", 82)]

    def of(**costs):
        return cheapest(able, {name: MethodCost(*cost) for name, cost in costs.items()})

    assert cheapest(able, {}) == "c"
    assert of(a=(10, 9.0, 9), b=(20, 1.0, 1), c=(30, 1.0, 1)) == "a"
    assert of(a=(1000, 9.0, 9), b=(1001, 5.0, 9), c=(1002, 9.0, 1)) == "b"
    assert of(a=(10, 5.0, 9), b=(10, 5.5, 20), c=(10, 6.2, 10)) == "c"
    assert of(a=(10, 5.0, 9), b=(10, 5.5, 20), c=(10, 6.4, 1)) == "a"


def test_costs_in_words():
    assert cost_texts(MethodCost()) == []
    assert cost_texts(MethodCost(0, 300.0, 10**9)) == [
        "not trained", "5 min of training", "1 GB of memory"
    ]  # fmt: skip
