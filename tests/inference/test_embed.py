"""Vectors of texts, by several adapters in one batch and by each pooling."""

import numpy as np
import pytest

import adapterhub as ah
from adapterhub.errors import AdapterhubError, ConfigError
from tests.kit import tiny_models


@pytest.fixture
def two(backbone):
    """Return a backbone with two adapters that change it, and its tokenizer."""
    model, tokenizer = ah.load_backbone(str(backbone), task="embedding")
    for seed, name in enumerate(("law", "code")):
        tiny_models.scramble(ah.attach(model, "lora", name=name), seed=seed)
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


def test_what_is_refused(two):
    model, tokenizer = two
    with pytest.raises(ConfigError, match="pooling"):
        ah.embed(model, tokenizer, ["a"], pooling="model")
    with pytest.raises(ConfigError, match="2 adapters for 1 texts"):
        ah.embed(model, tokenizer, ["a"], adapters=["law", "code"])
    with pytest.raises(AdapterhubError, match="nothing"):
        ah.embed(model, tokenizer, ["a"], adapters=["nothing"])
