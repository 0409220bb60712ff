"""What a target library supports is known without weights."""

from __future__ import annotations

from forge import state_of

import adapterhub as ah
from adapterhub.adapters.export import blocking, in_peft
from tests.kit import tiny_models


def test_the_model_is_left_as_it_was():
    model = tiny_models.model("bert")
    before = state_of(model)
    assert blocking(model, "lora") == []
    assert blocking(model, "pfeiffer")
    assert state_of(model) == before


def test_problems_are_returned_and_name_no_local_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tiny_models.model("bert")
    model.config._name_or_path = "acme/gone"
    ah.attach(model, "lora").save(tmp_path / "a")
    export = in_peft(tmp_path / "a")
    assert export.files is None
    assert "acme/gone" in export.problems[0]
