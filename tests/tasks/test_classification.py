"""classification and regression: examples, rows, predictions, metrics, class weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.classification import weighted_loss, weights_of
from adapterhub.tasks.tagging import Sentence
from tests.kit.session import succeeded


def test_texts_and_pairs_are_one_row_each(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task, setting = parse_task("classification"), Setting(tokenizer, 8, ("neg", "pos"))
    examples = [Example("the movie", "a film", "pos"), Example("a plot", "very " * 9, "neg")]
    first, second = task.encode(examples, setting, labelled=True).rows
    assert tokenizer.decode(first["input_ids"]) == "[CLS] the movie [SEP] a film [SEP]"
    assert (first["labels"], second["labels"]) == (1, 0)
    assert len(second["input_ids"]) == 8, "truncated"
    assert "labels" not in task.encode(examples, setting, labelled=False).rows[0]


def test_predictions_are_softmax_and_in_the_order_of_the_examples(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    model, _ = ah.load_backbone(str(backbones("bert")), task="classification", labels=["a", "b"])
    task, setting = parse_task("classification"), Setting(tokenizer, 16, ("a", "b"))
    examples = [Example("the movie was very good"), Example("bad"), Example("a film")]
    together = task.predict(model, task.encode(examples, setting, labelled=False), 2)
    for example, prediction in zip(examples, together, strict=True):
        (alone,) = task.predict(model, task.encode([example], setting, labelled=False), 1)
        assert prediction.scores == pytest.approx(alone.scores, abs=1e-5)
        assert sum(prediction.scores.values()) == pytest.approx(1)
        assert prediction.scores[prediction.label] == max(prediction.scores.values())
        assert str(prediction).startswith(f"{prediction.label} 0.")


def test_balanced_classes_have_the_same_total():
    counts = {"a": 6, "b": 3, "c": 1}
    assert weights_of({"b": 2.5}, {"a": 6, "b": 3}) == [1.0, 2.5]
    weights = weights_of("balanced", counts)
    assert weights == [10 / (3 * 6), 10 / (3 * 3), 10 / (3 * 1)]
    assert {round(w * n, 9) for w, n in zip(weights, counts.values(), strict=True)} == {
        round(10 / 3, 9)
    }


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 3)])
def test_the_loss_is_that_of_torch(shape):
    weights = [0.3, 2.0, 1.1]
    logits = torch.randn(shape, requires_grad=True)
    labels = torch.randint(3, shape[:-1])
    labels[0, ...] = -100 if len(shape) == 3 else 1
    loss = weighted_loss(weights)(SimpleNamespace(logits=logits), {"labels": labels})
    torch_loss = torch.nn.CrossEntropyLoss(torch.tensor(weights))
    expected = torch_loss(logits.reshape(-1, 3), labels.reshape(-1))
    assert torch.equal(loss, expected)
    gradients = [
        torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, expected)
    ]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("spec", "examples"),
    [
        ("classification", [Example("the movie", None, "b"), Example("a", None, "a")]),
        ("tagging", [Sentence("the end", ("the", "end"), ("a", "b"))]),
    ],
)
def test_a_task_counts_its_rows(spec, examples, backbone):
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    setting = Setting(tokenizer, 16, ("a", "b"))
    encoded = parse_task(spec).encode(examples, setting, labelled=True)
    assert parse_task(spec).loss(encoded) is None
    batch = encoded.batch(range(len(examples)))
    width = batch["labels"].shape
    output = SimpleNamespace(logits=torch.randn(*width, 2))
    task = parse_task(f"{spec}(class_weights=balanced)")
    even = torch.nn.functional.cross_entropy(output.logits.view(-1, 2), batch["labels"].view(-1))
    assert task.loss(encoded)(output, batch) == pytest.approx(float(even))


def test_weights_that_do_not_fit_are_refused():
    for spec, error, text in (
        ({"x": 2.0}, ConfigError, "'x'"),
        ({"a": 0.0, "b": 0.0}, ConfigError, "all class_weights are 0"),
        ("balanced", DataError, "'b' has none"),
    ):
        with pytest.raises(error, match=text):
            weights_of(spec, {"a": 2, "b": 0})


def test_training_uses_the_weights(train, tmp_path):
    bias = []
    for weights in ("{pos: 1, neg: 1}", "{pos: 1, neg: 0}", "null"):
        task, output = f"classification(class_weights={weights})", tmp_path / weights
        succeeded(train("--task", task, "train.max_steps=4", output=output))
        bias.append(load_file(tmp_path / weights / "adapter/adapter.safetensors"))
    for even, one, none in zip(*(each.values() for each in bias), strict=True):
        torch.testing.assert_close(even, none, rtol=1e-4, atol=1e-5)
        assert not torch.equal(even, one)
