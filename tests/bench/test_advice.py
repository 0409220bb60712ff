"""Recommendations: the cheapest of the ties, failed seeds, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planted_truth import Truth

from adapterhub.bench.advice import recommend
from adapterhub.bench.method_costs import MethodCost
from adapterhub.bench.paired import compare_with
from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.pages.row_scores import row_score

NAMES = "head", "bitfit", "lora", "full"
LEVELS = 0.6, 0.84, 0.85, 0.86
COSTS = {
    "head": MethodCost(770, 10.0, 10**9),
    "bitfit": MethodCost(100_000, 30.0, 10**9),
    "lora": MethodCost(300_000, 40.0, 2 * 10**9),
    "full": MethodCost(22_000_000, 60.0, 3 * 10**9),
}


def study_of(levels=LEVELS, kind="accuracy", seed=3, **size):
    truth = Truth(kind, levels, **{"rows": 400, "sd": (0.5,), **size})
    study = truth.study(np.random.default_rng(seed))
    return [replace(runs, method=name) for runs, name in zip(study, NAMES, strict=False)]


def majority(share):
    right = (np.arange(400) < share * 400).astype(float)
    columns = np.stack([right, np.ones(400)], axis=1)
    return RepeatedRuns("majority", row_score("classes"), (columns,), deterministic=True)


def test_the_cheapest_of_the_ties_is_taken():
    found = recommend(study_of(), COSTS)
    assert found.method == "bitfit"
    assert set(found.tied) == {"bitfit", "lora", "full"}
    assert found.best in found.tied
    first, why, *rest = found.reasons
    assert first.startswith("Take bitfit: accuracy 8")
    assert first.endswith("100,000 trained parameters, 30 s of training, 1 GB of memory.")
    assert "cannot be told apart from it (-" in why
    assert "after correction for 6 comparisons) and trains 100,000 parameters instead of" in why
    assert rest[0].startswith(f"Nor can be told apart from {found.best}: ")
    assert rest[1].startswith(f"Worse than {found.best}: head (-")
    assert found.unknown[-1].startswith("With these rows and seeds, a difference of less than")
    assert found.text == " ".join((*found.reasons, *found.unknown))


def test_a_method_that_only_the_correction_ties_is_not_taken():
    found = recommend(study_of(seed=5), COSTS)
    assert (found.best, found.tied) == ("full", ("bitfit", "lora", "full"))
    (behind,) = [line for line in found.reasons if line.startswith("Behind full")]
    assert "not significantly after correction for 6 comparisons: lora (-" in behind
    found = recommend(study_of(seed=5), {**COSTS, "lora": MethodCost(5, 1.0, 1)})
    assert found.method == "bitfit"


def test_a_margin_takes_the_cheapest_that_is_shown_to_lose_no_more():
    """The same methods: a wide margin takes a worse one, a narrow one none but the best."""
    study = study_of((0.5, 0.82, 0.857, 0.86), rows=4000)
    assert "bitfit" not in recommend(study, COSTS).tied
    wide = recommend(study, COSTS, margin=8)
    assert (wide.method, wide.best) == ("bitfit", "full")
    assert "full has the best mean, but bitfit is worse by at most 8" in wide.text
    assert "As near to full: lora." in wide.text
    narrow = recommend(study, COSTS, margin=0.01)
    assert narrow.method == "full"
    assert "better than every other method" not in narrow.text
    assert "Not shown to be within 0.01 of full: lora (-" in narrow.text


@settings(max_examples=20)
@given(st.floats(0.1, 60), st.integers(0, 99))
def test_a_margin_never_takes_what_may_lose_more(margin, seed):
    study = study_of(seed=seed)
    found = recommend(study, COSTS, margin=margin)
    best = next(runs for runs in study if runs.method == found.best)
    pairs = {p.method: p for p in compare_with(best, [r for r in study if r is not best])}
    able = {n for n, p in pairs.items() if p.low > -margin / 100} | {found.best}
    assert found.method == min(able, key=lambda name: COSTS[name].trained)


def test_a_clear_winner_says_so():
    found = recommend(study_of((0.5, 0.55, 0.95, 0.6)), COSTS)
    assert (found.method, found.best, found.tied) == ("lora", "lora", ("lora",))
    assert found.reasons[1] == "It is better than every other method that was tested."
    assert found.unknown == ()


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
    found = recommend(study, {"mean": MethodCost(0), "lora": COSTS["lora"]})
    assert found.best == "unsteady"
    assert set(found.tied) == {"unsteady", *steady, "mean"}
    assert found.method == "lora"
    assert any(s.startswith("mean is tied with unsteady, but worse than") for s in found.reasons)


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
    assert "bitfit" in found.tied
    assert found.method != "bitfit"
    (line,) = [text for text in found.reasons if "outside of the interval" in text]
    assert line.startswith(f"Tied with {found.best}, though with a mean outside of the interval of")
    assert "and so not taken: bitfit (" in line
    assert "bitfit" not in "".join(text for text in found.reasons if text != line)


def test_the_best_and_cheapest_says_so():
    found = recommend(study_of((0.5, 0.86, 0.86, 0.5)), COSTS)
    assert found.method == found.best == "bitfit"
    assert found.reasons[1] == (
        "It has the best mean of those that cannot be told apart and trains the fewest parameters."
    )


@pytest.mark.parametrize("costs", [{}, {"lora": MethodCost()}])
def test_without_costs_the_mean_decides_and_nothing_is_claimed(costs):
    found = recommend(study_of(), costs)
    assert found.method == found.best
    assert "trained parameters" not in found.reasons[0]
    assert "parameters" not in found.reasons[1]


def test_parameters_that_look_equal_are_decided_by_time():
    near = {"bitfit": 436_610, "lora": 436_790, "full": 436_700, "head": 770}
    costs = {name: MethodCost(n, 10.0, 100) for name, n in near.items()}
    found = recommend(study_of(), {**costs, "lora": MethodCost(436_790, 7.0, 100)})
    assert found.method == "lora"
    assert "instead of" not in found.text


def test_equal_parameters_are_decided_by_time_then_memory_then_the_mean():
    """Times and memory within a quarter are no reason: the next run may turn them around."""
    same = {name: MethodCost(5, 10.0, 100) for name in NAMES}
    study = study_of()
    best = recommend(study, same).best
    other = next(name for name in ("bitfit", "lora", "full") if name != best)
    assert recommend(study, same).method == best
    assert recommend(study, {**same, other: MethodCost(5, 9.0, 90)}).method == best
    assert recommend(study, {**same, other: MethodCost(5, 7.0, 100)}).method == other
    assert recommend(study, {**same, other: MethodCost(5, 10.0, 70)}).method == other
    loss = study_of((1.3, 1.0, 1.01, 1.02), kind="loss")
    found = recommend(loss, same)
    assert found.method == found.best == "bitfit"


def test_a_method_with_failed_seeds_is_not_taken_if_another_is_tied():
    study = study_of()
    study[1] = replace(study[1], failed=1)
    found = recommend(study, COSTS)
    assert found.method == "lora"
    assert "1 of 4 seeds of bitfit failed; its score is that of the others." in found.unknown
    every = recommend([replace(runs, failed=1) for runs in study], COSTS)
    assert every.method == "bitfit"
    assert "1 of 4 seeds of bitfit failed, as some of every tied method did" in every.text


def test_one_seed_and_no_score_are_not_candidates():
    study = study_of()
    study[1] = replace(study[1], columns=study[1].columns[:1])
    study[2] = replace(study[2], columns=(), failed=3)
    found = recommend(study, COSTS)
    assert found.method == "full"
    assert found.unknown[0].startswith("Not tested: bitfit: accuracy ")
    assert "one seed, so its spread over seeds is not known" in found.unknown[0]
    assert found.unknown[1] == "Not tested: lora: no score, all 3 seeds failed."


def test_nothing_is_recommended_of_few_rows():
    found = recommend(study_of(rows=15), COSTS)
    assert (found.method, found.best, found.tied) == (None, None, ())
    assert found.reasons[0].startswith("No method can be recommended")
    assert len(found.unknown) == 4
    assert found.unknown[0].endswith("With fewer than 20 test rows, nothing can be tested.")


def test_an_untrained_method_may_be_as_good():
    costs = {**COSTS, "majority": MethodCost(0, 0.0, 0)}
    found = recommend([majority(0.61), *study_of((0.6, 0.6))], costs)
    assert found.method == "majority"
    assert "not trained" in found.reasons[0]
    assert found.reasons[-1] == "No trained method was shown to be better than majority."
    learned = recommend([majority(0.61), *study_of((0.8, 0.6))], costs)
    assert (learned.method, learned.tied) == ("head", ("head",))
    assert "not shown to be better" not in learned.text
    assert found.unproven == learned.unproven == ()


def test_a_trained_method_that_may_be_no_better_than_an_untrained_one_says_so():
    costs = {**COSTS, "majority": MethodCost(0, 0.0, 0)}
    found = recommend([majority(0.58), *study_of((0.66, 0.67, 0.64, 0.65))], costs)
    assert found.method != "majority"
    assert found.unproven == ("majority",)
    (reason,) = [each for each in found.reasons if "not shown" in each]
    assert reason.startswith("It was not shown to be better than majority (+")
    assert "after correction for 10 comparisons" in reason


def test_a_lower_loss_is_recommended():
    found = recommend(study_of((0.9, 0.48, 0.5, 0.9), kind="loss", seed=5), COSTS)
    assert found.method == "bitfit"
    assert "less than about 0." in found.unknown[-1]
    assert " loss cannot be seen." in found.unknown[-1]


@settings(max_examples=20)
@given(st.integers(0, 2**20), st.permutations(range(4)))
def test_the_order_of_the_methods_changes_nothing(number, order):
    truth = Truth("accuracy", LEVELS, rows=100)
    study = truth.study(np.random.default_rng(number))
    study = [replace(runs, method=name) for runs, name in zip(study, NAMES, strict=True)]
    assume(len({runs.scores.mean() for runs in study}) == 4)
    first, second = (recommend(each, COSTS) for each in (study, [study[i] for i in order]))
    assert (second.method, second.best) == (first.method, first.best)
    assert set(second.tied) == set(first.tied)


def test_a_recorded_method_is_compared_and_never_recommended():
    """peer is better than all, and the cheapest: the recommendation is that without it."""
    random = np.random.default_rng(5)
    study = Truth("accuracy", (*LEVELS, 0.97, 0.86, 0.5), rows=400, sd=(0.5,)).study(random)
    names = (*NAMES, "peer", "peer two", "peer three")
    study = [replace(runs, method=name) for runs, name in zip(study, names, strict=True)]
    costs = {**COSTS, "peer": MethodCost(1, 1.0, 1)}
    found = recommend(study, costs, names[4:])
    alone = recommend(study[:4], costs)
    assert found.method == alone.method == "bitfit"
    assert (found.best, found.tied) == ("peer", ("peer",)), "of all, for the table"
    beside = [s for s in found.reasons if s.startswith("Recorded by another program")]
    assert [s for s in found.reasons if s not in beside][1:] == list(alone.reasons[1:])
    assert "and better than bitfit: peer (+" in beside[0]
    assert "and cannot be told apart from bitfit: peer two (" in beside[1]
    assert "and worse than bitfit: peer three (-" in beside[2]


def test_a_recorded_method_with_one_seed_is_named_as_not_tested():
    study = study_of()
    single = replace(study[3], method="peer", columns=study[3].columns[:1])
    found = recommend([*study[:3], single], COSTS, ["peer"])
    assert found.method == recommend(study[:3], COSTS).method
    assert found.unknown[-1].startswith("Not tested: peer: accuracy ")
    nothing = recommend([study[3]], COSTS, ["full"])
    assert (nothing.method, nothing.best) == (None, "full")
