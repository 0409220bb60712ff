"""Estimates and intervals: equations by hand, invariance, and coverage with a known truth."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm, t

from adapterhub.bench import statistics
from adapterhub.bench.statistics import RepeatedRuns, SeedSpread, estimate_all, seed_spreads
from adapterhub.errors import ConfigError
from adapterhub.pages.row_scores import row_score
from tests.kit.runs import predictions
from tests.kit.studies import PREDICTIONS, Truth, equal, runs_of

ACCURACY = row_score("classes")


def small_study(kind="accuracy", number=0, methods=3, **size):
    truth = Truth(kind, (0.7,) * methods, **{"rows": 60, **size})
    return truth.study(np.random.default_rng(number))


# The rows


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_the_jackknife_agrees_with_a_bootstrap_over_rows(kind):
    (runs,) = Truth(kind, (0.7,), rows=400).study(np.random.default_rng(1))
    random, drawn = np.random.default_rng(0), []
    for _ in range(1000):
        weights = np.bincount(random.integers(400, size=400), minlength=400)
        drawn.append(np.mean([runs.score.summarize(weights @ c) for c in runs.columns]))
    assert np.sqrt(runs.row_variance) == pytest.approx(np.std(drawn), rel=0.12)


def test_the_shared_variance_is_the_mean_covariance_of_two_seeds():
    right = np.random.default_rng(2).integers(2, size=(4, 80))
    runs, matrix = runs_of(right), np.cov(right) / 80
    pairs = matrix[np.triu_indices(4, 1)]
    assert runs.shared_variance == pytest.approx(pairs.mean())
    assert runs.noise_variance == pytest.approx(np.diag(matrix).mean() - pairs.mean())
    assert statistics.covariance(runs, runs) == pytest.approx(runs.row_variance)
    assert runs.row_variance == pytest.approx(right.mean(0).var(ddof=1) / 80)


# The seeds


def test_the_spread_over_seeds_is_pooled_by_degrees_of_freedom():
    study = [
        runs_of(np.random.default_rng(i).random((3 + i, 200)) < 0.7, method=f"{i}")
        for i in range(3)
    ]
    spreads = seed_spreads(study)
    excess = sum((r.seeds - 1) * (r.scores.var(ddof=1) - r.noise_variance) for r in study) / 9
    for runs in study:
        found = spreads[runs.method]
        assert found.is_pooled
        assert found.freedom == 2 + 3 + 4
        assert found.variance == pytest.approx(max(excess, 0) + runs.noise_variance)


def test_a_method_with_a_larger_spread_keeps_its_own():
    study = Truth("accuracy", (0.7,) * 5, rows=500, sd=(0.1, 0.1, 0.1, 0.1, 15)).study(
        np.random.default_rng(3)
    )
    spreads = seed_spreads(study)
    assert [spreads[r.method].is_pooled for r in study] == [True] * 4 + [False]
    assert spreads["m4"].freedom == 2
    assert spreads["m4"].variance == pytest.approx(study[4].scores.var(ddof=1))


def test_unsteady_methods_leave_the_pool_unless_they_are_many():
    def pool(sd):
        truth = Truth("accuracy", (0.7,) * 20, rows=500, sd=sd)
        return seed_spreads(truth.study(np.random.default_rng(7)))

    few, many = pool((0.5,) * 18 + (25.0,) * 2), pool((0.5,) * 12 + (25.0,) * 8)
    assert {s.freedom for s in few.values() if s.is_pooled} == {36}
    assert not few["m18"].is_pooled
    assert not few["m19"].is_pooled
    assert {s.freedom for s in many.values() if s.is_pooled} == {40}
    pooled = [next(s.variance for s in each.values() if s.is_pooled) for each in (few, many)]
    assert pooled[0] < pooled[1] / 10


@pytest.mark.parametrize("number", range(2))
def test_recorded_methods_do_not_change_what_is_known_of_the_others(number):
    """However many of them there are, and however far apart their seeds are."""
    truth = Truth("accuracy", (0.7,) * 12, rows=500, sd=(0.5,) * 6 + (25.0,) * 6)
    study = truth.study(np.random.default_rng(number))
    own, others = study[:6], [replace(runs, is_recorded=True) for runs in study[6:]]
    alone, together = seed_spreads(own), seed_spreads([*own, *others])
    assert {name: together[name] for name in alone} == alone
    assert not any(together[runs.method].is_pooled for runs in others)
    known = {each.method: each for each in estimate_all([*own, *others])}
    assert [known[each.method] for each in estimate_all(own)] == estimate_all(own)
    assert seed_spreads(others) == seed_spreads([replace(r, is_recorded=False) for r in others])


def test_degrees_of_freedom_are_those_of_satterthwaite():
    own, pooled = SeedSpread(3.0, 2, False), SeedSpread(2.0, 16, True)
    found = statistics.uncertainty(0.5, 101, [(own, 3), (pooled, 4), (pooled, 2)])
    assert found.variance == pytest.approx(0.5 + 1 + 0.5 + 1)
    assert found.freedom == pytest.approx(9 / (0.25 / 100 + 1 / 2 + 1.5**2 / 16))
    assert found.error == pytest.approx(np.sqrt(3))
    assert found.quantile == pytest.approx(t.ppf(0.975, found.freedom))
    assert statistics.uncertainty(-1e-9, 101, []).freedom == 100


# The estimate


def test_an_estimate_has_the_mean_and_the_spread_of_the_seeds():
    study = small_study()
    found = estimate_all(study)[1]
    assert found.method == "m1"
    assert found.scores == tuple(study[1].scores)
    assert found.value == pytest.approx(np.mean(found.scores))
    assert found.sd == pytest.approx(np.std(found.scores, ddof=1))
    assert found.low < found.value < found.high
    assert found.covers_seeds
    assert (found.score, found.points, found.rows) == ("accuracy", 100, 60)


def test_the_interval_of_a_share_is_wilsons():
    """With one run and as many rows as a normal distribution needs."""
    right = np.arange(4000) < 3600
    (found,) = estimate_all([runs_of([right])])
    n = 0.9 * 0.1 / (0.09 / 3999)
    z = norm.ppf(0.975)
    middle, half = 0.9 + z**2 / 2 / n, z * np.sqrt(0.09 / n + z**2 / 4 / n**2)
    ends = np.array([middle - half, middle + half]) / (1 + z**2 / n)
    assert (found.low, found.high) == pytest.approx(tuple(ends), abs=1e-5)
    for right in (0, 1):  # all right is not certain
        (found,) = estimate_all([runs_of(np.full((3, 200), right))])
        assert (found.high == 1.0) if right else (found.low == 0.0)
        assert 0.015 < found.high - found.low < 0.03


def test_the_interval_of_a_loss_is_symmetric_and_not_negative():
    (found, _, _) = estimate_all(small_study("loss"))
    assert found.value - found.low == pytest.approx(found.high - found.value)
    random = np.random.default_rng(0)
    loss = np.where(random.random((2, 30)) < 0.05, 9.0, 0.0)
    columns = tuple(np.stack([row, np.ones(30)], axis=1) for row in loss)
    (found,) = estimate_all([RepeatedRuns("m", row_score("losses"), columns)])
    assert found.low == 0.0


def test_one_seed_and_few_rows_and_failed_seeds_are_less_known():
    """One seed has an interval over the rows; fewer than 20 rows have none, nor a spread."""
    study = [
        runs_of(np.arange(90).reshape(3, 30) % 4 == 0, method="three", failed=1),
        runs_of(np.eye(1, 30), method="one"),
        runs_of([np.arange(30) < 18], method="majority", deterministic=True),
        RepeatedRuns("failed", ACCURACY, (), failed=3),
    ]
    assert list(seed_spreads(study)) == ["three"]
    found = {each.method: each for each in estimate_all(study)}
    assert [len(each.scores) for each in found.values()] == [3, 1, 1, 0]
    assert (found["one"].sd, found["one"].covers_seeds) == (None, False)
    assert found["one"].low < found["one"].value < found["one"].high
    assert found["majority"].covers_seeds
    assert found["majority"].low < 0.6 < found["majority"].high
    none = found["failed"]
    assert (none.value, none.low, none.sd) == (None, None, None)
    for rows in (1, 2, 19):
        (few,) = estimate_all([runs_of(np.ones((3, 1)) * (np.arange(rows) < 1))])
        assert (few.low, few.high, few.covers_seeds) == (None, None, False)
        assert few.value == pytest.approx(1 / rows)


def test_a_constant_has_no_rare_class_and_what_predicted_one_class_may_have_one():
    rows = [{"label": "ab"[row % 10 > 6], "prediction": "a"} for row in range(1000)]
    runs = statistics.repeated_runs(
        "lora", [predictions("classes", rows)], row_score("classes", "matthews")
    )
    known = replace(runs, method="majority class", deterministic=True, is_constant=True)
    trained, constant = estimate_all([runs, known])
    assert (constant.low, constant.value, constant.high) == (0, 0, 0)
    assert -0.15 < trained.low < -0.03
    assert 0.08 < trained.high < 0.15  # of 3.7 rows in 1,000, with one class
    assert [trained] == estimate_all([runs])


# What is compared


def test_runs_are_collected_from_predictions_of_equal_rows():
    files = [predictions("classes"), predictions("classes")]
    runs = statistics.repeated_runs("lora", files, row_score("classes", "matthews"), failed=1)
    assert (runs.method, runs.score.name, runs.seeds, runs.rows) == ("lora", "matthews", 2, 4)
    assert runs.failed == 1
    assert statistics.repeated_runs("lora", [], ACCURACY, failed=3).seeds == 0
    files[1] = predictions("classes", data="e")
    with pytest.raises(ConfigError, match="lora were tested on different rows"):
        statistics.repeated_runs("lora", files, ACCURACY)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("losses", "loss", 1e308),
        ("losses", "loss", float("nan")),
        ("numbers", "prediction", 1e308),
        ("numbers", "prediction", float("-inf")),
    ],
)
@pytest.mark.parametrize("metric", ["", "mse"])
def test_a_seed_that_diverged_has_failed(kind, field, value, metric):
    score = row_score(kind, metric if kind == "numbers" else "")
    rows = [{**row} for row in predictions(kind).rows]
    rows[1][field] = value
    runs = statistics.repeated_runs("m", [predictions(kind), predictions(kind, rows)], score)
    assert (runs.seeds, runs.failed) == (1, 1)
    assert np.isfinite(runs.scores).all()


@pytest.mark.parametrize(
    "other",
    [
        runs_of(np.eye(3, 31), method="n"),
        runs_of(np.eye(3, 30)),
        runs_of(np.eye(3, 30), method="n", data="other"),
        small_study("loss", rows=30)[0],
    ],
)
def test_methods_that_do_not_compare_are_refused(other):
    with pytest.raises(ConfigError, match="cannot be compared"):
        estimate_all([runs_of(np.eye(3, 30)), other])


# Coverage


@pytest.mark.parametrize(("kind", "sd"), [("accuracy", 0.0), ("accuracy", 3.0), ("f1", 1.0)])
def test_intervals_contain_the_truth_in_about_95_of_100_studies(kind, sd):
    truth = equal(kind, 0.85, rows=400, sd=(sd,))
    random, values, hits = np.random.default_rng(0), truth.values(), 0
    for _ in range(150):
        found = estimate_all(truth.study(random))
        hits += sum(e.low <= v <= e.high for e, v in zip(found, values, strict=True))
    assert 0.93 <= hits / 150 / len(values) <= 0.985
