"""What a target library supports, and outputs of an adapter beside those of its export in peft."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers
from forge import state_of

import adapterhub as ah
from adapterhub.adapters.export import blocking, compare, compare_method, in_peft, peft_is_installed
from adapterhub.interchange.peft import exporter
from tests.kit import tiny_models


def test_problems_are_returned_and_name_no_local_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tiny_models.model("bert")
    model.config._name_or_path = "acme/gone"
    ah.attach(model, "lora").save(tmp_path / "a")
    export = in_peft(tmp_path / "a")
    assert export.files is None
    assert "acme/gone" in export.problems[0]


CLASSES = ("MultipleChoice", "PreTraining", "QuestionAnswering", "TokenClassification")


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_model_is_compared(monkeypatch, name):
    model = getattr(transformers, f"BertFor{name}")(tiny_models.model("bert", num_labels=2).config)
    assert compare_method(model, "lora") == []
    monkeypatch.setattr(exporter, "target_options", lambda *_: {"target_modules": "x"})
    assert len(compare_method(model, "lora")) == 1


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_difference_is_found(monkeypatch, is_trained):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora")
    if is_trained:
        tiny_models.scramble(adapter, std=0.05)
    pattern_options = exporter.pattern_options
    monkeypatch.setattr(
        exporter,
        "pattern_options",
        lambda updates, rooted: pattern_options(updates, rooted) | {"lora_alpha": 1},
    )
    problems = compare(lambda: adapter)
    assert bool(problems) == is_trained  # before training, alpha has no effect
    if is_trained:
        assert "peft computes another logits: max |difference| " in problems[0]


def test_a_model_is_left_as_it_was():
    model = tiny_models.model("bert")
    before, state = state_of(model), torch.random.get_rng_state()
    assert blocking(model, "lora") == compare_method(model, "lora") == []
    assert blocking(model, "pfeiffer")
    assert state_of(model) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_cannot_compute_or_load_is_a_difference(monkeypatch):
    def fail():
        raise RuntimeError("no\nkernel")

    assert compare(fail) == [
        "outputs cannot be compared with peft's, adapterhub fails: RuntimeError: no kernel"
    ]
    adapter = ah.attach(tiny_models.model("bert"), "lora")
    monkeypatch.setattr(exporter, "target_options", lambda *_: {"target_modules": ["x"]})
    (problem,) = compare(lambda: adapter)
    assert problem.startswith("outputs cannot be compared with peft's, peft fails: ")
    assert peft_is_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not peft_is_installed()
