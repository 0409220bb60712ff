"""masked-lm: windows, masks of tokens and of whole words, and filled texts."""

from __future__ import annotations

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import open_stream
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.packing import word_starts
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
    first, again, other, seeded = (
        masked(tokenizer, epoch, seed, 8)[1]["input_ids"]
        for epoch, seed in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert torch.equal(first, again), "they depend only on the seed and the epoch"
    assert not torch.equal(first, other)
    assert not torch.equal(first, seeded)
    hidden = batch["input_ids"][chosen]
    assert (hidden == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.04)
    assert (hidden == original[chosen]).float().mean().item() == pytest.approx(0.105, abs=0.03)


def test_each_mask_of_a_long_text_is_filled(backbones):
    bare = word_tokenizer()
    bare.mask_token = None
    with pytest.raises(ConfigError, match="no mask token"):
        parse_task("masked-lm").encode([Example("a film")], Setting(bare, 32), labelled=True)
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


TEXT = "unbelievable films, unbelievable plots"
PIECES = ["un", "believ", "able", "film", "plot", "s", ","]
SPECIAL = ["<pad>", "<mask>", "<unk>"]
GROUPS = {  # with punctuation, or without
    "wordpiece": ["unbelievable", "films", ",", "unbelievable", "plots"],
    "byte-level": ["unbelievable", "films", ",", "unbelievable", "plots"],
    "metaspace": ["unbelievable", "films,", "unbelievable", "plots"],
    "no pre-tokenizer": ["unbelievable", "films,", "unbelievable", "plots"],
}


def built(kind):
    """Build a tokenizer that splits the text into `PIECES`."""
    if kind == "wordpiece":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES, *[f"##{p}" for p in PIECES]]
        return BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    space = "Ġ" if kind == "byte-level" else "▁"
    vocab = [*SPECIAL, *PIECES, *[space + piece for piece in PIECES], space]
    scores = [(p, -1.0 if len(p) > 1 else -2.0) for p in vocab]
    inner = Tokenizer(models.Unigram(scores, unk_id=2))
    if kind == "byte-level":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "metaspace":
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    )


@pytest.mark.parametrize("kind", GROUPS)
def test_words_are_those_of_the_tokenizer(kind):
    tokenizer = built(kind)
    encoded = tokenizer([TEXT], add_special_tokens=False)
    starts = sorted(word_starts(encoded, 0, TEXT))
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
    plain = [token.strip("Ġ▁#") for token in tokens]
    ends = [*starts[1:], len(tokens)]
    words = ["".join(plain[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert len(tokens) > len(words)
    assert [word for word in words if word] == GROUPS[kind]


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_word_is_masked_as_a_whole(kind, streamed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task, setting = parse_task("masked-lm(whole_words=true, rate=0.4)"), Setting(built(kind), 64)
    if streamed:
        (tmp_path / "a.txt").write_text(TEXT)
        encoded = task.encode_stream(open_stream(str(tmp_path / "a.txt"), DataOptions()), setting)
    else:
        encoded = task.encode([Example(TEXT)], setting, labelled=True)
    row = encoded.rows[0]
    free = [n for n, special in enumerate(row["special"]) if not special]
    bounds = [*row["starts"], free[-1] + 1]
    words = [set(range(a, b)) & set(free) for a, b in itertools.pairwise(bounds)]
    seen = set()
    for epoch in range(40):
        labels = task.vary(row, setting, (0, epoch, 0))["labels"]
        chosen = {n for n, label in enumerate(labels) if label != IGNORED}
        assert 0 < len(chosen) <= max(round(0.4 * len(free)), 3)
        assert all(word <= chosen or not word & chosen for word in words)
        seen |= chosen
    assert seen == set(free), "every word is chosen in some epoch"
