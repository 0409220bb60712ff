"""Each registered task trains, evaluates, predicts and learns; its batches and losses."""

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from statistics import mean

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adapterhub.backbones.load import load_backbone
from adapterhub.data.options import DataOptions
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.pages.figures import prediction_sections
from adapterhub.pages.row_scores import read_predictions
from adapterhub.tasks import TASKS, Encoded, Setting, parse_task
from adapterhub.tasks.common import batches
from tests.kit import media, tiny_models
from tests.kit.data import json_lines
from tests.kit.runs import in_processes
from tests.kit.selection import cases_of, long_table
from tests.kit.session import charts_drawn, succeeded
from tests.kit.task_cases import CASES

# On the command line

# All train and predict. Some run long enough to learn, and their charts are drawn; half are
# evaluated once more, and predict on what is typed.
LEARNED = cases_of(sorted(CASES))
ASKED = {*cases_of(sorted(CASES), 2), *LEARNED}
LEARN = ("--method", "full", "train.learning_rate=3e-3", "train.tensorboard=false")


def test_each_task_has_a_case():
    # A pipeline of diffusers has a file of its own: test_text_to_image.py.
    assert CASES.keys() == TASKS.keys() - {"text-to-image"}
    assert all(parse_task(case.task).name == name for name, case in CASES.items())


def check_report(run, manifest):
    """The report has the sections of the task; the predictions give the metrics of the adapter."""
    predictions = read_predictions(run)
    assert predictions is not None
    assert predictions.task == manifest["task"]
    assert predictions.kind == parse_task(manifest["training"]["recipe"]["task"]).outcomes
    page = (run / "report.html").read_text()
    for section in (*prediction_sections(predictions), "curves", "facts"):
        assert f'<section id="{getattr(section, "id", section)}">' in page
    mistakes = [r for r in predictions.rows if r.get("label", r) != r.get("prediction")]
    assert not mistakes or any(row["texts"][0].split()[0] in page for row in mistakes)
    score, value = SCORES[predictions.kind](predictions.rows)
    expected = manifest["metrics"].get(score, value)
    assert value == pytest.approx(expected, abs=1e-4), score


SCORES = {
    "classes": lambda rows: ("accuracy", mean(r["label"] == r["prediction"] for r in rows)),
    "sets": lambda rows: ("micro_f1", entity_f1(rows)),
    "choices": lambda rows: ("accuracy", mean(r["right"] for r in rows)),
    "numbers": lambda rows: ("mse", mean((r["label"] - r["prediction"]) ** 2 for r in rows)),
    "spans": lambda rows: ("f1", entity_f1(rows)),
    "texts": lambda rows: ("exact_match", mean(r["label"] == r["prediction"] for r in rows)),
    "losses": lambda rows: (
        "loss", sum(r["loss"] * r["tokens"] for r in rows) / sum(r["tokens"] for r in rows),
    ),
}  # fmt: skip


def entity_f1(rows):
    right = sum(span in row["label"] for row in rows for span in row["prediction"])
    return 2 * right / sum(len(row["label"]) + len(row["prediction"]) for row in rows)


@pytest.mark.parametrize("name", sorted(CASES))
def test_train_eval_predict(name, adapterhub, backbones, tmp_path):
    case = CASES[name]
    epochs = case.epochs if name in LEARNED else 1
    file = case.data(tmp_path)
    run = tmp_path / "run"
    with charts_drawn() if name in LEARNED else nullcontext():
        succeeded(adapterhub(
            "train", "--backbone", backbones(case.backbone), "--task", case.task, "--train", file,
            "--eval", file, "--output", run, *LEARN, f"train.epochs={epochs}", *case.words,
            "--quiet",
        ))  # fmt: skip
    manifest = json.loads((run / "adapter/adapter.json").read_text())
    assert manifest["task"] == name
    check_report(run, manifest)

    def printed(*words):
        return succeeded(adapterhub(*words))

    rows = json_lines(printed("predict", run, "--data", file, "--json"))
    assert case.key in rows[0]
    if name not in ASKED:
        return
    metrics = json.loads(printed("eval", run, "--data", file, "--json"))
    del metrics["intervals"]
    examples, main = metrics.pop("examples"), parse_task(case.task).main_metric
    assert metrics == pytest.approx(manifest["metrics"], abs=1e-5)
    if name in LEARNED:
        assert case.least is None or metrics[main] >= case.least, metrics
        assert case.most is None or metrics[main] <= case.most, metrics
        assert printed("predict", run, *case.asked(file)).count("\n") == 1
    (row,) = json_lines(printed("predict", run, *case.asked(file), "--json"))
    assert case.key in row
    assert len(rows) == examples


# Batches and losses: each row once, losses of vectors, and results of processes

ROWS, WIDTH = 5, 7


def vectors_of(columns: int) -> Tensor:
    """Draw vectors, (rows, columns, width)."""
    return torch.randn(ROWS, columns, WIDTH, generator=torch.Generator().manual_seed(0))


def different(columns: int) -> Tensor:
    """Return the numbers of texts that are all different."""
    return torch.arange(1, ROWS * columns + 1).view(ROWS, columns)


class Columns(nn.Module):
    """Stands for a model of sentence-transformers: its features are vectors already."""

    similarity_fn_name = "cosine"

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


def loss_of_peer(name, vectors, labels=None, **options):
    """Compute a loss of sentence-transformers on the same vectors."""
    losses = pytest.importorskip("sentence_transformers").sentence_transformer.losses
    loss = getattr(losses, name)(Columns(), **options)
    features = [{"vectors": vectors[:, column]} for column in range(vectors.shape[1])]
    return loss(features, labels)


def test_losses_are_those_of_sentence_transformers():
    for columns, temperature in (2, 0.05), (4, 0.2):
        vectors = vectors_of(columns)
        found = batches.multiple_negatives_loss(vectors, different(columns), temperature)
        expected = loss_of_peer("MultipleNegativesRankingLoss", vectors, scale=1 / temperature)
        assert torch.allclose(found, expected, rtol=1e-5)
    vectors, scores = vectors_of(2), torch.tensor([0.1, 0.9, 0.5, 0.5, -0.3])
    for found, peer, options in (
        (batches.cosent_loss(vectors, scores, 0.2), "CoSENTLoss", {"scale": 5.0}),
        (batches.cosine_loss(vectors, scores), "CosineSimilarityLoss", {}),
    ):
        assert torch.allclose(found, loss_of_peer(peer, vectors, scores, **options), rtol=1e-5)
    losses = pytest.importorskip("sentence_transformers").sentence_transformer.losses
    options = {"distance_metric": losses.TripletDistanceMetric.COSINE, "triplet_margin": 0.3}
    expected = loss_of_peer("TripletLoss", vectors_of(3), **options)
    assert torch.allclose(
        batches.triplet_loss(vectors_of(3), different(3), 0.3), expected, rtol=1e-5
    )


def test_a_false_negative_is_left_out():
    """Row 1 has row 0's positive, row 2 its anchor; the second text of row 3 is row 0's anchor."""
    vectors, texts = vectors_of(2), different(2)
    texts[1, 1], texts[2, 0], texts[3, 1] = texts[0, 1], texts[0, 0], texts[0, 0]
    vectors[1, 1], vectors[2, 0], vectors[3, 1] = vectors[0, 1], vectors[0, 0], vectors[0, 0]
    left = {0: [4], 1: [2, 3, 4], 2: [4], 3: [0, 1, 2, 4], 4: [0, 1, 2, 3]}
    expected = []
    for row, others in left.items():
        cosines = nn.functional.cosine_similarity(vectors[row, :1], vectors[[row, *others], 1])
        weights = (cosines / 0.1).exp()
        expected.append(-float((weights[0] / weights.sum()).log()))
    found = batches.multiple_negatives_loss(vectors, texts, 0.1)
    assert float(found) == pytest.approx(sum(expected) / ROWS, rel=1e-4)


def test_rows_may_have_fewer_negatives():
    """What stands where a text is missing changes nothing."""
    vectors, texts = vectors_of(4), different(4)
    texts[0, 3] = texts[2, 2] = texts[2, 3] = 0
    other = vectors.clone()
    other[texts == 0] = 3.0
    for loss in (batches.multiple_negatives_loss, batches.triplet_loss):
        assert torch.equal(loss(vectors, texts, 0.1), loss(other, texts, 0.1))
        assert torch.isfinite(loss(vectors, texts, 0.1))
    fewer = batches.multiple_negatives_loss(vectors, texts, 0.1)
    assert fewer < batches.multiple_negatives_loss(vectors, different(4), 0.1)


def test_equal_scores_order_nothing():
    vectors = vectors_of(2).requires_grad_()
    loss = batches.cosent_loss(vectors, torch.ones(ROWS), 0.05)
    loss.backward()
    assert loss.item() == 0
    assert vectors.grad is not None


@given(count=st.integers(0, 9), processes=st.integers(1, 5))
def test_each_batch_is_computed_once_and_all_get_all_results(count, processes):
    computed, lock = [], threading.Lock()

    def compute(batch):
        with lock:
            computed.append(batch)
        return -batch

    def both():
        return batches.results(iter(range(count)), compute), batches.results(range(2), str)

    found = in_processes(processes, both)
    assert found == [([-batch for batch in range(count)], ["0", "1"])] * processes
    assert sorted(computed) == [*range(count)]


@given(count=st.integers(0, 9), processes=st.integers(1, 5))
def test_in_step_all_compute_as_often(count, processes):
    """With sharded parameters, each batch is computed with the help of all processes."""

    def compute():
        own = []
        every = batches.results(range(count), lambda batch: own.append(batch) or batch)
        return len(own), every

    found = in_processes(processes, compute, in_step=True)
    assert found == [(-(-count // processes), [*range(count)])] * processes


LENGTHS = [9, 1, 5, 5, 2, 40, 3, 3, 8]


@pytest.mark.parametrize(("size", "tokens"), [(3, None), (3, 10), (100, 16), (1, 1)])
def test_each_row_is_in_one_batch_within_the_limits(size, tokens):
    rows = [{"input_ids": [0] * length} for length in LENGTHS]
    whole = Encoded(parse_task("classification"), Setting(None, 64), (), rows, ())
    made = list(batches.by_length(whole, size, tokens))
    order = [LENGTHS[i] for batch in made for i in batch]
    assert order == sorted(LENGTHS)
    for batch in made:
        padded = len(batch) * max(LENGTHS[i] for i in batch)
        assert len(batch) <= size
        assert len(batch) == 1 or tokens is None or padded <= tokens
    assert list(batches.by_length(replace(whole, rows=[]), size, tokens)) == []


@long_table("name", CASES, 3)
def test_an_evaluation_is_the_same_however_its_rows_are_divided(
    name, backbones, tmp_path, monkeypatch
):
    """In smaller batches, and to the bit in processes, of which each gets all predictions.

    The metrics are those that the task names.
    """
    case = CASES[name]
    task = parse_task(case.task)
    examples = task.read(str(case.data(tmp_path)), DataOptions(), "train")
    labels = task.labels(examples)
    examples = [*examples[:9], *examples[-4:]]  # a folder has one class after the other
    model, tokenizer = load_backbone(str(backbones(case.backbone)), task=task.head, labels=labels)
    data = task.encode(examples, Setting(tokenizer, 64, labels, positions=64), labelled=True)
    data = task.with_reference(model, data, 64)
    if task.compares_with_reference:  # the reference itself is neither better nor worse
        with torch.no_grad():
            tiny_models.add_noise(model.parameters(), std=0.1, seed=0)
    predictions = list[object]()
    expected = task.evaluate(model, data, 2, predictions)
    assert tuple(expected) == task.metric_names(data.examples)
    assert task.main_metric in expected
    assert task.lower_is_better == expected.keys() & LOWER_IS_BETTER

    def evaluate():
        own = []
        return task.evaluate(model, data, 2, own), own

    for metrics, own in in_processes(3, evaluate):
        assert metrics == expected
        assert list(map(str, own)) == list(map(str, predictions))
    whole = task.evaluate(model, data, 64)
    monkeypatch.setattr(batches, "CPU_TOKENS", 32)
    assert task.evaluate(model, data, 64) == pytest.approx(whole, rel=1e-5, abs=1e-5)


def test_only_pictures_and_sounds_get_the_dtype_of_the_model(backbones):
    """Also those of a model whose main input is text."""
    vlm, _ = load_backbone(str(backbones("vlm-llava")), task="image-text-to-text", dtype="bf16")
    assert vlm.main_input_name == "input_ids"
    vit = transformers.ViTModel(media.vit_config()).to(torch.bfloat16)
    batch = {
        "pixel_values": torch.ones(1, 3, 16, 16), "loss.weights": torch.ones(1),
        "labels": torch.ones(1), "input_ids": torch.ones(1, 3, dtype=torch.long),
    }  # fmt: skip
    for model in (vlm, vit):
        moved = batches.on_device(batch, model, torch.device("cpu"))
        assert moved.pop("pixel_values").dtype is torch.bfloat16
        assert {n: t.dtype for n, t in moved.items()} == {n: batch[n].dtype for n in moved}
    kept = batches.on_device(batch, torch.nn.Linear(1, 1), torch.device("cpu"))
    assert kept["pixel_values"].dtype is torch.float32
