"""Recommendations: the cheapest of the ties, failed seeds, and what is not known."""

from dataclasses import replace

import numpy as np
import pytest

from adapterhub.bench import advice
from adapterhub.bench.advice import Cost, recommend
from adapterhub.bench.paired import PairedComparison, compare_with
from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.pages.row_scores import row_score
from tests.kit.studies import Truth

NAMES = "head", "bitfit", "lora", "full"
LEVELS = 0.6, 0.84, 0.85, 0.86
COSTS = {
    "head": Cost(770, 10.0),
    "bitfit": Cost(100_000, 30.0),
    "lora": Cost(300_000, 40.0),
    "full": Cost(22_000_000, 60.0),
}


def study_of(levels=LEVELS, kind="accuracy", seed=3, **size):
    truth = Truth(kind, levels, **{"rows": 400, "sd": (0.5,), **size})
    study = truth.study(np.random.default_rng(seed))
    return [replace(runs, method=name) for runs, name in zip(study, NAMES, strict=False)]


def majority(share):
    right = (np.arange(400) < share * 400).astype(float)
    columns = np.stack([right, np.ones(400)], axis=1)
    return RepeatedRuns("majority", row_score("classes"), (columns,), deterministic=True)


def test_the_cheapest_within_the_interval_of_the_best_is_taken():
    found = recommend(study_of(), COSTS)
    assert (found.method, found.best) == ("bitfit", "full")
    first, why, last = found.reasons
    assert first.startswith("Take bitfit: accuracy 8")
    assert first.endswith("100,000 trained parameters, 30 s of training.")
    assert why.startswith("full has the best mean, but bitfit is near enough (-")
    assert last.startswith("With these rows and seeds, a difference of less than")
    found = recommend(study_of(seed=5), {**COSTS, "lora": Cost(5, 1.0)})
    assert (found.method, found.best) == ("bitfit", "full"), "lora is tied by the correction alone"
    clear = recommend(study_of((0.5, 0.55, 0.95, 0.6)), COSTS)
    assert (clear.method, clear.best) == ("lora", "lora")
    assert clear.reasons[1:] == ("It has the best mean, and no other method is near enough.",)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ((0.84, 0.84, 0.85, 0.86), "Of the ranks 4, 16 and 64, 4 is the smallest that is near "),
        ((0.84, 0.5, 0.95, 0.96), "Of the ranks 4, 16 and 64, 16 is the smallest that is near "),
        ((0.84, 0.96, 0.85, 0.86), "Of the ranks 4, 16 and 64, 4 has the best mean, so no larger"),
        ((0.84, 0.5, 0.6, 0.95), "Of the ranks 4, 16 and 64, 64 has the best mean, and no smaller"),
    ],
)
def test_the_smallest_sufficient_rank_is_named(levels, expected):
    ranks = {"bitfit": 4, "lora": 16, "full": 64}
    found = recommend(study_of(levels), COSTS, ranks=[ranks])
    assert len([reason for reason in found.reasons if reason.startswith(expected)]) == 1
    assert not [each for each in recommend(study_of(levels), COSTS).reasons if "ranks" in each]


def test_a_method_that_another_one_beats_is_not_taken_though_tied_with_an_unsteady_best():
    random = np.random.default_rng(1)

    def runs(name, *shares):
        columns = tuple(
            np.stack([random.permutation(np.arange(400) < share * 400), np.ones(400)], axis=1)
            for share in shares
        )
        return RepeatedRuns(name, row_score("classes"), columns, deterministic=len(shares) == 1)

    steady = ("lora", "bitfit", "full", "mam", "ia3")
    study = [runs("unsteady", 0.68, 0.8, 0.92), *(runs(name, 0.75, 0.75, 0.76) for name in steady),
             runs("mean", 0.5)]  # fmt: skip
    found = recommend(study, {"mean": Cost(0, 0.0), "lora": COSTS["lora"]})
    assert (found.best, found.method) == ("unsteady", "lora")


@pytest.mark.parametrize("kind", ["pearson", "loss"])
def test_a_method_whose_seeds_diverged_is_not_taken_though_tied(kind):
    """Half of the cheapest method's seeds learned nothing: no test tells it from the best."""
    low, high = {"pearson": (0.0, 0.85), "loss": (8.0, 1.0)}[kind]
    steady, better = {"pearson": (0.8, 0.84), "loss": (1.3, 1.1)}[kind]

    def runs(name, *levels):
        each = [Truth(kind, (level,), rows=400, seeds=1, sd=(0.1,)) for level in levels]
        found = [t.study(np.random.default_rng(k))[0] for k, t in enumerate(each)]
        return replace(found[0], method=name, columns=tuple(r.columns[0] for r in found))

    study = [
        runs("bitfit", low, high, low, high),
        runs("lora", steady, steady, steady, steady),
        runs("full", better, better, steady, better),
    ]
    found = recommend(study, COSTS)
    (best,) = [each for each in study if each.method == found.best]
    assert compare_with(best, study[:1])[0].verdict == "tied"
    assert found.method != "bitfit"


def test_equal_parameters_are_decided_by_time_then_the_mean():
    """Times within a quarter are no reason: the next run may turn them around.

    So are parameters within a part of a thousand. Without costs the mean decides.
    """
    same = {name: Cost(5, 10.0) for name in NAMES}
    study = study_of()
    best = recommend(study, same).best
    other = next(name for name in ("bitfit", "lora", "full") if name != best)
    for costs in (same, {**same, other: Cost(5, 9.0)}, {}, {"lora": Cost()}):
        found = recommend(study, costs)
        assert found.method == best
        assert ("trained parameters" in " ".join(found.reasons)) == (len(costs) > 1)
    assert recommend(study, {**same, other: Cost(5, 7.0)}).method == other
    near = {"bitfit": 436_610, "lora": 436_790, "full": 436_700, "head": 770}
    costs = {name: Cost(n, 10.0) for name, n in near.items()}
    assert recommend(study, {**costs, "lora": Cost(436_790, 7.0)}).method == "lora"
    found = recommend(study_of((1.3, 1.0, 1.01, 1.02), kind="loss"), same)
    assert found.method == found.best == "bitfit"


def test_failed_seeds_one_seed_and_no_score():
    """With failed seeds it is taken if nothing else is tied; the others are not candidates."""
    study = study_of()
    study[1] = replace(study[1], failed=1)
    assert recommend(study, COSTS).method == "lora"
    assert recommend([replace(runs, failed=1) for runs in study], COSTS).method == "bitfit"
    study[1] = replace(study[1], columns=study[1].columns[:1])
    study[2] = replace(study[2], columns=(), failed=3)
    found = recommend(study, COSTS)
    assert found.method == "full"
    assert "Not tested, without three finished seeds: bitfit, lora." in found.reasons
    single = replace(study[3], method="peer", columns=study[3].columns[:1])
    found = recommend([*study_of()[:3], single], COSTS, ["peer"])
    assert found.method == recommend(study_of()[:3], COSTS).method
    assert "Not tested, without three finished seeds: peer." in found.reasons
    assert recommend([study[3]], COSTS, ["full"]).method is None


def test_nothing_can_be_told_of_few_rows_or_seeds():
    """Nor after short runs: the time that would tell is said."""
    found = recommend(study_of(rows=15), COSTS)
    assert (found.method, found.best, found.candidate) == (None, None, None)
    assert found.reasons[0].startswith("Cannot tell yet: 15 test rows are too few")
    for seeds in (1, 2):
        few = [replace(runs, columns=runs.columns[:seeds]) for runs in study_of((0.5,) * 4)]
        for study in (few, [majority(0.61), *few]):
            found = recommend(study, {**COSTS, "majority": Cost(0, 0.0)})
            assert found.method is None
            assert found.reasons == ("Cannot tell yet: no method has three finished seeds.",)
    found = recommend(study_of(), COSTS, short=advice.ShortRuns(80, 375, 2280.0))
    assert (found.method, found.candidate, found.best) == (None, "bitfit", "full")
    assert "80 steps, where adapterhub train takes 375" in found.reasons[0]
    assert "about 38 min would tell" in " ".join(found.reasons)


def test_an_untrained_method_may_be_as_good():
    costs = {**COSTS, "majority": Cost(0, 0.0)}
    found = recommend([majority(0.61), *study_of((0.6, 0.6))], costs)
    assert (found.method, found.candidate) == (None, "majority")
    assert found.reasons[0].startswith("Cannot tell yet whether majority is enough")
    learned = recommend([majority(0.61), *study_of((0.8, 0.6))], costs)
    assert learned.method == "head"
    assert "not shown to be better" not in " ".join(learned.reasons)
    assert found.unproven == learned.unproven == ()
    found = recommend([majority(0.61), *study_of((0.66, 0.67, 0.64, 0.65))], costs)
    assert found.method != "majority"
    assert found.unproven == ("majority",)
    (reason,) = [each for each in found.reasons if "not shown" in each]
    assert reason.startswith("It was not shown to be better than majority (+")


BASE = {**COSTS, "head": Cost(770, 10.0, is_adapter=False)}


def test_the_head_alone_is_taken_only_where_it_was_shown_no_worse():
    """It is the cheapest in each: of few rows it is not shown, of many it is."""
    few = recommend(study_of((0.85, 0.85, 0.85, 0.85), sd=(0.2,)), BASE)
    assert (few.method, few.candidate) == (None, "head")
    assert few.reasons[0].startswith(
        "Cannot tell yet whether head is enough: it was not shown to be no more than 1 point worse"
    )
    size = {"rows": 40_000, "sd": (0.1,), "seeds": 4}
    many = recommend(study_of((0.86, 0.85, 0.85, 0.85), **size), BASE)
    assert many.method == "head"
    assert many.reasons[0].startswith("Take head: accuracy 86")
    worse = recommend(study_of((0.80, 0.85, 0.85, 0.85), **size), BASE)
    assert worse.method != "head"


@pytest.mark.parametrize("kind", ["accuracy", "loss"])
def test_a_head_that_is_worse_is_hardly_ever_taken(kind):
    """By two points, in studies of usual sizes: none says "take head" in more than 5 %."""
    head, other = {"accuracy": (0.83, 0.85), "loss": (0.53, 0.50)}[kind]
    taken = [
        recommend(study_of((head, other), kind=kind, seed=n, rows=rows, seeds=3), BASE).method
        for n in range(60)
        for rows in (100, 400)
    ]
    assert taken.count("head") <= 0.05 * len(taken)


TIED = PairedComparison(
    baseline="lora", method="pfeiffer", score="accuracy", points=100, lower_is_better=False,
    rows=500, value=0.004, low=-0.009, high=0.017, error=0.0065, freedom=60, covers_seeds=True,
    p=0.3, corrected=0.61, comparisons=7, divisor=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "+0.4 points, 95 % interval -1.1 to +1.9, p = 0.61"),
        ({"corrected": None}, "+0.4 points, 95 % interval -0.9 to +1.7"),
        ({"low": None, "high": None, "corrected": None}, "+0.4 points"),
        (
            {"score": "loss", "points": 1, "corrected": 0.01},
            "+0.004 loss, 95 % interval -0.0109 to +0.0189, p = 0.01",
        ),
        ({"value": -1e-7}, "+0.0 points, 95 % interval -1.5 to +1.5, p = 0.61"),
    ],
)
def test_a_comparison_in_numbers(changes, expected):
    assert advice.numbers_text(replace(TIED, **changes)) == expected
