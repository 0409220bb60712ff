"""Rows under a limit, from one encoding without a limit; what truncation removes; rows as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.status import Display, showing
from adapterhub.tasks import TASKS, Setting, parse_task
from adapterhub.tasks.common.base import encode_whole, longest_row, lost_tokens, truncate
from adapterhub.tasks.common.preview import (
    removed_text,
    token_texts,
)
from adapterhub.tasks.multiple_choice import Choices
from adapterhub.tasks.question_answering import Question
from adapterhub.tasks.tagging import Sentence
from tests.kit.data import word_tokenizer
from tests.kit.task_cases import CASES

SPECS = [case.task for case in CASES.values()] + [
    "causal-lm(data=text)",
    "causal-lm(data=text, pack=true)",
    "seq2seq(metric=exact, max_target=2)",
    "question-answering(unanswerable=true, stride=2)",
]


def test_every_task_is_covered():
    covered = {parse_task(spec).name for spec in SPECS}
    assert covered == TASKS.keys() - {"text-to-image"}, "which truncates nothing"


@pytest.fixture
def case_of(backbones, tmp_path):
    """Return a function that gives the task of a spec, its examples, and a setting."""

    def case(spec):
        task = parse_task(spec)
        case = CASES[task.name]
        tokenizer = AutoTokenizer.from_pretrained(backbones(case.backbone))
        examples = task.read(str(case.data(tmp_path)), DataOptions(), "train")
        return task, examples, Setting(tokenizer, 64, task.labels(examples), positions=64)

    return case


class _Counted(Display):
    """Keeps how many items are done."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def update(self, work: int, done: int) -> None:
        self.done.append(done)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not parse_task(spec).decodes])
def test_truncated_rows_are_those_of_encode(spec, case_of, monkeypatch):
    """Encoding is counted, which changes no row."""
    task, examples, whole = case_of(spec)
    all_rows = encode_whole(task, examples, whole)
    monkeypatch.setattr("adapterhub.tasks.common.base.CHUNK", 5)
    display = _Counted()
    with showing(display):
        counted = encode_whole(task, examples, whole)
    assert (counted.rows, counted.owners) == (all_rows.rows, all_rows.owners)
    assert counted.examples == all_rows.examples
    assert display.done[-1] == len(examples)
    assert len(display.done) == -(-len(examples) // 5)
    for limit in (7, 9, 12, 64):
        setting = replace(whole, max_length=limit)
        expected = task.encode(examples, setting, labelled=True)
        for encoded in (truncate(each, task, setting) for each in (all_rows, counted)):
            assert (encoded.rows, encoded.owners) == (expected.rows, expected.owners)
            assert (encoded.task, encoded.setting) == (task, setting)
    assert whole.tokenizer.model_max_length != 1 << 30


def test_a_chunk_without_tokens_is_no_error_if_others_have_some(backbones, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(backbones(CASES["masked-lm"].backbone))
    task, setting = parse_task("masked-lm"), Setting(tokenizer, 64, ())
    monkeypatch.setattr("adapterhub.tasks.common.base.CHUNK", 2)
    with pytest.raises(AdapterhubError, match="the texts contain no tokens"):
        encode_whole(task, [Example("")] * 5, setting)
    examples = [Example("")] * 4 + [Example("the movie was good")]
    assert encode_whole(task, examples, setting).owners == (4,)


TEXT = "the movie was very very very very good"
SPAN = (("good", TEXT.index("good")),)
CUT = [
    ("classification", Example(TEXT, None, "pos"), Example("good", None, "neg"), 1),
    ("classification", Example("good", TEXT, "pos"), Example("good", "bad", "neg"), 1),
    ("tagging", Sentence(TEXT, tuple(TEXT.split()), ("pos",) * 8), Sentence("a", ("a",), ("pos",)),
     1),
    ("multiple-choice", Choices(TEXT, ("good", "bad"), 0), Choices("a", ("good", "bad"), 0), 1),
    ("question-answering", Question("a", TEXT, SPAN), Question("a", "good", (("good", 0),)), 0),
    ("masked-lm", Example(TEXT), Example("good"), 0),
    ("seq2seq", Example(TEXT, None, "bad"), Example("good", None, "bad"), 1),
    ("causal-lm(template='{text}')", Example(TEXT, None, "bad"), Example("a", None, "bad"), 1),
    ("causal-lm(data=text)", Example(f"{TEXT} bad"), Example("good"), 0),
    ("causal-lm(template='{text}', pack=true)", Example(TEXT, None, "bad"),
     Example("a", None, "bad"), 1),
    ("prompted(words={neg: bad, pos: good})", Example(TEXT, None, "pos"),
     Example("good", None, "neg"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "long", "short", "count"), CUT)
def test_examples_that_lose_tokens_are_counted(spec, long, short, count, backbone):
    encoder = spec.partition("(")[0] not in ("seq2seq", "causal-lm")
    tokenizer = AutoTokenizer.from_pretrained(backbone) if encoder else word_tokenizer(end="</s>")
    if spec.startswith("prompted"):
        spec = "prompted(template='{text} {mask}', words={'neg': 'bad', 'pos': 'good'})"
    task, setting = parse_task(spec), Setting(tokenizer, 8, ("neg", "pos"))
    whole = encode_whole(task, [short, long, short], setting)
    encoded = truncate(whole, task, setting)
    (lost, *_) = lost_tokens(whole, encoded)
    assert (lost.cut, lost.examples) == (count, 3)
    assert bool(lost.lost) == bool(count)
    assert longest_row(whole) > 8


def test_the_numbers_of_one_text(backbone):
    """Those of its target are apart."""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    task, setting = parse_task("classification"), Setting(tokenizer, 5, ("neg", "pos"))
    whole = encode_whole(task, [Example(TEXT, None, "pos")], setting)
    (lost,) = lost_tokens(whole, truncate(whole, task, setting))
    assert (lost.cut, lost.tokens, lost.lost, lost.longest, lost.limit) == (1, 10, 5, 10, 5)
    task = parse_task("seq2seq(max_target=3)")
    setting = Setting(word_tokenizer(end="</s>"), 64)
    whole = encode_whole(task, [Example("a", None, TEXT), Example("a", None, "bad")], setting)
    encoded = truncate(whole, task, setting)
    texts, targets = lost_tokens(whole, encoded)
    assert (texts.cut, targets.cut, targets.longest, targets.lost) == (0, 1, 9, 6)
    assert [len(row["labels"]) for row in encoded.rows] == [3, 2]


def test_bytes_are_words_and_characters():
    inner = Tokenizer(models.BPE({"Ġgood": 0, "Ã": 1, "©": 2, "Ã©": 3, "Ċ": 4, "a": 5}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert token_texts([0, 3, 4, 5, 1], tokenizer) == ["▁good", "é", "\\n", "a", "Ã"]


@pytest.mark.parametrize(
    ("kept", "gone"),
    [("the movie", "was good"), ("was good", "the movie"), ("the good", "movie was"),
     ("movie was", "the ... good")],
)  # fmt: skip
def test_removed_tokens_are_found_anywhere(kept, gone):
    tokenizer = word_tokenizer()
    whole = tokenizer("the movie was good")["input_ids"]
    assert removed_text(whole, tokenizer(kept)["input_ids"], tokenizer) == gone
