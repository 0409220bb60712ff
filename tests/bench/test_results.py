"""Records of cells, and their results: scores, verdicts, rates, costs and failures."""

import gzip
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from pack import packed

from adapterhub.bench import baselines
from adapterhub.bench.baselines import BagOfWords, Constant, bag_of_words, constant_of
from adapterhub.bench.cells import Cell
from adapterhub.bench.records import CellRecord, Costs, PredictedRows, RecordFolder, predicted_rows
from adapterhub.bench.results import study_results
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, FileError
from adapterhub.pages.row_scores import KINDS, calibration, is_right, row_score
from tests.kit.studies import made_record, made_records

# Records are read as written, whole or not at all.


CELL = Cell("sst2", "lora(rank=4)", 1_000, 200, 1e-3, 1, "final")
RECORD = CellRecord(
    key="0" * 32,
    cell=CELL,
    status="done",
    metric="accuracy",
    selected={"accuracy": 0.8},
    tested={"accuracy": 0.75},
    rows=PredictedRows("classes", {"label": ["a", "b"], "prediction": ["a", "a"]}),
    costs=Costs(trained=10),
    origin={"versions": {"torch": "2"}},
)


def test_a_record_is_read_as_written(tmp_path):
    folder = RecordFolder(tmp_path / "records")
    assert folder.read(RECORD.key) is None
    folder.write(RECORD)
    assert folder.read(RECORD.key) == RECORD
    assert list(folder.all()) == [RECORD]
    folder.write(replace(RECORD, selected={"accuracy": math.nan}))
    assert folder.read(RECORD.key).selected == {"accuracy": None}, "what JSON lacks is null"
    folder.path(RECORD.key).rename(folder.path("b" * 32))
    with pytest.raises(FileError):
        folder.read("b" * 32)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": 99}', b"\xff", b"null"])
def test_a_broken_record_is_refused_with_its_path(tmp_path, content):
    folder = RecordFolder(tmp_path)
    folder.path("a" * 32).write_bytes(content)
    with pytest.raises(FileError, match="is not the record of a run") as error:
        folder.read("a" * 32)
    assert str(folder.path("a" * 32)) in str(error.value)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("status", "fine"),
        ("cell", {**asdict(CELL), "rate": None}),
        ("selected", {"accuracy": "0.8"}),
        ("rows", {"kind": "classes", "columns": {"label": "ab"}}),
        ("new", 1),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, part, value):
    folder = RecordFolder(tmp_path)
    path = folder.path(RECORD.key)
    path.write_text(json.dumps({**json.loads(RECORD.to_json()), part: value}), encoding="utf-8")
    with pytest.raises(FileError, match="is not the record of a run") as error:
        folder.read(RECORD.key)
    assert part in str(error.value)


OUTCOMES = {
    "classes": {"texts": ["secret"], "label": "a", "prediction": "b", "score": 1 / 3},
    "choices": {"texts": ["secret"], "label": "secret", "prediction": "secret",
                "right": True, "score": 0.5},
    "texts": {"texts": ["secret"], "label": "secret", "prediction": "secret", "score": 0.5},
    "numbers": {"texts": ["secret"], "label": 1.0, "prediction": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTCOMES)
def test_no_text_of_the_user_is_kept(kind):
    rows = predicted_rows(kind, [{"id": 0, **OUTCOMES[kind]}] * 2)
    assert "secret" not in str(rows)
    assert len(rows.outcomes()) == 2
    if kind in ("classes", "choices"):
        assert is_right(rows.outcomes()[0]) == (kind == "choices")


def test_a_pack_has_the_same_records_as_its_files(tmp_path):
    folder = RecordFolder(tmp_path)
    others = [replace(RECORD, key=digit * 32) for digit in "213"]
    for record in (RECORD, *others):
        folder.write(record)
    before = list(folder.all())
    pack = packed(tmp_path, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl.gz"]
    again = RecordFolder(tmp_path)
    assert list(again.all()) == before
    assert again.read("2" * 32) == others[0]
    assert again.read("4" * 32) is None
    data = pack.read_bytes()
    later = replace(RECORD, key="4" * 32)
    again.write(later)
    assert packed(tmp_path, "all") == tmp_path / "all.jsonl.gz"
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl.gz"]
    assert list(RecordFolder(tmp_path).all()) == [*before, later]
    (tmp_path / "all.jsonl.gz").unlink()
    for record in before:
        again.write(record)
    assert packed(tmp_path, "mine").read_bytes() == data


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", gzip.compress(b"{}"), gzip.compress(b"x")[:-3]],
    ids=["empty", "unpacked", "no record", "cut short"],  # gzip's bytes have the time in them
)
def test_a_broken_pack_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(FileError, match="is not the record of a run") as error:
        list(RecordFolder(tmp_path).all())
    assert str(path) in str(error.value)


# From records to results.


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
    mam = task.find("mam")  # all its trials diverged
    assert (mam.estimate.value, mam.rate, mam.costs) == (None, None, None)
    assert [record.error for record in mam.failures] == ["the loss is nan"] * 5
    assert "mam" in " ".join(task.advice.reasons)


def test_which_records_make_which_results(made_study):
    records = made_records(made_study, ACCURACY)
    by_rows = [*made_records(made_study, ACCURACY, rows=50), *records]
    assert [task.rows for task in study_results(made_study, by_rows, {})] == [50, 100]
    trials = [record for record in records if record.cell.stage == "search"]
    assert study_results(made_study, trials, MAJORITY) == (), "nothing was tested"
    (task,) = study_results(made_study, [replace(r, metric="matthews") for r in records], MAJORITY)
    constant = task.find("majority class").estimate
    assert (constant.low, constant.value, constant.high) == (0, 0, 0), "by construction"
    records = made_records(made_study, {"head": 0.6})
    (task,) = study_results(
        made_study, [replace(r, costs=replace(r.costs, trained=0)) for r in records], {}
    )
    assert "10 trained parameters" in " ".join(task.advice.reasons)  # of the head alone


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


def test_rates_trials_and_costs(made_study, made_results):
    lora = made_results[0].find("lora")
    assert (lora.rate, lora.at_edge, len(lora.trials), len(lora.finals)) == (1e-3, False, 5, 3)
    assert (lora.costs.all_trained, lora.costs.train_seconds) == (10_010, 5.0)
    scores = np.array(lora.estimate.scores)
    tested = [r.tested["accuracy"] for r in made_records(made_study, ACCURACY)
              if r.cell.method == "lora" and r.tested]  # fmt: skip
    assert scores == pytest.approx(tested)
    assert lora.gap == pytest.approx(0.95 - scores.mean())
    lowest = [r for r in made_records(made_study, {"lora": 0.9}) if r.cell.rate != 1e-4]
    assert study_results(made_study, lowest, {})[0].find("lora").at_edge
    with pytest.raises(ConfigError, match="ia3"):
        made_results[0].find("ia3")


def test_a_seed_that_failed_is_counted(made_study):
    records = made_records(made_study, {"head": 0.6, "lora": 0.9})
    spoiled = [replace(r, status="failed", error="no space", rows=None, tested={})
               if (r.cell.method, r.cell.seed, r.cell.stage) == ("lora", 2, "final") else r
               for r in records]  # fmt: skip
    (task,) = study_results(made_study, spoiled, {})
    assert len(task.find("lora").estimate.scores) == 2
    assert len(task.find("lora").failures) == 1


def test_records_of_other_data_are_left_out(made_study):
    others = [replace(r, origin={**r.origin, "data": {"test": "d"}}, rows=None)
              for r in made_records(made_study, {"lora": 0.1})]  # fmt: skip
    (task,) = study_results(made_study, [*made_records(made_study, ACCURACY), *others], {})
    assert [len(found.finals) for found in task.methods] == [3, 3, 0]


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
    """The p-values of the table are corrected for them as well; theirs is the cheapest, too."""
    accuracy = {"theirs": 0.99, "head": 0.6, "lora": 0.9, "unnamed": 0.9}
    records = made_records(made_study, accuracy)
    bench = replace(made_study.bench, recorded=("theirs", "not there"))
    (task,) = study_results(replace(made_study, bench=bench), records, {})
    assert [found.method for found in task.methods] == ["head", "lora", "theirs"]
    theirs = task.find("theirs")
    assert (theirs.comparison.verdict, theirs.comparison.comparisons) == ("better", 2)
    assert (theirs.rate, len(theirs.trials), theirs.costs.all_trained) == (1e-3, 5, 1_010)
    assert task.advice.method == "lora"
    assert "Recorded by another program, and better: theirs (+" in " ".join(task.advice.reasons)
    (alone,) = study_results(made_study, records, {})
    assert [found.method for found in alone.methods] == ["head", "lora"]
    assert alone.advice.method == "lora"
    others = [reason for reason in task.advice.reasons if "another program" not in reason]
    assert others[1:] == list(alone.advice.reasons[1:])


def test_recorded_trials_alone_are_no_result_unless_all_of_them_failed(made_study):
    """Another program may have run part of the tasks; ours would say `not run` of its own."""
    bench = replace(made_study.bench, recorded=("begun", "lost"))
    records = made_records(made_study, {"head": 0.6, "lora": 0.9, "begun": 0.9, "lost": math.nan})
    records = [r for r in records if r.cell.method != "begun" or r.cell.stage == "search"]
    (task,) = study_results(replace(made_study, bench=bench), records, {})
    assert [found.method for found in task.methods] == ["head", "lora", "lost"]


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


# Constant predictions, and a bag of words.


def accuracy(rows: PredictedRows, metric: str = "") -> float:
    score = row_score(rows.kind, metric)
    return float(score.summarize(score.columns(rows.outcomes()).sum(0)))


def test_the_majority_class_is_right_as_often_as_it_occurs():
    train = [Example("x", None, label) for label in ("a", "b", "b", "c")]
    constant = constant_of("classes", train)
    assert constant == Constant("majority class", "classes", "b", 0.5)
    test = PredictedRows("classes", {"label": ["a", "b", "b", "a"], "prediction": ["a"] * 4,
                                     "score": [1.0] * 4})  # fmt: skip
    found = constant.predict(test)
    assert found.columns["prediction"] == ["b"] * 4
    assert accuracy(found) == 0.5
    assert accuracy(found, "matthews") == 0.0
    assert calibration(found.outcomes())[1] == 0.0  # its probability is the training share
    assert constant_of("classes", train[1::-1]).value == "a", "of equally frequent ones the first"


def test_the_mean_of_numbers_has_no_correlation_and_the_variance_as_its_error():
    constant = constant_of("numbers", [Example("x", None, n) for n in (1.0, 2.0, 6.0)])
    assert (constant.name, constant.value) == ("mean", 3.0)
    found = constant.predict(PredictedRows("numbers", {"label": [2.0, 4.0], "prediction": [0, 0]}))
    assert accuracy(found) == 0.0
    assert accuracy(found, "mse") == 1.0


def rows_of(kind: str, test: list[Example]) -> PredictedRows:
    empty = {"prediction": [None] * len(test)} | (
        {"score": [0.0] * len(test)} if kind == "classes" else {}
    )
    return PredictedRows(kind, {"label": [each.label for each in test]} | empty)


@pytest.mark.parametrize("pair", [False, True])
def test_a_bag_of_words_learns_what_words_say_and_not_their_order(pair):
    """In a second text as in the first."""
    films = [
        f"the {what} was {how}" for what in ("film", "plot", "cast") for how in ("bad", "fine")
    ]
    train = [Example("x" if pair else t, t if pair else None, t.split()[-1]) for t in films * 4]
    orders = [Example("a b", None, "ab"), Example("b a", None, "ba")]
    found = bag_of_words("classes", {len(train): train, 8: train[:8]}, train[::-1])
    for number in (len(train), 8):
        assert accuracy(found.predict(rows_of("classes", train[::-1]), number)) == 1.0
    assert found.predict(rows_of("classes", train), 7) is None
    assert bag_of_words("classes", {2: orders}, orders) is not None
    assert bag_of_words("classes", {2: train[:1] * 2}, train) is None, "one class"
    assert bag_of_words("classes", {2: [SimpleNamespace(label="a")] * 2}, train) is None


def test_constants_are_kept_in_the_folder_of_a_study(tmp_path):
    constants = {"one": Constant("majority class", "classes", "b", 0.5),
                 "two": Constant("mean", "numbers", 3.0)}  # fmt: skip
    words = {
        "one": baselines.BagOfWords("classes", {8: {"prediction": ["b"], "score": [0.5]}}, "d")
    }
    assert baselines.read_constants(tmp_path) == baselines.read_bags_of_words(tmp_path) == {}
    baselines.write_baselines(tmp_path, constants, words)
    assert baselines.read_constants(tmp_path) == constants
    assert baselines.read_bags_of_words(tmp_path) == words
    (tmp_path / baselines.CONSTANTS).write_text("[1]")
    with pytest.raises(FileError, match="delete"):
        baselines.read_constants(tmp_path)


def test_the_most_frequent_labels_of_several():
    train = [SimpleNamespace(labels=labels) for labels in (("b", "a"), ("a", "b"), ("a",), ())]
    constant = constant_of("sets", train)
    assert (constant.value, constant.share) == (["a", "b"], 0.5)
    rows = PredictedRows("sets", {"label": [["a"], ["a", "b"]], "prediction": [[], []]})
    assert accuracy(constant.predict(rows), "exact_match") == 0.5


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"classes", "numbers", "sets"}))
def test_other_kinds_have_none(kind):
    assert constant_of(kind, [Example("x", None, "a")]) is None
    assert constant_of("classes", []) is None
