"""prompted: templates, label words and few-shot examples."""

from __future__ import annotations

import pytest
from task_rows import words_of
from transformers import AutoTokenizer

from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, dump_task, parse_task

PROMPT = "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'}, model=%s)"


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_the_label_word_is_predicted_at_the_mask(backbones, kind):
    tokenizer = AutoTokenizer.from_pretrained(
        backbones({"masked-lm": "bert", "causal-lm": "llama"}[kind])
    )
    task = parse_task(PROMPT % kind)
    example = Example("the movie was very dull " * 9, None, "neg")
    (row,) = task.encode([example], Setting(tokenizer, 12), labelled=True).rows
    words = words_of(tokenizer, row["input_ids"])
    assert len(words) <= 12, "the text is cut, not the prompt"
    asked = ["is", "[MASK]", "[SEP]"] if kind == "masked-lm" else ["is", "bad"]
    assert words[-len(asked) :] == asked
    assert words_of(tokenizer, row["labels"]) == ["bad"]
    (row,) = task.encode([example], Setting(tokenizer, 12), labelled=False).rows
    assert words_of(tokenizer, row["input_ids"][row["position"] :])[0] == (
        "[MASK]" if kind == "masked-lm" else "is"
    )


@pytest.mark.parametrize("word", ["bad good", "good", "unheard"])
def test_label_words_must_be_distinct_tokens(backbones, word):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task = parse_task({"prompted": {"words": {"pos": "good", "neg": word}}})
    with pytest.raises(ConfigError, match="one token"):
        task.encode([Example("a film", None, "pos")], Setting(tokenizer, 32), labelled=True)


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_few_shot_examples_precede_the_prompt(backbones, kind):
    tokenizer = AutoTokenizer.from_pretrained(
        backbones({"masked-lm": "bert", "causal-lm": "llama"}[kind])
    )
    train = [Example(f"movie {i}", None, label) for i in range(6) for label in ("neg", "pos")]
    task = parse_task(PROMPT % kind).with_shots(train, 2, seed=3)
    assert [e[-1] for e in task.examples] == ["pos", "neg"] * 2, "the labels take turns"
    assert len(set(task.examples)) == 4
    assert task == parse_task(PROMPT % kind).with_shots(train, 2, seed=3)
    assert task != parse_task(PROMPT % kind).with_shots(train, 2, seed=4)
    assert parse_task(dump_task(task)) == task, "they are a part of the task's options"
    example = Example("the movie was very dull " * 9, None, "neg")
    (row,) = task.encode([example], Setting(tokenizer, 12), labelled=False).rows
    (bare,) = (
        parse_task(PROMPT % kind).encode([example], Setting(tokenizer, 12), labelled=False).rows
    )
    words, asked = words_of(tokenizer, row["input_ids"]), words_of(tokenizer, bare["input_ids"])
    start = [w for w in asked if w in ("[CLS]", "<s>")]
    tail = asked[len(start) :]
    assert words[-len(tail) :] == tail, "they do not take the room of the text"
    worked = words[len(start) : -len(tail)]
    assert [w for w in worked if w in ("good", "bad")] == ["good", "bad"] * 2
    assert row["position"] - bare["position"] == len(worked)


def test_few_shot_examples_that_do_not_fit(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task = parse_task(PROMPT % "masked-lm")
    train = [Example("dull movie", None, "neg")] * 9 + [Example("movie", None, "pos")]
    with pytest.raises(DataError, match="too few") as error:
        task.with_shots(train, 2, seed=0)
    assert error.value.offenders == ("pos: 1",)
    long = task.with_shots(train[:9] + [Example("movie", None, "pos")] * 9, 9, seed=0)
    setting = Setting(tokenizer, 12, positions=40)
    with pytest.raises(ConfigError, match="leave no room"):
        long.encode([Example("a film", None, "pos")], setting, labelled=False)
    with pytest.raises(ConfigError, match="do not fit the template"):
        parse_task({"prompted": {"examples": [["a film", "2"]]}})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("prompted(template='{text}')", "{mask} once"),
        ("prompted(template='{text} {mask}.', model=causal-lm)", "ends with {mask}"),
        ("prompted(words={'a': 'b'})", "fewer than two labels"),
    ],
)
def test_invalid_options(spec, expected):
    with pytest.raises(ConfigError) as error:
        parse_task(spec)
    assert expected in str(error.value)
