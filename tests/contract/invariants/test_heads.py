"""The task head of every kind of model is saved with an adapter and restored."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.probe import probe_batch
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.files.native import Saved
from tests.kit import tiny_models

HEADS = sorted(name for name, row in TASK_MODELS.items() if row.has_head)
READS = {"image-classification": "vit", "audio-classification": "wav2vec2"}
LABELS = ["O", "B-x", "I-x"]


def outputs(model):
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        pixels = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model(pixels).to_tuple()
    if model.main_input_name == "input_values":
        with torch.no_grad():
            return model(**probe_batch(model)).to_tuple()
    ids = tiny_models.batch(3, 9)["input_ids"] % 20
    if type(model).__name__.endswith("MultipleChoice"):
        ids = ids[:, None].repeat(1, 2, 1)
    with torch.no_grad():
        return model(ids).to_tuple()


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_saved_and_restored(kind, backbones, tmp_path):
    backbone = backbones(READS.get(kind, "bert"))
    model, _ = ah.load_backbone(str(backbone), task=kind, labels=LABELS)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    before = outputs(model)
    adapter.save(tmp_path / "adapter")
    manifest = Saved.at(tmp_path / "adapter").manifest
    assert manifest.task == kind
    assert manifest.head
    fresh, _ = ah.load_backbone(str(backbone), task=kind, labels=manifest.labels)
    loaded = ah.load(fresh, tmp_path / "adapter")
    assert loaded.labels == adapter.labels
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(fresh), strict=True))


def test_several_kinds_of_head_are_covered():
    assert len(HEADS) > 4
