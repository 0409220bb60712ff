"""causal-lm: which tokens are labels, packing, chats, generation."""

from __future__ import annotations

import json

import pytest
import torch

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.causal_lm import Chat
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.training.loading import make_ready
from tests.kit import tiny_models
from tests.kit.data import sentences, word_tokenizer, words_of


def test_only_the_response_is_labelled():
    tokenizer = word_tokenizer(start="<s>")
    task = parse_task({"causal-lm": {"template": "user : {text} :"}})
    example = Example("the movie was", None, "very good")
    (row,) = task.encode([example], Setting(tokenizer, 32), labelled=True).rows
    assert words_of(tokenizer, row["input_ids"]) == (
        ["<s>", "user", ":", "the", "movie", "was", ":", "very", "good", "</s>"]
    )
    assert words_of(tokenizer, row["labels"]) == ["very", "good", "</s>"]
    (prompt,) = task.encode([example], Setting(tokenizer, 32), labelled=False).rows
    assert prompt["input_ids"] == row["input_ids"][:7]
    (cut,) = task.encode([example], Setting(tokenizer, 5), labelled=True).rows
    assert words_of(tokenizer, cut["input_ids"]) == ["was", ":", "very", "good", "</s>"]
    (room,) = task.encode([example], Setting(tokenizer, 32, positions=68), labelled=False).rows
    assert words_of(tokenizer, room["input_ids"]) == ["the", "movie", "was", ":"]


@pytest.mark.parametrize("data", ["chat", "pairs"])
def test_the_messages_of_the_assistant_are_labels(data):
    tokenizer = word_tokenizer()
    messages = [("user", "a film"), ("assistant", "good"), ("user", "a plot"), ("assistant", "bad")]
    if data == "pairs":
        example, task = Example("a plot", None, "bad"), parse_task("causal-lm(template=null)")
    else:
        example, task = Chat(tuple(messages)), parse_task("causal-lm(data=chat)")
    (row,) = task.encode([example], Setting(tokenizer, 64), labelled=True).rows
    said = ["good", "</s>"] * (data == "chat") + ["bad", "</s>"]
    assert words_of(tokenizer, row["labels"]) == said
    (prompt,) = task.encode([example], Setting(tokenizer, 64), labelled=False).rows
    assert words_of(tokenizer, prompt["input_ids"])[-2:] == ["assistant", ":"]
    assert prompt["input_ids"] == row["input_ids"][: len(prompt["input_ids"])]


TURNS = ("user", "assistant")


def test_an_empty_message_is_refused_unless_it_is_the_systems(tmp_path):
    rows = [{"role": r, "content": "" if r == "system" else "a"} for r in ("system", *TURNS)]
    for role, line in (("system", None), *((role, 2) for role in TURNS)):
        empty = [row | ({"content": " "} if row["role"] == role else {}) for row in rows]
        file = tmp_path / f"{role}.jsonl"
        file.write_text("\n".join(json.dumps({"text": chat}) for chat in (rows, empty)))
        task = parse_task("causal-lm(data=chat)")
        first, _ = task.read(str(file), DataOptions(), "eval", labelled=False)
        assert first == Chat((("system", ""), ("user", "a"), ("assistant", "a")))
        if line is None:
            assert len(task.read(str(file), DataOptions(), "train")) == 2
            continue
        with pytest.raises(DataError, match=f"line {line}: '{role}' is empty"):
            task.read(str(file), DataOptions(), "train")


@pytest.mark.parametrize("start", ["<s>", ""])
def test_raw_text_is_split_and_never_truncated(start):
    """Where it is empty, there is nothing to learn."""
    tokenizer, task = word_tokenizer(start=start), parse_task("causal-lm(data=text)")
    text = " ".join(["the movie was very good"] * 4)
    texts = [Example(each) for each in (text, "", "  ")]
    encoded = task.encode(texts, Setting(tokenizer, 8), labelled=True)
    assert set(encoded.owners) == {0}
    ids = [i for row in encoded.rows for i in row["input_ids"]]
    assert words_of(tokenizer, ids) == [*start.split(), *text.split(), "</s>"]
    assert all(row["labels"] == row["input_ids"] for row in encoded.rows)


@pytest.mark.parametrize("method", ["lora", "prefix", "pfeiffer"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_packed_texts_do_not_attend_to_each_other(architecture, method):
    """The logits of each packed text, and the loss, equal those of one row per text."""
    tokenizer = word_tokenizer()
    examples = [Example(text, None, "good") for text, _ in sentences(6)]
    apart, packed = (
        parse_task({"causal-lm": {"pack": pack}}).encode(
            examples, Setting(tokenizer, 24), labelled=True
        )
        for pack in (False, True)
    )
    assert len(packed.rows) < len(apart.rows) == 6
    model = tiny_models.language_model(architecture)
    tiny_models.scramble(ah.attach(model, method))
    make_ready(model)
    with torch.no_grad():
        alone = [model(**apart.batch([i])) for i in range(6)]
        batch = packed.batch(range(len(packed.rows)))
        together = model(**batch)
    logits = torch.cat([out.logits[0] for out in alone])
    real = [row[: len(p["input_ids"])] for row, p in zip(together.logits, packed.rows, strict=True)]
    torch.testing.assert_close(torch.cat(real), logits, atol=1e-5, rtol=1e-4)
    tokens = [sum(i != IGNORED for i in row["labels"]) for row in apart.rows]
    mean = sum(o.loss * n for o, n in zip(alone, tokens, strict=True)) / sum(tokens)
    torch.testing.assert_close(together.loss, mean, atol=1e-5, rtol=1e-4)


def test_a_tokenizer_without_what_the_task_needs():
    tokenizer, chat = word_tokenizer(), Chat((("user", "a film"), ("assistant", "good")))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        parse_task("causal-lm(data=chat)").encode([chat], Setting(tokenizer, 32), labelled=True)


def test_the_answer_is_extracted_before_comparing():
    task = parse_task("causal-lm(answer='#### (.*)')")
    examples = [Example("how many", None, "so #### 3"), Example("how many", None, "so #### 4")]
    predictions = [Generated("1 + 2 #### 3"), Generated("four")]
    assert task.metrics(examples, predictions) == {"exact_match": 0.5}
