"""Rows as text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adapterhub.tasks.common.preview import (
    learned_line,
    removed_text,
    tags_line,
    token_texts,
    tokens_line,
)
from tests.kit.data import word_tokenizer


def test_special_tokens_are_shown(backbone):
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    ids = tokenizer("the movie")["input_ids"]
    assert tokens_line(ids, tokenizer) == "[CLS] the movie [SEP]"


def test_bytes_are_words_and_characters():
    inner = Tokenizer(models.BPE({"Ġgood": 0, "Ã": 1, "©": 2, "Ã©": 3, "Ċ": 4, "a": 5}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert token_texts([0, 3, 4, 5, 1], tokenizer) == ["▁good", "é", "\\n", "a", "Ã"]


@pytest.mark.parametrize(
    ("labels", "text"), [([-100, -100, 0, 1], "·x2 {} {}"), ([0, -100, 1], "{} · {}"), ([], "")]
)
def test_ignored_positions_are_dots(labels, text):
    tokenizer = word_tokenizer()
    words = ("the", "movie")
    ids = [
        label if label < 0 else tokenizer.convert_tokens_to_ids(words[label]) for label in labels
    ]
    assert learned_line(ids, tokenizer) == text.format(*words)


def test_tags_follow_their_token():
    tokenizer = word_tokenizer()
    ids = tokenizer("the movie was")["input_ids"]
    assert tags_line(ids, [0, 1, -100], ("O", "B-x"), tokenizer) == "the/O movie/B-x was"


@pytest.mark.parametrize(
    ("kept", "gone"),
    [("the movie", "was good"), ("was good", "the movie"), ("the good", "movie was"),
     ("movie was", "the ... good")],
)  # fmt: skip
def test_removed_tokens_are_found_anywhere(kept, gone):
    tokenizer = word_tokenizer()
    whole = tokenizer("the movie was good")["input_ids"]
    assert removed_text(whole, tokenizer(kept)["input_ids"], tokenizer) == gone
