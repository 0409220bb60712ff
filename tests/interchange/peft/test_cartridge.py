"""Cartridges in both libraries and directions: equal logits."""

from __future__ import annotations

import pytest

peft = pytest.importorskip("peft")
from tests.kit.peers import compare_export, compare_import, same_bits  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
MODELS = ("gpt2", "llama")


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("architecture", MODELS)
def test_equal_logits_of_an_import(tmp_path, architecture, frozen):
    config = peft.CartridgeConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, num_frozen_tokens=frozen
    )
    adapter = compare_import(tmp_path, architecture, config, "causal-lm", atol=2e-5)
    (method,) = adapter.methods
    assert (method.name, method.length, method.frozen) == ("cartridge", 5, frozen)
    trained = {n for n, t in adapter.tensors().items() if t.requires_grad}
    assert all(name.endswith(".prefix") for name in trained)


@pytest.mark.parametrize("architecture", MODELS)
def test_equal_logits_of_an_export(tmp_path, architecture):
    adapter, imported = compare_export(
        tmp_path / "out", architecture, "cartridge(length=5, frozen=2)", "causal-lm", atol=2e-5
    )
    same_bits(adapter, imported)
    assert isinstance(imported.methods[0], type(adapter.methods[0]))
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").num_frozen_tokens == 2
