"""Backbones are loaded by several threads: transformers and accelerate patch torch meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import adapterhub as ah
from adapterhub.backbones.meta_model import stand_in
from tests.kit import tiny_models


def is_whole(model):
    return not any(parameter.is_meta for parameter in model.parameters())


def test_models_made_at_the_same_time_have_their_weights(backbones):
    """Without the lock some had parameters without values, and so had all that came later."""
    folder, other = str(backbones("bert")), tiny_models.language_model("llama")

    def load(task):
        return ah.load_backbone(folder, task=task)[0] if task else stand_in(other)

    with ThreadPoolExecutor(6) as pool:
        models = list(pool.map(load, ["masked-lm", None, "features"] * 8))
    assert all(map(is_whole, models))
    assert is_whole(ah.load_backbone(folder, task="masked-lm")[0])
