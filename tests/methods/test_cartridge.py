"""Cartridges, and prefixes and prompts that start from a text."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from tests.kit import tiny_models

TEXT = "the movie was a good movie"


@pytest.fixture
def loaded(backbones):
    def load(architecture, task="causal-lm"):
        return ah.load_backbone(str(backbones(architecture)), task=task)

    return load


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["cartridge", "prefix"])
def test_at_first_it_computes_what_follows_the_text(loaded, architecture, method):
    model, tokenizer = loaded(architecture)
    text, rest = tokenizer(TEXT)["input_ids"], tokenizer("a good day")["input_ids"]
    expected, bare = logits(model, text + rest)[len(text) :], logits(model, rest)
    adapter = ah.attach(model, method, text=TEXT, length=len(text), positions=True)
    found = logits(model, rest)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, bare, atol=1e-2)
    assert adapter.methods[0].inference_form().text == ""


def test_the_first_tokens_of_a_longer_text_are_taken(loaded):
    model, tokenizer = loaded("llama")
    short = ah.attach(model, "cartridge", text=TEXT, length=3, name="short")
    whole = ah.attach(
        model, "cartridge", text=TEXT, length=len(tokenizer(TEXT)["input_ids"]), name="whole"
    )
    for few, all_ in zip(short.placed[1:], whole.placed[1:], strict=True):
        torch.testing.assert_close(few.module(), all_.module()[:, :3])


def test_frozen_tokens_do_not_train_and_are_saved(loaded, tmp_path):
    model, _ = loaded("llama")
    adapter = ah.attach(model, "cartridge", text=TEXT, length=4, frozen=2)
    before = {name: tensor.detach().clone() for name, tensor in adapter.tensors().items()}
    batch = tiny_models.batch()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.1)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    for name, tensor in adapter.tensors().items():
        assert torch.equal(tensor, before[name]) == name.endswith(".first"), name
    live = logits(model, [9, 8, 7])
    adapter.save(tmp_path / "saved")
    adapter.detach()
    ah.load(model, tmp_path / "saved")
    assert torch.equal(logits(model, [9, 8, 7]), live)


def test_a_prompt_starts_from_the_embeddings_of_a_text(loaded):
    model, tokenizer = loaded("t5", "seq2seq")
    ids = tokenizer(TEXT)["input_ids"]
    adapter = ah.attach(model, "prompt", text=TEXT, length=len(ids) + 2)
    (rows,) = adapter.tensors().values()
    expected = model.get_input_embeddings()(torch.tensor([*ids, *ids[:2]]))
    assert torch.equal(rows, expected)


def test_the_tokenizer_may_be_given(backbones):
    _, tokenizer = ah.load_backbone(str(backbones("llama")), task="causal-lm")
    model = tiny_models.language_model("llama")
    with pytest.raises(ConfigError, match="tokenizer"):
        ah.attach(model, "cartridge", text=TEXT, length=3)
    ah.attach(model, "cartridge", text=TEXT, length=3, tokenizer=tokenizer)


def test_texts_that_start_nothing_are_refused(loaded):
    model, _ = loaded("llama")
    with pytest.raises(ConfigError, match="fewer than length=50"):
        ah.attach(model, "cartridge", text=TEXT, length=50)
    with pytest.raises(ConfigError, match="network"):
        ah.attach(model, "prefix", text=TEXT, length=3, reparametrize=True)
    with pytest.raises(ConfigError, match="none is left"):
        ah.attach(model, "cartridge", length=3, frozen=3)
    with pytest.raises(ConfigError, match="prompt"):
        ah.attach(model, "p-tuning", text=TEXT)
    encoder, _ = loaded("bert", "masked-lm")
    with pytest.raises(SiteError, match="cache"):
        ah.attach(encoder, "prefix", text=TEXT, length=3)
