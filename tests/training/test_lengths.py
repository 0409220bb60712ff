"""The maximum length of a run: chosen from its data, and told."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.tasks import Setting, parse_task
from adapterhub.training.loading import default_length, fit_rows
from adapterhub.training.run_data import RunData
from tests.kit.data import word_tokenizer


@pytest.mark.parametrize(
    ("longest", "most", "length"),
    [(5, 512, 128), (129, 512, 136), (136, 512, 136), (600, 512, 512), (5, 64, 64)],
)
def test_the_default_follows_the_longest_row(longest, most, length):
    assert default_length(longest, most) == length


def fitted(words, chosen=None, reads=1000, trained=None, task="classification"):
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 1 << 30
    texts = [" ".join(["good"] * count) for count in words]
    examples = [Example(text, None, "ab"[i % 2]) for i, text in enumerate(texts)]
    data = RunData(parse_task(task), ("a", "b"), examples, examples[:1], DataOptions())
    setting = Setting(tokenizer, reads, ("a", "b"), positions=reads)
    return fit_rows(data, setting, chosen, trained)


@pytest.mark.parametrize(("reads", "again"), [(1000, 0), (150, 2)])
def test_a_text_is_tokenized_once_unless_it_is_cut(reads, again, monkeypatch):
    """Four texts, of training and evaluation; two of them are longer than 150 tokens."""
    tokenized = []
    call = PreTrainedTokenizerBase.__call__

    def counting(self, texts, *rest, **others):
        tokenized.extend(texts)
        return call(self, texts, *rest, **others)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counting)
    fitted([200, 3, 5], reads=reads)
    assert len(tokenized) == 4 + again


def test_the_length_is_chosen_and_told():
    rows = fitted([200, 3])
    assert (rows.max_length, rows.train.lengths) == (200, [200, 3])
    assert rows.notes == ("train.max_length is 200: no text is cut, the longest has 200 tokens",)
    rows = fitted([200, 3], reads=150)
    assert rows.max_length == 150
    assert rows.notes[:2] == (
        "train.max_length is 150: the most that the backbone reads; the longest text has 200 "
        "tokens",
        "1 of 2 training texts are longer than 150 tokens and lose 25% of their tokens "
        "(longest 200); the backbone reads no more",
    )
    rows = fitted([900, 3])
    assert rows.max_length == 512
    assert "the most that is chosen by default" in rows.notes[0]
    assert "train.max_length=904 keeps all" in rows.notes[1]
    assert len(rows.notes) == 3, "the evaluation data is told too"
    rows = fitted([200, 3], chosen=50)
    assert (rows.max_length, rows.train.lengths, rows.lost[0].cut) == (50, [50, 3], 1)
    assert rows.notes[0].startswith("1 of 2 training texts are longer than 50 tokens and lose 75%")
    assert fitted([3], chosen=50).notes == ()
    assert "trained on at most 256 tokens" in fitted([300], trained=256).notes[-1]
    assert len(fitted([200], trained=256).notes) == 1
    # Packed rows are as long as is allowed, and texts that are split lose nothing.
    assert fitted([3, 4], task="causal-lm(data=text, pack=true)").max_length == 1000
    (note,) = fitted([900, 3], task="masked-lm").notes
    assert note.endswith("by default; the longest text has 900 tokens, and is split")


def test_there_may_be_no_evaluation_data():
    tokenizer = word_tokenizer()
    examples = [Example("good", None, "a"), Example("bad", None, "b")]
    for task in ("classification", "masked-lm"):
        data = RunData(parse_task(task), ("a", "b"), examples, [], DataOptions())
        rows = fit_rows(data, Setting(tokenizer, 64, ("a", "b"), positions=64), None)
        assert (len(rows.train.rows), rows.evaluation.rows) == (2, [])
        assert len(rows.notes) == 1


@pytest.mark.parametrize("chosen", [64, 128, 129, 1000])
def test_a_chosen_length_that_is_lowered_is_told(chosen):
    lowered = [n for n in fitted([200, 3], chosen, reads=128).notes if "is lowered to 128" in n]
    assert bool(lowered) is (chosen > 128)
