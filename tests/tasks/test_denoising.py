"""denoising: each of the five noises of BART, and that the target is the original."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.denoising import infilled, permuted, rotated, span_draws
from tests.kit.data import word_tokenizer

MASK = 99
IDS = st.lists(st.integers(0, 50), min_size=1, max_size=200)
SEEDS = st.integers(0, 1000)
NONE = "denoising(permute=0, infill=0, {}={})"


def drawn(seed):
    """Return a source of randomness."""
    return np.random.default_rng(seed)


@given(IDS, st.floats(0, 0.9), st.floats(0.5, 6), SEEDS)
def test_infilling_replaces_a_share_of_the_tokens(ids, rate, span, seed):
    noised = infilled(ids, MASK, rate, span, drawn(seed))
    kept = [i for i in noised if i != MASK]
    assert len(kept) == len(ids) - round(len(ids) * rate)
    rest = iter(ids)
    assert all(i in rest for i in kept), "in their order"


def test_spans_have_poisson_lengths():
    lengths = [n for seed in range(50) for n in span_draws(1000, 3.0, drawn(seed))[:-1]]
    assert np.mean(lengths) == pytest.approx(3.0, abs=0.05)
    assert np.var(lengths) == pytest.approx(3.0, abs=0.15)
    assert lengths.count(0) / len(lengths) == pytest.approx(np.exp(-3), abs=0.01)


def test_spans_are_anywhere():
    """Each token but those at the ends is in a span equally often."""
    counts = np.zeros(20)
    for seed in range(3000):
        noised = infilled(list(range(20)), MASK, 0.3, 3.0, drawn(seed))
        counts[list(set(range(20)) - set(noised))] += 1
    assert counts[3:-3] / 3000 == pytest.approx(np.full(14, 0.33), abs=0.06)
    assert counts.min() / 3000 > 0.1, "fewer spans cover the ends"
    assert counts.mean() / 3000 == pytest.approx(0.3, abs=1e-9)


def test_whole_sentences_move():
    ids, ends = [1, 2, 0, 3, 0, 4, 5, 6], [i == 0 for i in [1, 2, 0, 3, 0, 4, 5, 6]]
    orders = {tuple(permuted(ids, ends, drawn(seed))) for seed in range(100)}
    a, b, c = (1, 2, 0), (3, 0), (4, 5, 6)
    assert orders == {a + b + c, a + c + b, b + a + c, b + c + a, c + a + b, c + b + a}


@given(IDS, st.data(), SEEDS, st.floats(0.1, 20))
def test_permutations_rotations_and_spans_keep_the_tokens(ids, data, seed, span):
    size = len(ids)
    ends = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    shuffled = permuted(ids, ends, drawn(seed))
    assert Counter(shuffled) == Counter(ids)
    if not any(ends[:-1]):
        assert shuffled == ids
    assert rotated(ids, drawn(seed)) in [ids[n:] + ids[:n] for n in range(size)]
    assert rotated([], drawn(seed)) == []
    assert sum(span_draws(size, span, drawn(seed))) == size


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
    for labels in batch["labels"].tolist():
        assert labels == expected
    for row, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"], strict=True):
        ids = row[: int(mask.sum())]
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_noise_depends_only_on_the_seed_the_epoch_and_the_row():
    data = encoded("denoising", "the movie was very good " * 8, count=2)
    first, again, later = (data.batch([0, 1], epoch)["input_ids"] for epoch in (0, 0, 1))
    assert first.equal(again)
    assert first.shape != later.shape or not first.equal(later)
    assert first[0].tolist() != first[1].tolist()


def test_masking_and_deletion_change_a_share():
    tokenizer, text = word_tokenizer(), "the movie was very good " * 4
    for ids, original in noised(NONE.format("mask", 0.25), text, rows=20):
        masked = [n for n, i in enumerate(ids) if i == tokenizer.mask_token_id]
        assert len(masked) == 5
        assert [i for n, i in enumerate(ids) if n not in masked] == [
            i for n, i in enumerate(original) if n not in masked
        ]
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
    assert texts == {
        "the movie was good. the plot was dull",
        "the plot was dull the movie was good.",
    }


def test_long_texts_are_cut_into_windows():
    data = encoded("denoising", "the movie was very good " * 30)
    assert [len(row["input_ids"]) for row in data.rows] == [62, 62, 26]
    assert max(len(row) for row in data.batch(range(3))["labels"]) == 64
    with pytest.raises(DataError, match="no tokens"):
        encoded("denoising", " ")
    tokenizer = word_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="no mask") as error:
        encoded("denoising", setting=Setting(tokenizer, 32))
    assert "span-corruption" in error.value.hint
