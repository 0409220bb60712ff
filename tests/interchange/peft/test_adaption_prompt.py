"""LLaMA-Adapter in both libraries and directions: equal logits, or a refusal by name."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
from tests.kit.peers import compare_export, compare_import, same_bits, trained  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
MODELS = ("llama", "mistral")


def config(layers=1):
    return peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=layers, task_type="CAUSAL_LM")


@pytest.mark.parametrize("architecture", MODELS)
def test_equal_logits_of_an_import(tmp_path, architecture):
    adapter = compare_import(tmp_path, architecture, config(), "causal-lm", atol=2e-5, std=1.0)
    (method,) = adapter.methods
    assert (method.name, method.length, method.sites) == (
        "llama-adapter", 4, ("decoder.1.attn.kv",)
    )  # fmt: skip


@pytest.mark.parametrize("architecture", MODELS)
def test_equal_logits_of_an_export(tmp_path, architecture):
    adapter, imported = compare_export(
        tmp_path / "out", architecture, "llama-adapter(length=3)", "causal-lm", atol=2e-5
    )
    same_bits(adapter, imported)


def test_padding_and_generation_are_as_in_peft(tmp_path):
    folder = trained(tmp_path / "theirs", "llama", config(2), "causal-lm", std=1.0)
    theirs = peft.PeftModel.from_pretrained(tiny_models.language_model("llama"), folder)
    ours = tiny_models.language_model("llama")
    ah.load(ours, folder)
    batch = tiny_models.padded_batch("left")
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "pad_token_id": tiny_models.PAD}  # fmt: skip
    expected, found = (model.generate(**batch, **options) for model in (theirs, ours))
    assert torch.equal(found.sequences, expected.sequences)
    pair = (torch.stack(each.logits) for each in (found, expected))
    torch.testing.assert_close(*pair, atol=2e-5, rtol=1e-5)


def test_what_peft_computes_otherwise_is_refused(tmp_path):
    folder = trained(tmp_path / "gpt2", "gpt2", config(), "causal-lm")
    with pytest.raises(MismatchError, match="llama and mistral only"):
        ah.load(tiny_models.language_model("gpt2"), folder)
    biased = {"attention_bias": True}
    folder = trained(tmp_path / "biased", "llama", config(), "causal-lm", **biased)
    with pytest.raises(MismatchError, match="adds twice"):
        ah.load(tiny_models.model("llama", "causal-lm", **biased), folder)


def test_layers_that_are_not_the_topmost_are_refused(tmp_path):
    adapter = ah.attach(tiny_models.language_model("llama"), "llama-adapter", layers="first 1")
    with pytest.raises(MismatchError, match="topmost"):
        adapter.export(tmp_path / "out")
