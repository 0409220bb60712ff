"""masked-lm: windows, masks and filled texts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from tests.kit.data import word_tokenizer


def masked(tokenizer, epoch, seed=0, count=400):
    text = " ".join(["the movie was very good"] * 4)
    encoded = parse_task("masked-lm").encode(
        [Example(text)] * count, Setting(tokenizer, 64, seed=seed), labelled=True
    )
    return encoded, encoded.batch(range(count), epoch)


def test_tokens_are_masked_as_in_bert(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    encoded, batch = masked(tokenizer, epoch=1)
    original = torch.tensor([row["input_ids"] for row in encoded.rows])
    chosen = batch["labels"] != IGNORED
    assert chosen.sum(1).tolist() == [3] * 400, "15 % of 20"
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not chosen[:, [0, -1]].any(), "special tokens stay"
    hidden = batch["input_ids"][chosen]
    assert (hidden == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.04)
    assert (hidden == original[chosen]).float().mean().item() == pytest.approx(0.105, abs=0.03)


def test_masks_depend_only_on_the_seed_and_the_epoch(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    first, again, other, seeded = (
        masked(tokenizer, epoch, seed, 8)[1]["input_ids"]
        for epoch, seed in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, seeded)


def test_each_mask_of_a_long_text_is_filled(backbones):
    model, tokenizer = ah.load_backbone(str(backbones("bert")), task="masked-lm")
    text = "the [MASK] was good " * 6
    task, setting = parse_task("masked-lm"), Setting(tokenizer, 12)
    data = task.encode([Example("a film"), Example(text)], setting, labelled=False)
    assert len(data.rows) > 2, "windows"
    plain, filled = task.predict(model, data, 2)
    assert (plain.text, plain.fills) == ("a film", ())
    assert len(filled.fills) == 6
    assert "[MASK]" not in filled.text
    assert all(0 < sum(fill.values()) <= 1 for fill in filled.fills)


def test_of_tokens_with_one_text_the_most_probable_one_counts(backbones, monkeypatch):
    """Such as with and without a space in front of it."""
    model, tokenizer = ah.load_backbone(str(backbones("bert")), task="masked-lm")
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **_: " good"[ids[0] % 2 :])
    task, setting = parse_task("masked-lm").for_model(model), Setting(tokenizer, 16)
    encoded = task.encode([Example("the [MASK]")], setting, labelled=False)
    (filled,) = task.predict(model, encoded, 1)
    with torch.no_grad():
        probabilities = model(**encoded.batch([0])).logits[0, 2].softmax(-1)
    assert filled.fills == ({"good": pytest.approx(float(probabilities.max()))},)


def test_a_tokenizer_without_what_the_task_needs():
    tokenizer = word_tokenizer()
    tokenizer.mask_token = None
    examples = [Example("the movie was good")]
    with pytest.raises(ConfigError, match="no mask token"):
        parse_task("masked-lm").encode(examples, Setting(tokenizer, 32), labelled=True)
