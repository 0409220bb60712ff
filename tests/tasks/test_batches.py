"""Batches and losses: each row once, the losses of their peers, and results of processes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig

from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.data.options import DataOptions
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.tasks import Encoded, Setting, parse_task
from adapterhub.tasks.common import batches
from adapterhub.tasks.common.batches import (
    IGNORED,
    by_length,
    cosent_loss,
    cosine_loss,
    multiple_negatives_loss,
    next_token_loss,
    on_device,
    results,
    rows_at_once,
    triplet_loss,
)
from tests.kit import media, tiny_models
from tests.kit.runs import in_processes
from tests.kit.selection import long_table
from tests.kit.task_cases import CASES
from tests.kit.tiny_models import MATRIX

ROWS, WIDTH = 5, 7


def vectors_of(columns: int, seed: int = 0) -> Tensor:
    """Draw vectors, (rows, columns, width)."""
    return torch.randn(ROWS, columns, WIDTH, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize(("columns", "temperature"), [(2, 0.05), (3, 0.2), (4, 0.05)])
def test_multiple_negatives_is_that_of_sentence_transformers(columns, temperature):
    vectors = vectors_of(columns)
    found = multiple_negatives_loss(vectors, different(columns), temperature)
    expected = loss_of_peer("MultipleNegativesRankingLoss", vectors, scale=1 / temperature)
    assert torch.allclose(found, expected, rtol=1e-5)


def test_losses_of_scores_and_triplets_are_those_of_sentence_transformers():
    vectors, scores = vectors_of(2), torch.tensor([0.1, 0.9, 0.5, 0.5, -0.3])
    for found, peer, options in (
        (cosent_loss(vectors, scores, 0.2), "CoSENTLoss", {"scale": 5.0}),
        (cosine_loss(vectors, scores), "CosineSimilarityLoss", {}),
    ):
        assert torch.allclose(found, loss_of_peer(peer, vectors, scores, **options), rtol=1e-5)
    losses = pytest.importorskip("sentence_transformers").sentence_transformer.losses
    options = {"distance_metric": losses.TripletDistanceMetric.COSINE, "triplet_margin": 0.3}
    expected = loss_of_peer("TripletLoss", vectors_of(3), **options)
    assert torch.allclose(triplet_loss(vectors_of(3), different(3), 0.3), expected, rtol=1e-5)


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
    found = multiple_negatives_loss(vectors, texts, 0.1)
    assert float(found) == pytest.approx(sum(expected) / ROWS, rel=1e-4)


def test_rows_may_have_fewer_negatives():
    """What stands where a text is missing changes nothing."""
    vectors, texts = vectors_of(4), different(4)
    texts[0, 3] = texts[2, 2] = texts[2, 3] = 0
    other = vectors.clone()
    other[texts == 0] = 3.0
    for loss in (multiple_negatives_loss, triplet_loss):
        assert torch.equal(loss(vectors, texts, 0.1), loss(other, texts, 0.1))
        assert torch.isfinite(loss(vectors, texts, 0.1))
    fewer = multiple_negatives_loss(vectors, texts, 0.1)
    assert fewer < multiple_negatives_loss(vectors, different(4), 0.1)


def test_equal_scores_order_nothing():
    vectors = vectors_of(2).requires_grad_()
    loss = cosent_loss(vectors, torch.ones(ROWS), 0.05)
    loss.backward()
    assert loss.item() == 0
    assert vectors.grad is not None


# Their own loss compares each token with the logits at itself: tests/backbones/test_probe.py.
UNSHIFTED = ("bart", "mbart", "plbart", "pegasus", "xlnet")


def config_of(architecture):
    """Return the configuration of a tiny model."""
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2}
    sizes = tiny_models.SIZES[architecture] | tokens | tiny_models.NO_DROPOUT
    return AutoConfig.for_model(architecture, **sizes)


ARCHITECTURES = [
    architecture
    for architecture in MATRIX
    if TASK_MODELS["causal-lm"].classes_for(config_of(architecture))
    and architecture not in UNSHIFTED
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loss_of_the_next_tokens_is_the_models(architecture):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(architecture)).eval()
    batch = tiny_models.batch()
    ignored = torch.arange(9) > torch.tensor([[8], [6], [2]])
    batch["labels"] = batch["input_ids"].masked_fill(ignored, IGNORED)
    with torch.no_grad():
        output = model(**batch)
    assert torch.allclose(next_token_loss(output, batch), output.loss, rtol=1e-6)


@given(batches=st.integers(0, 9), processes=st.integers(1, 5))
def test_each_batch_is_computed_once_and_all_get_all_results(batches, processes):
    computed, lock = [], threading.Lock()

    def compute(batch):
        with lock:
            computed.append(batch)
        return -batch

    found = in_processes(
        processes, lambda: (results(iter(range(batches)), compute), results(range(2), str))
    )
    assert found == [([-batch for batch in range(batches)], ["0", "1"])] * processes
    assert sorted(computed) == [*range(batches)]


@given(batches=st.integers(0, 9), processes=st.integers(1, 5))
def test_in_step_all_compute_as_often(batches, processes):
    """With sharded parameters, each batch is computed with the help of all processes."""

    def compute():
        own = []
        every = results(range(batches), lambda batch: own.append(batch) or batch)
        return len(own), every

    found = in_processes(processes, compute, in_step=True)
    assert found == [(-(-batches // processes), [*range(batches)])] * processes


LENGTHS = [9, 1, 5, 5, 2, 40, 3, 3, 8]


@pytest.mark.parametrize(("size", "tokens"), [(3, None), (3, 10), (100, 16), (1, 1)])
def test_each_row_is_in_one_batch_within_the_limits(size, tokens):
    rows = [{"input_ids": [0] * length} for length in LENGTHS]
    whole = Encoded(parse_task("classification"), Setting(None, 64), (), rows, ())
    batches = list(by_length(whole, size, tokens))
    order = [LENGTHS[i] for batch in batches for i in batch]
    assert order == sorted(LENGTHS)
    for batch in batches:
        padded = len(batch) * max(LENGTHS[i] for i in batch)
        assert len(batch) <= size
        assert len(batch) == 1 or tokens is None or padded <= tokens
    assert list(by_length(replace(whole, rows=[]), size, tokens)) == []
    assert [rows_at_once(*limits) for limits in ((64, 512), (4, 512), (64, 10**5))] == [8, 4, 1]


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
        moved = on_device(batch, model, torch.device("cpu"))
        assert moved.pop("pixel_values").dtype is torch.bfloat16
        assert {n: t.dtype for n, t in moved.items()} == {n: batch[n].dtype for n in moved}
    kept = on_device(batch, torch.nn.Linear(1, 1), torch.device("cpu"))
    assert kept["pixel_values"].dtype is torch.float32
