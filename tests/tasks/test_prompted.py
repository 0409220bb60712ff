"""prompted: templates, label words and few-shot examples."""

from __future__ import annotations

import pytest
import torch
import yaml
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, dump_task, parse_task
from adapterhub.tasks.prompted import Prompted
from tests.kit.data import words_of

PROMPT = "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'}, model=%s)"


def tokenizer_of(backbones, kind):
    return AutoTokenizer.from_pretrained(backbones("llama" if kind == "causal-lm" else "bert"))


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_the_label_word_is_predicted_at_the_mask(backbones, kind):
    tokenizer = tokenizer_of(backbones, kind)
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


@pytest.mark.parametrize("word", ["good", "unheard", "bad unheard"])
def test_label_words_must_be_told_apart(backbones, word):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task = parse_task({"prompted": {"words": {"pos": "good", "neg": word}}})
    with pytest.raises(ConfigError, match="a different word"):
        task.encode([Example("a film", None, "pos")], Setting(tokenizer, 32), labelled=True)


WORDS = {"0": "very bad", "1": "good", "2": "a dull film"}
TEXTS = ("the movie was", "a plot", "the actor is very very")


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_a_word_of_several_tokens_has_their_likelihood(backbones, kind):
    """By the log softmax of transformers' own model; of a masked one, at a mask for each token."""
    causal = kind == "causal-lm"
    model, tokenizer = ah.load_backbone(str(backbones("llama" if causal else "bert")), task=kind)
    template, mask = "{text} is {mask}", tokenizer.mask_token
    options = {"template": template, "words": WORDS, "model": kind}
    setting, examples = Setting(tokenizer, 32), [Example(text) for text in TEXTS]
    expected = []
    for text in TEXTS:
        for word in WORDS.values():
            answer = tokenizer(word, add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{text} is {word}")["input_ids"]
            ids = ids if causal else tokenizer(f"{text} is {f' {mask}' * len(answer)}")["input_ids"]
            first = len(ids) - len(answer) - 1 if causal else ids.index(tokenizer.mask_token_id)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            each = [logits[first + i, token] for i, token in enumerate(answer)]
            expected.append([sum(each), sum(each) / len(each)])
    sums = torch.tensor(expected).view(3, 3, 2).softmax(1)
    for normalized in (False, True):
        task = parse_task({"prompted": {**options, "length_normalized": normalized}})
        data = task.encode(examples, setting, labelled=False)
        scores = [[*p.scores.values()] for p in task.predict(model, data, 2)]
        torch.testing.assert_close(torch.tensor(scores), sums[..., int(normalized)])
    (row,) = task.encode([Example(TEXTS[0], None, "2")], setting, labelled=True).rows
    assert words_of(tokenizer, row["labels"]) == ["a", "dull", "film"]
    masks = row["input_ids"].count(tokenizer.mask_token_id)
    assert masks == (0 if causal else 3)


def test_labels_may_be_numbers():
    """In YAML, Python and on the command line; labels without a word are named."""
    words = {"0": "bad", "1": "very good"}
    for spec in (
        "prompted(words={0: bad, 1: very good})",
        {"prompted": {"words": {0: "bad", 1: "very good"}}},
        Prompted(words={0: "bad", 1: "very good"}),
        yaml.safe_load("prompted: {words: {0: bad, 1: very good}}"),
    ):
        assert parse_task(spec).words == words
    with pytest.raises(DataError) as error:
        parse_task(spec).check((), [Example("a", None, label) for label in ("1", "2", "2")])
    assert error.value.offenders == ("'2': 2 times",)
    assert "words={2: WORD, ...}" in str(error.value)


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_few_shot_examples_precede_the_prompt(backbones, kind):
    tokenizer = tokenizer_of(backbones, kind)
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
    # An example is not in front of itself.
    two = [Example("movie 0", None, "neg"), Example("movie 1", None, "pos")]
    task = parse_task(PROMPT % kind).with_shots(two, 1, seed=0)
    rows = task.encode([*two, Example("a film")], Setting(tokenizer, 40), labelled=False).rows
    found = [" ".join(words_of(tokenizer, row["input_ids"])) for row in rows]
    assert [text.count("movie") for text in found] == [2, 2, 2]


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
