"""classification, regression, multi-label: rows, predictions, metrics, and weights of classes."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError, MergeError
from adapterhub.files.native import Saved
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.classification import weighted_loss, weights_of
from adapterhub.tasks.multi_label import LabelledText, Labels
from adapterhub.tasks.tagging import Sentence
from tests.kit.data import write_json_lines, write_tsv
from tests.kit.session import succeeded
from tests.kit.task_cases import several


def test_texts_and_pairs_are_one_row_each(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task, setting = parse_task("classification"), Setting(tokenizer, 8, ("neg", "pos"))
    examples = [Example("the movie", "a film", "pos"), Example("a plot", "very " * 9, "neg")]
    first, second = task.encode(examples, setting, labelled=True).rows
    assert tokenizer.decode(first["input_ids"]) == "[CLS] the movie [SEP] a film [SEP]"
    assert (first["labels"], second["labels"]) == (1, 0)
    assert len(second["input_ids"]) == 8, "truncated"
    assert "labels" not in task.encode(examples, setting, labelled=False).rows[0]


def test_predictions_are_in_the_order_of_the_examples(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    model, _ = ah.load_backbone(str(backbones("bert")), task="classification", labels=["a", "b"])
    task, setting = parse_task("classification"), Setting(tokenizer, 16, ("a", "b"))
    examples = [Example("the movie was very good"), Example("bad"), Example("a film")]
    together = task.predict(model, task.encode(examples, setting, labelled=False), 2)
    for example, prediction in zip(examples, together, strict=True):
        (alone,) = task.predict(model, task.encode([example], setting, labelled=False), 1)
        assert prediction.scores == pytest.approx(alone.scores, abs=1e-5)


def test_balanced_classes_have_the_same_total():
    assert weights_of({"b": 2.5}, {"a": 6, "b": 3}) == [1.0, 2.5]
    weights = weights_of("balanced", {"a": 6, "b": 3, "c": 1})
    assert weights == [10 / (3 * 6), 10 / (3 * 3), 10 / (3 * 1)]
    for spec, error, text in (
        ({"x": 2.0}, ConfigError, "'x'"),
        ({"a": 0.0, "b": 0.0}, ConfigError, "all class_weights are 0"),
        ("balanced", DataError, "'b' has none"),
    ):
        with pytest.raises(error, match=text):
            weights_of(spec, {"a": 2, "b": 0})


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
    ours, theirs = (torch.autograd.grad(each, logits)[0] for each in (loss, expected))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("spec", "examples"),
    [
        ("classification", [Example("the movie", None, "b"), Example("a", None, "a")]),
        ("tagging", [Sentence("the end", ("the", "end"), ("a", "b"))]),
    ],
)
def test_a_task_counts_its_rows(spec, examples, backbone):
    setting = Setting(AutoTokenizer.from_pretrained(backbone), 16, ("a", "b"))
    encoded = parse_task(spec).encode(examples, setting, labelled=True)
    assert parse_task(spec).loss(encoded) is None
    batch = encoded.batch(range(len(examples)))
    output = SimpleNamespace(logits=torch.randn(*batch["labels"].shape, 2))
    task = parse_task(f"{spec}(class_weights=balanced)")
    even = torch.nn.functional.cross_entropy(output.logits.view(-1, 2), batch["labels"].view(-1))
    assert task.loss(encoded)(output, batch) == pytest.approx(float(even))


# Several labels.

TASK = parse_task("multi-label")
EXPECTED = [("x", "y"), (), ("y",)]


def labels_in(file, task=TASK, **options):
    return [e.labels for e in task.read(str(file), DataOptions(**options), "train")]


def test_cells_are_separated_by_the_mark_that_occurs(tmp_path):
    for mark in (";", "|", ",", "; "):
        rows = [("a", f"x{mark}y"), ("b", ""), ("c", "y")]
        assert labels_in(write_tsv(tmp_path / "a.tsv", rows)) == EXPECTED
    file = write_tsv(tmp_path / "a.tsv", [("a", "food, drink;service"), ("b", "food, drink")])
    assert labels_in(file) == [("food, drink", "service"), ("food, drink",)]
    assert labels_in(file, parse_task("multi-label(separator=',')"))[1] == ("food", "drink")


def test_lists_and_columns_of_flags(tmp_path):
    lists = [{"text": t, "label": list(e)} for t, e in zip("abc", EXPECTED, strict=True)]
    assert labels_in(write_json_lines(tmp_path / "a.jsonl", lists)) == EXPECTED
    flags = write_tsv(
        tmp_path / "b.tsv", [("a", "1", "1"), ("b", "0", ""), ("c", "0", "true")], "text\tx\ty"
    )
    assert labels_in(flags, label="x,y") == EXPECTED
    assert labels_in(flags, label="x, y", labels="x=spam,y=abuse")[0] == ("spam", "abuse")


@pytest.mark.parametrize(
    ("row", "problem", "options"),
    [
        ({"text": "a", "label": [1.5]}, "other values than labels", {}),
        ({"text": "a", "label": None}, "not a list or a text", {}),
        ({"text": "", "label": "x"}, "'text' is empty", {}),
        ({"text": "a", "x": "1", "y": "7"}, "'y' is '7', not 1 or 0", {"label": "x,y"}),
    ],
)
def test_bad_rows_are_refused(row, problem, options, tmp_path):
    with pytest.raises(DataError, match="invalid rows") as error:
        labels_in(write_json_lines(tmp_path / "a.jsonl", [row]), **options)
    assert problem in str(error.value)


def test_labels_are_checked():
    examples = [LabelledText("a", None, ("y", "x")), LabelledText("b", None, ())]
    assert TASK.labels(examples) == ("x", "y")
    with pytest.raises(DataError, match="has 1 label") as error:
        TASK.check(("x",), [])
    assert "--task classification" in error.value.hint
    with pytest.raises(DataError, match="training data lacks") as error:
        TASK.check(("x", "z"), examples)
    assert error.value.offenders == ("'y': 1 time",)


@pytest.fixture
def loaded(backbone):
    labels = ["x", "y", "z"]
    model, tokenizer = ah.load_backbone(str(backbone), task="multi-label", labels=labels)
    return model, Setting(tokenizer, 32, tuple(labels))


def test_the_loss_and_the_predictions(loaded):
    model, setting = loaded
    examples = [LabelledText("the movie", None, ("y",)), LabelledText("a very good end", None, ())]
    encoded = TASK.encode(examples, setting, labelled=True)
    assert [row["labels"] for row in encoded.rows] == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert TASK.label_counts(encoded) == {"x": 0, "y": 1, "z": 0}
    batch = encoded.batch([0, 1])
    output = model(**batch)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, batch["labels"])
    assert torch.equal(output.loss, loss)
    (prediction, _) = TASK.predict(model, encoded, 1)
    assert list(prediction.scores.values()) == pytest.approx(output.logits[0].sigmoid().tolist())
    above = {k for k, v in prediction.scores.items() if v >= 0.5}
    assert set(prediction.labels) == above
    everything = parse_task("multi-label(threshold=0.0001)").predict(model, encoded, 2)[0]
    assert len(everything.labels) == 3
    probabilities = [everything.scores[label] for label in everything.labels]
    assert probabilities == sorted(probabilities, reverse=True)


def test_metrics_are_those_of_sklearn():
    examples = [LabelledText("a", None, labels) for labels in (("x", "y"), (), ("y",), ("z",))]
    scores = dict.fromkeys("xyz", 0.5)
    predicted = [Labels(labels, scores) for labels in (("x",), (), ("y",), ("x", "z"))]
    matrices = [[[n in each.labels for n in "xyz"] for each in of] for of in (examples, predicted)]
    metrics = TASK.metrics(examples, predicted)
    assert metrics["exact_match"] == 0.5
    for average in ("micro", "macro"):
        assert metrics[f"{average}_f1"] == f1_score(*matrices, average=average)


def test_the_problem_type_travels_with_the_adapter(backbone, train, adapterhub, tmp_path):
    """Merged and exported models say it, too."""
    ok, run = (lambda *words: succeeded(adapterhub(*words))), tmp_path / "run"
    succeeded(train("--task", "multilabel", "train.max_steps=1", file=several(tmp_path)))
    manifest, kind = Saved.at(run / "adapter").manifest, "multi_label_classification"
    assert (manifest.task, manifest.labels) == ("multi-label", ("good", "strong"))
    assert (manifest.head.kind, manifest.head.problem_type) == ("multi-label", kind)
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b", "c"])
    adapter = ah.load(model, run / "adapter")
    assert model.config.problem_type == kind
    assert adapter.manifest().head == manifest.head
    ah.detach(model)
    assert model.config.problem_type == "single_label_classification"
    ok("merge", run, "--output", tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["problem_type"] == kind
    ok("export", run, "--output", tmp_path / "peft")
    peft = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert peft["task_type"] == "SEQ_CLS"
    model, _ = ah.load_backbone(str(backbone), task="multi-label", labels=["good", "strong"])
    assert ah.load(model, tmp_path / "peft").problem_type == kind


def test_heads_with_one_label_and_with_several_are_not_averaged(backbone):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
    single = ah.attach(model, "lora", name="single")
    several = ah.attach(model, "lora", name="several")
    several.head.labels["problem_type"] = "multi_label_classification"
    with pytest.raises(MergeError, match="different heads"):
        ah.combine(model, [single.name, several.name], name="both")


def test_training_uses_the_weights(train, tmp_path):
    bias = []
    for weights in ("{pos: 1, neg: 1}", "{pos: 1, neg: 0}", "null"):
        task, output = f"classification(class_weights={weights})", tmp_path / weights
        succeeded(train("--task", task, "train.max_steps=4", output=output))
        bias.append(load_file(tmp_path / weights / "adapter/adapter.safetensors"))
    for even, one, none in zip(*(each.values() for each in bias), strict=True):
        torch.testing.assert_close(even, none, rtol=1e-4, atol=1e-5)
        assert not torch.equal(even, one)
