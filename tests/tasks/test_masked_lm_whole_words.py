"""masked-lm(whole_words=true): words are masked as a whole, for each kind of tokenizer."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import open_stream
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.packing import word_starts

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
