"""What a target library supports is known without weights."""

from __future__ import annotations

import pytest
import tiny_models
from forge import state_of

from adapterhub.adapters.export import blocking, in_peft
from adapterhub.errors import ConfigError


def test_the_model_is_left_as_it_was():
    model = tiny_models.model("bert")
    before = state_of(model)
    assert blocking(model, "lora", "peft") == []
    assert blocking(model, "pfeiffer", "peft")
    assert state_of(model) == before


def test_vllm_supports_less_than_peft():
    model = tiny_models.language_model("llama")
    assert blocking(model, "lora(rank=8)", "vllm") == []
    assert blocking(model, "lora(rank=64)", "vllm", max_rank=16)
    assert blocking(model, "ia3", "peft") == []
    assert blocking(model, "ia3", "vllm")


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown target library 'pef'; did you mean 'peft'"):
        blocking(tiny_models.model("bert"), "lora", "pef")


def test_problems_are_returned_and_name_no_local_folder(tmp_path):
    import adapterhub as ah

    model = tiny_models.model("bert")
    model.config._name_or_path = "acme/gone"
    ah.attach(model, "lora").save(tmp_path / "a")
    export = in_peft(tmp_path / "a")
    assert export.files is None
    assert "acme/gone" in export.problems[0]
