"""Batches by length: each row once, as many tokens as allowed, and the same results."""

from __future__ import annotations

import pytest
import torch
import transformers

from adapterhub.backbones.load import load_backbone
from adapterhub.data.options import DataOptions
from adapterhub.tasks import Encoded, Setting, parse_task
from adapterhub.tasks.common import batches
from adapterhub.tasks.common.batches import by_length, on_device, rows_at_once
from tests.kit import media
from tests.kit.runs import in_processes
from tests.kit.task_cases import CASES

LENGTHS = [9, 1, 5, 5, 2, 40, 3, 3, 8]


def encoded(lengths):
    rows = [{"input_ids": [0] * length} for length in lengths]
    return Encoded(parse_task("classification"), Setting(None, 64), (), rows, ())


def case(name, backbones, folder):
    """Return a task, a model and labelled rows for it."""
    chosen = CASES[name]
    task = parse_task(chosen.task)
    examples = task.read(str(chosen.data(folder)), DataOptions(), "train")
    labels = task.labels(examples)
    examples = [*examples[:9], *examples[-4:]]  # a folder has one class after the other
    model, tokenizer = load_backbone(str(backbones(chosen.backbone)), task=task.head, labels=labels)
    data = task.encode(examples, Setting(tokenizer, 64, labels, positions=64), labelled=True)
    data = task.with_reference(model, data, 64)
    if task.compares_with_reference:  # the reference itself is neither better nor worse
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return task, model, data


@pytest.mark.parametrize(("size", "tokens"), [(3, None), (3, 10), (100, 16), (1, 1)])
def test_each_row_is_in_one_batch_within_the_limits(size, tokens):
    batches = list(by_length(encoded(LENGTHS), size, tokens))
    order = [LENGTHS[i] for batch in batches for i in batch]
    assert order == sorted(LENGTHS)
    for batch in batches:
        padded = len(batch) * max(LENGTHS[i] for i in batch)
        assert len(batch) <= size
        assert len(batch) == 1 or tokens is None or padded <= tokens
    assert len(list(by_length(encoded([]), size, tokens))) == 0


def test_the_largest_batch_is_known():
    assert rows_at_once(64, 512) == 8
    assert rows_at_once(4, 512) == 4
    assert rows_at_once(64, 100_000) == 1


@pytest.mark.parametrize("name", CASES)
def test_smaller_batches_evaluate_to_the_same(name, backbones, tmp_path, monkeypatch):
    task, model, data = case(name, backbones, tmp_path)
    whole = task.evaluate(model, data, 64)
    monkeypatch.setattr(batches, "CPU_TOKENS", 32)
    assert task.evaluate(model, data, 64) == pytest.approx(whole, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_processes_that_divide_the_batches_evaluate_to_the_same(name, backbones, tmp_path):
    """To the bit, and each gets all predictions: the batches are those of one process."""
    task, model, data = case(name, backbones, tmp_path)
    whole = list[object]()
    expected = task.evaluate(model, data, 2, whole)

    def evaluate():
        predictions = []
        return task.evaluate(model, data, 2, predictions), predictions

    for metrics, predictions in in_processes(3, evaluate):
        assert metrics == expected
        assert list(map(str, predictions)) == list(map(str, whole))


def test_pictures_get_the_dtype_of_a_model_whose_main_input_is_text(backbones):
    model, _ = load_backbone(str(backbones("vlm-llava")), task="image-text-to-text", dtype="bf16")
    assert model.main_input_name == "input_ids"
    batch = {"pixel_values": torch.ones(1, 3, 16, 16), "loss.weights": torch.ones(1)}
    moved = on_device(batch, model, torch.device("cpu"))
    assert [t.dtype for t in moved.values()] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("name", "value", "dtype"), [
    ("pixel_values", torch.ones(1, 3, 16, 16), torch.bfloat16),
    ("input_ids", torch.ones(1, 3, dtype=torch.long), torch.long),
    ("labels", torch.ones(1), torch.float32),
])  # fmt: skip
def test_only_pictures_and_sounds_get_the_dtype_of_the_model(name, value, dtype):
    model = transformers.ViTModel(media.vit_config()).to(torch.bfloat16)
    moved = on_device({name: value}, model, torch.device("cpu"))
    assert moved[name].dtype == dtype
    assert on_device({name: value}, torch.nn.Linear(1, 1), torch.device("cpu")) == {name: value}
