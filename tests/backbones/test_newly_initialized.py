"""Newly initialized parameters."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.utils import set_seed
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.task_models import task_model
from adapterhub.status import quiet_loading
from tests.kit import tiny_models
from tests.kit.selection import long_table


def test_a_new_head_is_newly_initialized(backbone):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["no", "yes"])
    assert Backbone.of(model).fresh == {"classifier.weight", "classifier.bias"}


def test_a_complete_checkpoint_has_none(backbone):
    model, _ = ah.load_backbone(str(backbone))
    assert Backbone.of(model).fresh == frozenset()


def test_nothing_is_known_of_a_model_that_was_loaded_elsewhere():
    assert Backbone.of(tiny_models.model("bert")).fresh == frozenset()


KINDS = ("classification", "tagging", "multiple-choice")


@long_table(("architecture", "kind"), list(itertools.product(tiny_models.MATRIX, KINDS)), 4)
def test_a_head_is_drawn_as_loading_draws_it(architecture: str, kind: str, tmp_path: Path) -> None:
    base = tiny_models.model(architecture, "features")
    if not task_model(kind).classes_for(base.config):
        pytest.skip(f"{architecture} has no model for {kind}")
    base.save_pretrained(tmp_path)
    auto = getattr(transformers, task_model(kind).auto)

    def load(seed: int) -> PreTrainedModel:
        set_seed(seed)
        with quiet_loading():
            model, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        Backbone.of(model).fresh = frozenset(info["missing_keys"])
        return model  # type: ignore[no-any-return]

    model, expected = load(1), load(2)
    assert Backbone.of(model).fresh, "the kind has no new parameters: the test shows nothing"
    after = torch.get_rng_state()
    set_seed(2)
    Backbone.of(model).initialize_again()
    assert torch.equal(torch.get_rng_state(), after)
    drawn = model.state_dict()
    assert all(torch.equal(tensor, drawn[n]) for n, tensor in expected.state_dict().items())
