"""Vectors of texts, by several adapters in one batch and by each pooling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError, ConfigError


@pytest.fixture
def two(backbone):
    """Return a backbone with two adapters that change it, and its tokenizer."""
    model, tokenizer = ah.load_backbone(str(backbone), task="embedding")
    for seed, name in enumerate(("law", "code")):
        adapter = ah.attach(model, "lora", name=name)
        generator = torch.Generator().manual_seed(seed)
        for tensor in adapter.tensors().values():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    return model, tokenizer


def test_adapters_of_two_domains_in_one_batch(two):
    model, tokenizer = two
    texts = ["the movie was good", "a plot", "the end", "very bad"]
    names = ["law", "code", None, "law"]
    routed = ah.embed(model, tokenizer, texts, adapters=names, normalize=False)
    for index, name in enumerate(names):
        way = ah.disabled(model) if name is None else ah.route(model, [name])
        with way:
            alone = ah.embed(model, tokenizer, [texts[index]], normalize=False)[0]
        assert np.abs(routed[index] - alone).max() < 1e-5
    assert np.abs(routed[0] - ah.embed(model, tokenizer, texts[:1], normalize=False)[0]).max() > 0.1


@pytest.mark.parametrize("how", ["cls", "mean", "last", "max"])
def test_poolings(how, two):
    model, tokenizer = two
    batch = tokenizer(["the movie was good", "a plot"], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    own = [states[row, : int(n)] for row, n in enumerate(batch["attention_mask"].sum(1))]
    expected = {
        "cls": [s[0] for s in own], "mean": [s.mean(0) for s in own],
        "last": [s[-1] for s in own], "max": [s.amax(0) for s in own],
    }[how]  # fmt: skip
    found = ah.embed(
        model, tokenizer, ["the movie was good", "a plot"], pooling=how, normalize=False
    )
    assert np.abs(found - torch.stack(expected).numpy()).max() < 1e-5


def test_what_is_refused(two):
    model, tokenizer = two
    with pytest.raises(ConfigError, match="pooling"):
        ah.embed(model, tokenizer, ["a"], pooling="model")
    with pytest.raises(ConfigError, match="2 adapters for 1 texts"):
        ah.embed(model, tokenizer, ["a"], adapters=["law", "code"])
    with pytest.raises(AdapterhubError, match="nothing"):
        ah.embed(model, tokenizer, ["a"], adapters=["nothing"])
