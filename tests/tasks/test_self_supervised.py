"""Self-supervised tasks: masks of tokens and words, dropped spans, and the noises of BART."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import open_stream
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.denoising import infilled, permuted, rotated, span_draws
from adapterhub.tasks.span_corruption import span_lengths
from tests.kit.data import SENTINELS, word_tokenizer, words_of


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
    vocab = ["<pad>", "<mask>", "<unk>", *PIECES, *[space + piece for piece in PIECES], space]
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
    tokens = setting.tokenizer.convert_ids_to_tokens(row["input_ids"])
    texts = ["".join(tokens[n].strip("Ġ▁#") for n in sorted(word)) for word in words]
    assert len(free) > len(words)
    assert [text for text in texts if text] == GROUPS[kind]
    seen = set()
    for epoch in range(40):
        labels = task.vary(row, setting, (0, epoch, 0))["labels"]
        chosen = {n for n, label in enumerate(labels) if label != IGNORED}
        assert 0 < len(chosen) <= max(round(0.4 * len(free)), 3)
        assert all(word <= chosen or not word & chosen for word in words)
        seen |= chosen
    assert seen == set(free), "every word is chosen in some epoch"


def test_dropped_spans_follow_their_sentinels():
    tokenizer = word_tokenizer(end="</s>")
    text = "the movie was very good a film is dull bad poor plot actor scene end fine great awful"
    task = parse_task("span-corruption(rate=0.3, span=2)")
    encoded = task.encode([Example(text)], Setting(tokenizer, 64), labelled=True)
    for epoch in range(20):
        batch = encoded.batch([0], epoch)
        inputs = words_of(tokenizer, batch["input_ids"][0].tolist())
        target = words_of(tokenizer, batch["labels"][0].tolist())
        assert inputs[-1] == "</s>"
        # Two spans of five tokens behind a sentinel each; a sentinel more ends the target.
        first, one, second, two, *ends = re.split(r" ?(<extra_id_\d>) ?", " ".join(target))[1:]
        assert [first, second, *ends] == [*SENTINELS[:3], "</s>"]
        assert len(f"{one} {two}".split()) == 5
        assert " ".join(inputs[:-1]).replace(first, one).replace(second, two) == text


@given(st.integers(2, 600), st.floats(0.01, 0.99), st.floats(1, 10), st.integers(1, 99))
def test_span_lengths(tokens, rate, span, most):
    kept, dropped = span_lengths(tokens, rate, span, most, default_rng(0))
    assert len(kept) == len(dropped) <= most
    assert min(*kept, *dropped) >= 1
    assert sum(kept) + sum(dropped) == tokens
    assert sum(dropped) == min(max(round(tokens * rate), 1), tokens - 1)


MASK = 99
IDS = st.lists(st.integers(0, 50), min_size=1, max_size=200)
SEEDS = st.integers(0, 1000)
NONE = "denoising(permute=0, infill=0, {}={})"


@given(IDS, st.floats(0, 0.9), st.floats(0.5, 6), SEEDS)
def test_infilling_replaces_a_share_of_the_tokens(ids, rate, span, seed):
    noised = infilled(ids, MASK, rate, span, default_rng(seed))
    kept = [i for i in noised if i != MASK]
    assert len(kept) == len(ids) - round(len(ids) * rate)
    rest = iter(ids)
    assert all(i in rest for i in kept), "in their order"


def test_spans_are_anywhere():
    """Each token but those at the ends is in a span equally often."""
    counts = np.zeros(20)
    for seed in range(3000):
        noised = infilled(list(range(20)), MASK, 0.3, 3.0, default_rng(seed))
        counts[list(set(range(20)) - set(noised))] += 1
    assert counts[3:-3] / 3000 == pytest.approx(np.full(14, 0.33), abs=0.06)
    assert counts.min() / 3000 > 0.1, "fewer spans cover the ends"
    assert counts.mean() / 3000 == pytest.approx(0.3, abs=1e-9)


@given(IDS, st.data(), SEEDS, st.floats(0.1, 20))
def test_permutations_rotations_and_spans_keep_the_tokens(ids, data, seed, span):
    size = len(ids)
    ends = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    shuffled = permuted(ids, ends, default_rng(seed))
    assert Counter(shuffled) == Counter(ids)
    if not any(ends[:-1]):
        assert shuffled == ids
    assert rotated(ids, default_rng(seed)) in [ids[n:] + ids[:n] for n in range(size)]
    assert rotated([], default_rng(seed)) == []
    assert sum(span_draws(size, span, default_rng(seed))) == size


def encoded(spec, text="the movie was very good", setting=None, count=1):
    """Encode a text for training."""
    setting = setting or Setting(word_tokenizer("<s>", "</s>"), 64)
    return parse_task(spec).encode([Example(text)] * count, setting, labelled=True)


def noised(spec, text="the movie was very good", rows=1):
    """Return the noised ids without special tokens, and the original ones, of several rows."""
    data = encoded(spec, text, count=rows)
    for number, row in enumerate(data.rows):
        varied = data.task.vary(row, data.setting, (0, 0, number))
        yield varied["input_ids"][1:-1], varied["labels"][1:-1]


@pytest.mark.parametrize(
    "spec", ["denoising", "denoising(mask=0.2, delete=0.2, rotate=1)",
             NONE.format("rotate", 1), NONE.format("delete", 0.9)],
)  # fmt: skip
def test_the_target_is_the_original(spec):
    tokenizer, text = word_tokenizer("<s>", "</s>"), "the movie was very good " * 8
    expected = tokenizer(text)["input_ids"]
    batch = encoded(spec, text, count=4).batch(range(4), epoch=1)
    assert batch["labels"].tolist() == [expected] * 4
    for row, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"], strict=True):
        ids = row[: int(mask.sum())]
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_masking_and_deletion_change_a_share():
    tokenizer, text = word_tokenizer(), "the movie was very good " * 4
    for ids, original in noised(NONE.format("mask", 0.25), text, rows=20):
        same = [i == other for i, other in zip(ids, original, strict=True)]
        assert same == [i != tokenizer.mask_token_id for i in ids]
        assert same.count(False) == 5
    for ids, original in noised(NONE.format("delete", 0.25), text, rows=20):
        assert len(ids) == 15
        rest = iter(original)
        assert all(i in rest for i in ids)
    turned = [one != other for one, other in noised(NONE.format("rotate", 0.5), rows=400)]
    assert np.mean(turned) == pytest.approx(0.5 * 4 / 5, abs=0.08)


def test_sentences_end_at_full_stops():
    tokenizer = word_tokenizer("<s>", "</s>")
    tokenizer.add_tokens(["good."])
    setting = Setting(tokenizer, 64)
    data = encoded("denoising(infill=0)", "the movie was good. the plot was dull", setting, 40)
    orders = {tuple(row[1:-1]) for row in data.batch(range(40))["input_ids"].tolist()}
    texts = {tokenizer.decode(list(order)) for order in orders}
    one, other = "the movie was good.", "the plot was dull"
    assert texts == {f"{one} {other}", f"{other} {one}"}


def test_long_texts_are_cut_into_windows():
    data = encoded("denoising", "the movie was very good " * 30)
    assert [len(row["input_ids"]) for row in data.rows] == [62, 62, 26]
    assert max(len(row) for row in data.batch(range(3))["labels"]) == 64
    with pytest.raises(DataError, match="no tokens"):
        encoded("denoising", " ")


@pytest.mark.parametrize(
    ("task", "expected"),
    [("masked-lm", "no mask token"), ("denoising", r"no mask(.|\n)*span-corruption"),
     ("span-corruption", "sentinels")],
)  # fmt: skip
def test_a_tokenizer_without_what_the_task_needs(task, expected):
    tokenizer = word_tokenizer()
    vocabulary = {k: v for k, v in tokenizer.get_vocab().items() if k not in SENTINELS}
    tokenizer.mask_token, tokenizer.get_vocab = None, lambda: vocabulary
    with pytest.raises(ConfigError, match=expected):
        parse_task(task).encode([Example("a film")], Setting(tokenizer, 32), labelled=True)
