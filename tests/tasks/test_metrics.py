"""Metrics worked by hand, and their limits; rankings beside those of their peers; embedding."""

import itertools
import json
import math
import sys
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison, TextPair
from adapterhub.errors import ConfigError, DataError
from adapterhub.files.shown_table import ScoreError
from adapterhub.pages import row_scores as scoring
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.classification import Number
from adapterhub.tasks.common import metrics as measures
from adapterhub.tasks.common.batches import relevance_loss
from adapterhub.tasks.common.preference_pairs import Compared
from adapterhub.tasks.embedding import SCORES, TEXTS, Embedded, _with_passages, nearest_passages
from adapterhub.tasks.multiple_choice import Choice, Choices
from tests.kit.data import write_json_lines

label = st.sampled_from(["no", "yes", "maybe"])
number = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("metrics", "labels", "predictions", "expected"),
    [
        # F1 is 4/5 for a and 2/3 for b; Matthews is (2·1 - 1·0) / sqrt(2·3·1·2).
        (measures.classification_metrics, [*"aaab"], [*"aabb"],
         {"accuracy": 0.75, "macro_f1": (4 / 5 + 2 / 3) / 2, "matthews": 2 / math.sqrt(12)}),
        (measures.classification_metrics, [*"ab"], [*"aa"],
         {"accuracy": 0.5, "macro_f1": 1 / 3, "matthews": 0.0}),
        (measures.entity_metrics, [["O"]], [["O"]],
         {"f1": 0, "precision": 0, "recall": 0, "accuracy": 1}),
        (measures.regression_metrics, [0, 1, 2], [0, 1, 5],
         {"pearson": 5 / math.sqrt(28), "spearman": 1.0, "mse": 3.0}),
        (measures.regression_metrics, [1.0, 2.0, 3.0], [2.0] * 3,
         {"pearson": 0.0, "spearman": 0.0, "mse": 2 / 3}),
        (measures.regression_metrics, [0.0, 0.3, 0.6], [0.1 + 0.2] * 3,
         {"pearson": 0.0, "spearman": 0.0, "mse": 0.06}),
    ],
)  # fmt: skip
def test_metrics_by_hand(metrics, labels, predictions, expected):
    assert metrics(labels, predictions) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metrics", [measures.classification_metrics, measures.regression_metrics])
@given(data=st.data())
def test_metrics_are_silent_json_and_in_range(metrics, data):
    each = label if metrics is measures.classification_metrics else number
    pairs = data.draw(st.lists(st.tuples(each, each), min_size=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics([p[0] for p in pairs], [p[1] for p in pairs])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {type(value) for value in found.values()} == {float}
    found.pop("mse", 0)
    assert all(abs(value) <= 1 + 1e-9 for value in found.values())


def test_what_cannot_be_compared_is_refused():
    """Lists of different lengths, numbers that are not finite, and queries without passages."""
    others = (measures.transcription_metrics, partial(measures.generation_metrics, "exact"))
    for metrics in (measures.classification_metrics, measures.regression_metrics, *others):
        for lists in ([], []), (["0", "1"], ["1"]):
            with pytest.raises(DataError, match="cannot be compared"):
                metrics(*lists)
    with pytest.raises(DataError, match="1 of 2 predictions") as caught:
        measures.regression_metrics([1.0, 2.0], [1.0, math.nan])
    assert caught.value.offenders == ("predictions[1] is nan",)
    for relevant in ([], [[1.0], [0.0]]):
        with pytest.raises(DataError, match="without a relevant passage"):
            measures.ranking_metrics([[1.0] for _ in relevant], relevant)


def test_error_rates_by_hand():
    """Two of five words, and of 17 characters with spaces: one other letter, four left out."""
    references = ["the cat sat", "It is!"]
    found = ["the bat", "it is"]
    assert measures.transcription_metrics(references, found) == pytest.approx(
        {"wer": 2 / 5, "cer": 5 / 16}
    )
    exact = measures.transcription_metrics(references, found, exact=True)
    assert exact == pytest.approx({"wer": 4 / 5, "cer": 7 / 17})
    assert measures.transcription_metrics(["a b"], ["a b c d e"])["wer"] == 1.5, "it may be above 1"
    assert measures.transcription_metrics(["?"], [""]) == {"wer": 0.0, "cer": 0.0}


def test_what_is_spoken(monkeypatch):
    assert measures.spoken("  \u201cDon't!\u201d he said -- twice.") == "don't he said twice"
    assert measures.spoken("'tis the dogs' Zu\u0308rich") == "tis the dogs zu\u0308rich"
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(ConfigError, match="jiwer, which is not installed"):
        measures.transcription_metrics(["a"], ["a"])


def test_answers_by_squads_rules():
    for answers, found, f1, exact in (
        (["The Eiffel Tower"], "eiffel tower!", 1.0, 1.0),
        (["in 1066", "1066"], "1066", 1.0, 1.0),
        (["red blue"], "blue green", 0.5, 0.0),
        (["red"], "", 0.0, 0.0),
        ([], "", 1.0, 1.0),
        ([], "red", 0.0, 0.0),
        (["the"], "a", 1.0, 1.0),
    ):
        expected = pytest.approx({"f1": f1, "exact_match": exact})
        assert measures.answer_metrics([answers], [found]) == expected, (answers, found)
    metrics = measures.answer_metrics([["red"], ["blue"], []], ["red", "", ""])
    assert metrics == pytest.approx(
        {"f1": 2 / 3, "exact_match": 2 / 3, "has_answer_f1": 0.5, "no_answer_f1": 1.0}
    )


def test_generated_texts():
    same = ["the movie was very good", "a film"]
    assert measures.generation_metrics("bleu", same, same) == pytest.approx(
        {"bleu": 100, "chrf": 100}
    )
    assert measures.generation_metrics("bleu", same, ["no", "none"])["bleu"] < 5
    rouge = measures.generation_metrics("rouge", ["a good film", "x"], ["a bad film", "x"])
    assert rouge["rouge1"] == pytest.approx((2 / 3 + 1) / 2)
    assert rouge["rouge2"] == pytest.approx(0.0)
    assert rouge["rougeL"] == rouge["rougeLsum"] == pytest.approx((2 / 3 + 1) / 2)
    assert measures.generation_metrics("exact", ["a", "b "], [" a", "c"]) == {"exact_match": 0.5}


def test_passages_are_ranked_by_cosine():
    random = np.random.default_rng(0)
    queries, passages = (
        {f"{name} {i}": random.normal(size=6).astype(np.float32) for i in range(count)}
        for name, count in (("q", 300), ("p", 30))
    )
    found = nearest_passages(queries, passages)
    assert found.keys() == queries.keys()
    for query in ("q 0", "q 299"):
        cosine = {n: v @ queries[query] / np.linalg.norm(v) for n, v in passages.items()}
        assert [*found[query].texts] == sorted(cosine, key=cosine.__getitem__, reverse=True)[:10]
    few = {name: passages[name] for name in ("p 0", "p 1", "p 2", "p 3")}
    found = nearest_passages({"p 2": few["p 2"]}, few)["p 2"].texts
    assert sorted(found) == ["p 0", "p 1", "p 3"], "a query does not find itself"


def test_graded_relevance_is_the_gain_of_the_first_ten():
    gains = [[3.0, 0, 1, 2, *[0] * 5, 1, 1, 0], [0.0, 1, 2, *[0] * 9], [0.0] * 10 + [1, 0]]
    metrics = measures.ranking_metrics(gains, gains)
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(gains, [[*range(12, 0, -1)]] * 3, k=10))
    assert metrics["mrr@10"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert metrics["recall@1"] == pytest.approx((1 / 5 + 0 + 0) / 3)
    assert metrics["recall@10"] == pytest.approx((4 / 5 + 1 + 0) / 3)


@pytest.mark.parametrize(
    ("scores", "gains"),
    [
        ([1, 1, 1, 1], [0, 0, 1, 0.5]),
        ([2, 1, 1, 1, 0], [0, 0, 1, 0, 1]),
        ([3, 3, 3, 2, 2, 2], [0, 1, 1, 0, 1, 0]),
        ([0, 3, 1, 3, 2], [1, 0, 0, 0, 0.5]),
        ([1, 1 + 1e-9, 1 - 1e-9, 1], [0, 1, 0, 0]),
    ],
)
def test_ties_count_as_the_mean_over_their_orders(scores, gains):
    """Over the orders of all passages that keep the rounded scores in order."""
    rounded = [round(s, 6) for s in scores]
    each = [
        measures.query_metrics([gains[i] for i in order], gains)
        for order in itertools.permutations(range(len(scores)))
        if all(rounded[a] >= rounded[b] for a, b in itertools.pairwise(order))
    ]
    found = measures.query_metrics(measures.ranked_gains(scores, gains), gains)
    assert found == pytest.approx(np.mean(each, axis=0))


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_tells_nothing_apart_gets_chance(first):
    """Wherever the relevant passage is in the file: seven passages, and one in forty texts."""
    place = 0 if first else 6
    task = parse_task("reranking")
    examples = [Example(f"q {i}", f"p {i} {j}", float(j == place)) for i in range(5)
                for j in range(7)]  # fmt: skip
    metrics = task.metrics(examples, [Number(0.3)] * len(examples))
    assert metrics["recall@1"] == pytest.approx(1 / 7)
    assert metrics["mrr@10"] == pytest.approx(np.mean([1 / r for r in range(1, 8)]))
    pairs = [TextPair(f"q {i}", f"p {i}") for i in range(40)]
    one = np.ones(4, np.float32)
    queries, passages = ({f"{name} {i}": one for i in range(40)} for name in "qp")
    found = nearest_passages(queries, passages, {e.text: {e.pair} for e in pairs})
    ranked = [near.ranked for near in found.values()]
    assert measures.ranking_metrics(ranked, [[1.0]] * 40)["recall@10"] == pytest.approx(10 / 40)
    assert [found[e.text].right(e.pair) for e in pairs] == [pytest.approx(1 / 40)] * 40


def test_confident_scores_are_no_ties():
    task = parse_task("reranking")
    examples = [Example("q", f"p {j}", float(j == 1)) for j in range(3)]
    confident = [Number((1 + math.tanh(logit / 2)) / 2) for logit in (15.0, 16.0, 14.0)]
    assert task.metrics(examples, confident)["recall@1"] == 1
    assert task.metrics(examples, [Number(1.0), Number(1.0), Number(0.0)])["recall@1"] == 0.5


@pytest.mark.parametrize("label", [0, 2])
def test_choices_and_comparisons_that_are_equal_count_as_chance(label):
    task = parse_task("multiple-choice")
    examples = [Choices("t", ("a", "b", "c"), label)] * 4
    even = Choice(0, "a", (1 / 3, 1 / 3, 1 / 3))
    assert task.metrics(examples, [even] * 4)["accuracy"] == pytest.approx(1 / 3)
    assert task.outcome(examples[0], even)["right"] == pytest.approx(1 / 3)
    half = Choice(0, "a", (0.4, 0.2, 0.4))
    assert task.metrics(examples, [half] * 4)["accuracy"] == pytest.approx(0.5)
    pair, compared = Comparison("p", "c", "r"), [Compared(m, 0.0, 0.1) for m in (0, 1e-9, 1, -1)]
    for task in map(parse_task, ("preference", "reward")):
        assert task.metrics([pair] * 4, compared)["accuracy"] == pytest.approx(0.5)
        rights = [task.outcome(pair, each)["right"] for each in compared]
        assert rights == [0.5, 0.5, 1.0, 0.0]


def test_the_interval_of_a_ranking_is_by_queries():
    """It is that of the queries' own values, and a hundred passages each make it no surer."""
    random = np.random.default_rng(2)
    task = parse_task("reranking")
    examples = [Example(f"q {i}", f"p {i} {j}", float(j == 3)) for i in range(25)
                for j in range(100)]  # fmt: skip
    values = random.uniform(size=2500).tolist()
    predictions = [*map(Number, values)]
    metrics = task.metrics(examples, predictions)
    file = scoring.outcomes_of(task, examples, predictions, (), 0)
    found = scoring.score_errors(metrics, {"": scoring.EvaluatedRows(len(examples), file)})
    labels = [e.label for e in examples[:100]]
    ranked = [measures.ranked_gains(values[n : n + 100], labels) for n in range(0, 2500, 100)]
    for name, place in (("mrr@10", 2), ("ndcg@10", 3)):
        own = [measures.query_metrics(each, [1.0])[place] for each in ranked]
        assert metrics[name] == pytest.approx(np.mean(own))
        assert (found[name].rows, found[name].groups) == (2500, 25)
        error = scoring.score_error(
            scoring.row_scores("texts")["mean score"], np.stack([own, np.ones(25)], 1)
        )
        assert found[name].low == pytest.approx(error.low)
        assert found[name].high == pytest.approx(error.high)
    assert found["mrr@10"].record()["groups"] == 25


def test_the_interval_of_an_embedding_is_by_queries():
    task = parse_task("embedding(loss_type=multiple-negatives)")
    pairs = [TextPair(f"q {i // 3}", f"p {i}") for i in range(90)]
    random = np.random.default_rng(4)
    predictions = _with_passages(pairs, [random.normal(size=(2, 5)) for _ in pairs])
    metrics = task.metrics(pairs, predictions)
    file = scoring.outcomes_of(task, pairs, predictions, (), 0)
    found = scoring.score_errors(metrics, {"": scoring.EvaluatedRows(90, file)})
    assert [found[name].groups for name in metrics] == [30] * 4
    assert found["mrr@10"].low < metrics["mrr@10"] < found["mrr@10"].high
    # An older file has neither queries nor groups.
    rows = [{k: v for k, v in row.items() if k not in ("query", "ranking", "group")}
            for row in file.rows]  # fmt: skip
    older = scoring.score_errors(metrics, {"": scoring.EvaluatedRows(90, replace(file, rows=rows))})
    assert older["mrr@10"] == ScoreError(90)


def test_runs_are_compared_by_groups():
    """A difference on one of ten contexts is no finding, however many questions are on it."""

    def file(wrong):
        rows = [{"label": "a", "prediction": "ab"[i % 10 == wrong], "score": 1.0, "group": i % 10}
                for i in range(300)]  # fmt: skip
        return scoring.PredictionFile("classes", "", 0, "d", "accuracy", ("a", "b"), rows)

    found = scoring.difference(file(0), file(1))
    assert found.p is None
    assert found.low < 0 < found.high


def test_the_loss_is_the_binary_cross_entropy():
    """That of sentence-transformers' BinaryCrossEntropyLoss, which is torch's with logits."""
    logits, labels = torch.tensor([[2.0], [-1.0], [0.3]]), torch.tensor([1.0, 0.0, 0.5])
    found = relevance_loss(SimpleNamespace(logits=logits), {"labels": labels})
    assert torch.equal(found, F.binary_cross_entropy_with_logits(logits[:, 0], labels))


# embedding: the loss follows from the data; vectors and prefixes

PAIRS = [TextPair("the movie", "a film"), TextPair("very bad", "awful", ("good", "the end"))]
SCORED = [{"sentence1": "a", "sentence2": "b", "score": s} for s in (0.1, 0.9)]
TRIPLET = [{"anchor": "a", "positive": "b", "negative": "c"}]


@pytest.fixture(scope="module")
def loaded(backbone):
    return ah.load_backbone(str(backbone), task="embedding")


@pytest.mark.parametrize(
    ("rows", "loss", "main"),
    [(SCORED, "cosent", "spearman"), (TRIPLET, "multiple-negatives", "ndcg@10")],
)
def test_the_loss_follows_from_the_data(tmp_path, rows, loss, main):
    source = str(write_json_lines(tmp_path / "a.jsonl", rows))
    task, choice = parse_task("embedding").fitted(source, DataOptions(), "train")
    assert task.loss_type == loss
    assert task.main_metric == main
    assert len(task.read(source, choice.options, "eval")) == len(rows)
    chosen, _ = parse_task("embedding(loss_type=triplet)").fitted(source, choice.options, "train")
    assert chosen.loss_type == "triplet"


def test_a_batch_has_the_texts_of_all_columns(loaded):
    model, tokenizer = loaded
    task = parse_task("embedding(normalize=false)")
    rows = task.encode(PAIRS, Setting(tokenizer, 32), labelled=True)
    batch = rows.batch([0, 1])
    assert batch["input_ids"].shape == (6, 4)
    assert (batch[TEXTS] != 0).tolist() == [[True, True, False, False], [True] * 4]
    assert SCORES not in batch
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    vectors = task.vectors(output, batch)
    expected = ah.embed(model, tokenizer, ["the movie", "a film"], normalize=False)
    assert torch.allclose(vectors[0, :2], torch.tensor(expected), atol=1e-5)
    assert not vectors[0, 2:].any()
    predicted = task.predict(model, rows, 1)
    assert [len(p.vectors) for p in predicted] == [2, 4]
    assert torch.allclose(torch.tensor(predicted[1].vectors), vectors[1], atol=1e-5)
    normalized = parse_task("embedding(normalize=true)")
    rows = normalized.encode(PAIRS, Setting(tokenizer, 32), labelled=True)
    for one, other in zip(normalized.predict(model, rows, 4), predicted, strict=True):
        lengths = np.linalg.norm(other.vectors, axis=1, keepdims=True)
        assert np.allclose(one.vectors, other.vectors / lengths, atol=1e-5)


def test_equal_texts_have_one_number_and_prefixes(loaded):
    rows, setting = [TextPair("a", "b"), TextPair("b", "c")], Setting(loaded[1], 32)
    batch = parse_task("embedding").encode(rows, setting, labelled=True).batch([0, 1])
    (a, b), (same, c) = batch[TEXTS].tolist()
    assert b == same
    assert len({a, b, c}) == 3
    task = parse_task("embedding(query_prefix='the ', passage_prefix='a ')")
    rows = task.encode(PAIRS[1:], setting, labelled=True).rows
    assert task.show_row(rows[0], setting) == {
        "anchor": "[CLS] the very bad [SEP]",
        "positive": "[CLS] a awful [SEP]",
        "negative 1": "[CLS] a good [SEP]",
        "negative 2": "[CLS] a the end [SEP]",
    }


def test_metrics_of_retrieval_count_each_query_and_each_text_once(loaded):
    task = parse_task("embedding(loss_type=multiple-negatives)")
    east, north = [1.0, 0.0], [0.0, 1.0]
    examples = [TextPair("q", "p1"), TextPair("q", "p2"), TextPair("r", "p3", ("n",))]
    vectors = {"q": [4, 3, 0], "r": [0, 3, 4]}, {"p1": [1, 0, 0], "p2": [0, -1, 1],
                                                 "p3": [0, 1, 0], "n": [0, 0, 2]}  # fmt: skip
    queries, passages = ({n: np.array(v, float) for n, v in each.items()} for each in vectors)
    found = nearest_passages(queries, passages, {"q": {"p1", "p2"}, "r": {"p3"}})
    chances = [1.0, 0.0, 0.0]
    predictions = [
        Embedded(np.array([east, north]), found[e.text], chance)
        for e, chance in zip(examples, chances, strict=True)
    ]
    assert [found[e.text].right(e.pair) for e in examples] == chances
    metrics = task.metrics(examples, predictions)
    assert metrics["recall@1"] == pytest.approx((1 / 2 + 0) / 2)
    assert metrics["recall@10"] == 1
    assert metrics["mrr@10"] == pytest.approx((1 + 1 / 2) / 2)
    assert task.outcome(examples[0], predictions[0])["right"]
    assert not task.outcome(examples[2], predictions[2])["right"]
    two = Embedded(np.array([[3.0, 4.0], [4.0, 3.0]], np.float32))
    assert two.as_dict() == {"vector": [3, 4], "similarity": pytest.approx(0.96)}


def test_the_pooling_is_that_of_the_training_of_the_backbone(loaded, backbones):
    model, _ = ah.load_backbone(str(backbones("t5")), task="features")
    with pytest.raises(ConfigError, match="encoder-decoder"):
        parse_task("embedding").for_model(model)
    minilm, _ = ah.load_backbone("sentence-transformers/all-MiniLM-L6-v2", task="embedding")
    assert parse_task("embedding").for_model(minilm).pooling == "mean"
    assert parse_task("embedding(pooling=last)").for_model(minilm).pooling == "last"
    assert parse_task("embedding").for_model(loaded[0]).pooling == "mean"
