"""Newly initialized parameters."""

from __future__ import annotations

import tiny_models

import adapterhub as ah
from adapterhub.backbones.newly_initialized import newly_initialized


def test_a_new_head_is_newly_initialized(backbone):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["no", "yes"])
    assert newly_initialized(model) == {"classifier.weight", "classifier.bias"}


def test_a_complete_checkpoint_has_none(backbone):
    model, _ = ah.load_backbone(str(backbone))
    assert newly_initialized(model) == frozenset()


def test_nothing_is_known_of_a_model_that_was_loaded_elsewhere():
    assert newly_initialized(tiny_models.model("bert")) == frozenset()
