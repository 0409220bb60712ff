"""From records to results: scores, verdicts, rates, costs, failures, and what is left out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from adapterhub.bench.baselines import BagOfWords, Constant
from adapterhub.bench.cells import Cell
from adapterhub.bench.records import PredictedRows
from adapterhub.bench.results import study_results
from adapterhub.errors import ConfigError
from tests.kit.studies import made_record, made_records

ACCURACY = {"head": 0.6, "lora": 0.9, "mam": float("nan")}
MAJORITY = {"mine": Constant("majority class", "classes", "pos", 0.6)}


def test_each_method_has_its_score_and_its_verdict(made_results):
    (task,) = made_results
    assert (task.task, task.rows, task.test_rows, task.score.name) == ("mine", 100, 200, "accuracy")
    assert [found.method for found in task.methods] == ["head", "lora", "mam", "majority class"]
    head, lora, _, majority = task.methods
    assert 0.5 < head.estimate.value < 0.7
    assert lora.comparison is None  # it is the baseline
    assert (head.comparison.verdict, majority.comparison.verdict) == ("worse", "worse")
    assert majority.estimate.value == pytest.approx(133 / 200)
    assert majority.estimate.covers_seeds
    assert (task.advice.method, task.advice.best) == ("lora", "lora")


def test_the_majority_class_is_exactly_as_good_as_it_is_by_construction(made_study):
    records = [replace(r, metric="matthews") for r in made_records(made_study, ACCURACY)]
    (task,) = study_results(made_study, records, MAJORITY)
    estimate = task.find("majority class").estimate
    assert (estimate.low, estimate.value, estimate.high) == (0, 0, 0)


def test_a_bag_of_words_is_compared_where_it_has_the_rows(made_study):
    records = made_records(made_study, ACCURACY)
    right = next(list(r.rows.columns["label"]) for r in records if r.rows)
    for trained, best in ((100, "bag of words"), (50, "lora")):
        words = BagOfWords("classes", {trained: {"prediction": right, "score": [1.0] * 200}})
        (task,) = study_results(made_study, records, MAJORITY, {"mine": words})
        assert ("bag of words" in {found.method for found in task.methods}) == (trained == 100)
        assert (task.advice.best, task.advice.method) == (best, best)
        named = "the bag of words" if trained == 100 else best
        assert task.advice.reasons[0].startswith(f"Take {named}: ")


def test_the_score_is_that_of_the_records(made_study, made_results):
    tested = [r.tested["accuracy"] for r in made_records(made_study, ACCURACY)
              if r.cell.method == "lora" and r.tested]  # fmt: skip
    assert made_results[0].find("lora").estimate.scores == pytest.approx(tuple(tested))


def test_rates_trials_and_costs(made_study, made_results):
    lora = made_results[0].find("lora")
    assert (lora.rate, lora.at_edge, len(lora.trials), len(lora.finals)) == (1e-3, False, 5, 3)
    assert (lora.costs.all_trained, lora.costs.train_seconds) == (10_010, 5.0)
    scores = np.array(lora.estimate.scores)
    assert lora.gap == pytest.approx(0.95 - scores.mean())
    lowest = [r for r in made_records(made_study, {"lora": 0.9}) if r.cell.rate != 1e-4]
    assert study_results(made_study, lowest, {})[0].find("lora").at_edge
    with pytest.raises(ConfigError, match="ia3"):
        made_results[0].find("ia3")


def test_a_method_whose_trials_all_diverged_is_a_row_with_its_failures(made_results):
    mam = made_results[0].find("mam")
    assert (mam.estimate.value, mam.rate, mam.costs) == (None, None, None)
    assert [record.error for record in mam.failures] == ["the loss is nan"] * 5
    assert "mam" in " ".join(made_results[0].advice.reasons)


def test_a_seed_that_failed_is_counted(made_study):
    records = made_records(made_study, {"head": 0.6, "lora": 0.9})
    spoiled = [replace(r, status="failed", error="no space", rows=None, tested={})
               if (r.cell.method, r.cell.seed, r.cell.stage) == ("lora", 2, "final") else r
               for r in records]  # fmt: skip
    (task,) = study_results(made_study, spoiled, {})
    assert len(task.find("lora").estimate.scores) == 2
    assert len(task.find("lora").failures) == 1


def test_head_alone_is_not_called_untrained(made_study):
    records = made_records(made_study, {"head": 0.6})
    records = [replace(r, costs=replace(r.costs, trained=0)) for r in records]
    (task,) = study_results(made_study, records, {})
    assert "10 trained parameters" in " ".join(task.advice.reasons)
    assert "not trained" not in " ".join(task.advice.reasons)


def test_several_numbers_of_rows_are_several_results(made_study):
    records = [
        *made_records(made_study, ACCURACY, rows=50),
        *made_records(made_study, ACCURACY, rows=100),
    ]
    assert [task.rows for task in study_results(made_study, records, {})] == [50, 100]


def test_records_of_other_data_are_left_out(made_study):
    others = [replace(r, origin={**r.origin, "data": {"test": "d"}}, rows=None)
              for r in made_records(made_study, {"lora": 0.1})]  # fmt: skip
    (task,) = study_results(made_study, [*made_records(made_study, ACCURACY), *others], {})
    assert [len(found.finals) for found in task.methods] == [3, 3, 0]


def test_of_several_choices_that_with_the_most_steps_counts(made_study):
    records = made_records(made_study, {"lora": 0.9})
    older = made_record(Cell("mine", "lora", 100, 40, 3e-3, 1, "final"), 0, 0.5, 200)
    (task,) = study_results(made_study, [*records, older], {})
    assert {record.cell.steps for record in task.find("lora").finals} == {80}


@pytest.mark.parametrize("best", [1e-3, 1e-2])
def test_of_several_rates_that_with_the_best_trials_counts(made_study, best):
    """As after a search that was continued with another seed: both rates have final runs."""
    records = made_records(made_study, {"lora": 0.9})
    for rate in (1e-3, 1e-2):
        score = 0.9 if rate == best else 0.1
        again = made_record(Cell("mine", "lora", 100, 80, rate, 1000, "search"), 0, score, 200)
        records.append(replace(again, selected={again.metric: score}))
    for seed in (1, 2, 3):
        records.append(made_record(Cell("mine", "lora", 100, 80, 1e-2, seed, "final"), 0, 0.5, 200))
    (task,) = study_results(made_study, records, {})
    assert {record.cell.rate for record in task.find("lora").finals} == {best}


def test_recorded_methods_are_compared_with_the_others_and_never_recommended(made_study):
    """The p-values of the table are corrected for them as well."""
    accuracy = {"head": 0.6, "lora": 0.9, "theirs": 0.99, "unnamed": 0.9}
    records = made_records(made_study, accuracy)
    bench = replace(made_study.bench, recorded=("theirs", "not there"))
    (task,) = study_results(replace(made_study, bench=bench), records, {})
    assert [found.method for found in task.methods] == ["head", "lora", "theirs"]
    theirs = task.find("theirs")
    assert (theirs.comparison.verdict, theirs.comparison.comparisons) == ("better", 2)
    assert (theirs.rate, len(theirs.trials), theirs.costs.all_trained) == (1e-3, 5, 100_010)
    assert task.advice.method == "lora"
    assert "Recorded by another program, and better: theirs (+" in " ".join(task.advice.reasons)
    (alone,) = study_results(made_study, records, {})
    assert [found.method for found in alone.methods] == ["head", "lora"]
    assert alone.advice.method == "lora"


def test_recorded_trials_alone_are_no_result_unless_all_of_them_failed(made_study):
    """Another program may have run part of the tasks; ours would say `not run` of its own."""
    bench = replace(made_study.bench, recorded=("begun", "lost"))
    records = made_records(made_study, {"head": 0.6, "lora": 0.9, "begun": 0.9, "lost": math.nan})
    records = [r for r in records if r.cell.method != "begun" or r.cell.stage == "search"]
    (task,) = study_results(replace(made_study, bench=bench), records, {})
    assert [found.method for found in task.methods] == ["head", "lora", "lost"]


def test_without_a_tested_run_there_is_no_result(made_study):
    trials = [r for r in made_records(made_study, ACCURACY) if r.cell.stage == "search"]
    assert study_results(made_study, trials, MAJORITY) == ()


def test_rows_without_their_texts_are_scored_by_what_is_kept(made_study):
    """Labels of choices and texts are the user's, so records do not have them."""
    for kind, columns, name in (
        ("choices", {"score": [0.5] * 200, "right": [True] * 150 + [False] * 50}, "accuracy"),
        ("texts", {"score": [0.5] * 200}, "mean score"),
    ):
        records = [replace(r, rows=r.rows and PredictedRows(kind, columns), metric="bleu")
                   for r in made_records(made_study, {"lora": 0.9})]  # fmt: skip
        (task,) = study_results(made_study, records, {})
        assert task.score.name == name
        assert task.find("lora").estimate.value == (0.75 if kind == "choices" else 0.5)


def test_a_gap_is_that_of_the_score_not_of_the_metric_that_selects(made_study):
    def by_loss(record):
        scores = {"tested": {"loss": 0.5}, "trained": {"loss": 0.1}} if record.tested else {}
        return replace(record, metric="loss", selected={"loss": 0.5}, **scores)

    (task,) = study_results(made_study, map(by_loss, made_records(made_study, ACCURACY)), MAJORITY)
    assert task.score.name == "accuracy"
    assert {each.gap for each in task.methods} == {None}
