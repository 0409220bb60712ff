"""embedding: the loss follows from the data; vectors, prefixes and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import TextPair
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.embedding import SCORES, TEXTS, Embedded, nearest_passages
from tests.kit.data import write_json_lines

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
    for one in normalized.predict(model, rows, 4):
        assert np.allclose(np.linalg.norm(one.vectors, axis=1), 1, atol=1e-5)
    assert not np.allclose(np.linalg.norm(predicted[0].vectors, axis=1), 1, atol=1e-5)


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
    two = Embedded(np.array([[3.0, 4.0], [4.0, 3.0]], np.float32)).as_dict()
    assert json.loads(json.dumps(two)) == {"vector": [3, 4], "similarity": pytest.approx(0.96)}


def test_the_pooling_is_that_of_the_training_of_the_backbone(loaded, backbones):
    model, _ = ah.load_backbone(str(backbones("t5")), task="features")
    with pytest.raises(ConfigError, match="encoder-decoder"):
        parse_task("embedding").for_model(model)
    minilm, _ = ah.load_backbone("sentence-transformers/all-MiniLM-L6-v2", task="embedding")
    assert parse_task("embedding").for_model(minilm).pooling == "mean"
    assert parse_task("embedding(pooling=last)").for_model(minilm).pooling == "last"
    assert parse_task("embedding").for_model(loaded[0]).pooling == "mean"
