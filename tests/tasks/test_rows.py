"""What examples become: which positions are learned, and what is left out."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from fixtures import SENTINELS, sentences, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizerFast

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import TASKS, Setting, dump_task, parse_task
from adapterhub.tasks._base import IGNORED, pad
from adapterhub.tasks.causal_lm import Chat
from adapterhub.tasks.multiple_choice import Choices
from adapterhub.tasks.question_answering import Question
from adapterhub.tasks.span_corruption import span_lengths
from adapterhub.tasks.tagging import Sentence, entities
from adapterhub.training.prepare import make_ready


@pytest.fixture
def pieces(tmp_path) -> BertTokenizerFast:
    """A tokenizer that cuts words into pieces."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "york", "##shire", "new", "in", "##er"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))


def words_of(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens([i for i in ids if i != IGNORED])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_spec_is_its_own_normal_form(name):
    task = TASKS[name]()
    assert parse_task(name) == parse_task({name: {}}) == parse_task(dump_task(task)) == task
    assert parse_task(task) is task


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_the_tokenizers(backbones, side):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)
    texts = ["the movie was very good", "a film"]
    rows = [dict(tokenizer(text)) for text in texts]
    expected = tokenizer(texts, padding=True, return_tensors="pt")
    found = pad(rows, tokenizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_tag_is_on_the_first_piece_of_its_word(pieces):
    sentence = Sentence("in newer yorkshire", ("in", "newer", "yorkshire"), ("O", "B-x", "I-x"))
    task = parse_task("tagging")
    setting = Setting(pieces, 32, task.labels([sentence]))
    (row,) = task.encode([sentence], setting, labelled=True).rows
    assert words_of(pieces, row["input_ids"])[1:-1] == ["in", "new", "##er", "york", "##shire"]
    assert row["labels"] == [IGNORED, 0, 1, IGNORED, 2, IGNORED, IGNORED]
    assert task.labels([sentence]) == ("O", "B-x", "I-x")


def test_entities_are_spans_of_the_text():
    sentence = Sentence("New  York, new York", ("New", "York", ",", "new", "York"))
    found = entities(sentence, ["B-x", "I-x", "O", "B-x", "B-x"])
    assert [(e.kind, e.text, e.start, e.end) for e in found] == [
        ("x", "New  York", 0, 9),
        ("x", "new", 11, 14),
        ("x", "York", 15, 19),
    ]
    assert [e.kind for e in entities(sentence, ["I-x", "I-y", "O", "O", "I-y"])] == ["x", "y", "y"]


def test_a_long_context_is_read_in_windows_that_overlap(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    context = " ".join(["the movie was very dull a film is good"] * 5)
    answer = context.rindex("good")
    question = Question("a plot", context, (("good", answer),))
    task = parse_task("question-answering(stride=4)")
    encoded = task.encode([question], Setting(tokenizer, 24), labelled=True)
    assert len(encoded.rows) > 2
    assert set(encoded.owners) == {0}
    assert all(len(row["input_ids"]) <= 24 for row in encoded.rows)
    read = [o for row in encoded.rows for o in row["offsets"] if o]
    assert {i for a, b in read for i in range(a, b)} >= {
        i for i, c in enumerate(context) if c != " "
    }
    assert len(read) > len(set(read)), "windows overlap"
    spans = [(row["start_positions"], row["end_positions"]) for row in encoded.rows]
    assert spans[0] == (0, 0)
    start, end = spans[-1]
    assert words_of(tokenizer, encoded.rows[-1]["input_ids"][start : end + 1]) == ["good"]


def test_a_long_question_leaves_room_for_the_context(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    question = Question("very " * 50, "the movie was good", (("good", 14),))
    encoded = parse_task("question-answering").encode(
        [question], Setting(tokenizer, 24), labelled=True
    )
    assert any(row["start_positions"] for row in encoded.rows)


def test_the_best_span_over_all_windows_answers(backbones):
    """By logits that a stand-in model gives: the best span that lies in the context, not too long,
    or none."""
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))

    class Stub(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self, null: float) -> None:
            super().__init__()
            self.null = null

        def forward(self, input_ids, **_):
            word = tokenizer.convert_tokens_to_ids("good")
            start = (input_ids == word) * 3.0 + (input_ids == tokenizer.sep_token_id) * 9.0
            start[:, 0] = self.null
            return {"start_logits": start, "end_logits": start.clone()}

    question = Question("is good", "the movie was very dull a good film", None)
    for spec, null, expected in (
        ("question-answering", 5.0, "good"),
        ("question-answering(unanswerable=true)", 5.0, ""),
        ("question-answering(unanswerable=true)", 2.0, "good"),
        ("question-answering(unanswerable=true, threshold=9.0)", 5.0, "good"),
    ):
        task = parse_task(spec)
        encoded = task.encode([question], Setting(tokenizer, 32), labelled=False)
        (answer,) = task.predict(Stub(null), encoded, 4)
        assert answer.text == expected
        assert question.context[answer.start : answer.end] == expected


def test_only_the_response_is_learned():
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
def test_what_the_assistant_says_is_learned(data):
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


def test_raw_text_is_cut_and_never_lost():
    tokenizer = word_tokenizer(start="<s>")
    text = " ".join(["the movie was very good"] * 4)
    encoded = parse_task("causal-lm(data=text)").encode(
        [Example(text)], Setting(tokenizer, 8), labelled=True
    )
    ids = [i for row in encoded.rows for i in row["input_ids"]]
    assert words_of(tokenizer, ids) == ["<s>", *text.split(), "</s>"]
    assert all(row["labels"] == row["input_ids"] for row in encoded.rows)


@pytest.mark.parametrize("method", ["lora", "prefix", "pfeiffer"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_packed_texts_do_not_see_each_other(architecture, method):
    """Each packed text has the logits, and all have the loss, that it has in a row of its own."""
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


def test_targets_are_the_decoders_and_padding_is_not_learned():
    tokenizer = word_tokenizer(end="</s>")
    task = parse_task("seq2seq(template='a plot : {text}', max_target=3)")
    examples = [Example("good", None, "the movie was very good"), Example("bad", None, "bad")]
    batch = task.encode(examples, Setting(tokenizer, 16), labelled=True).batch([0, 1])
    assert words_of(tokenizer, batch["input_ids"][0].tolist()) == ["a", "plot", ":", "good", "</s>"]
    assert words_of(tokenizer, batch["labels"][0].tolist()) == ["the", "movie", "</s>"]
    assert batch["labels"][1].tolist()[2:] == [IGNORED]


def test_choices_are_pairs_of_one_row(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    examples = [Choices("the movie", ("good", "very bad"), 1), Choices("a", ("dull", "fine"), 0)]
    encoded = parse_task("multiple-choice").encode(examples, Setting(tokenizer, 16), labelled=True)
    batch = encoded.batch([0, 1])
    assert batch["input_ids"].shape == (2, 2, 7)
    assert batch["labels"].tolist() == [1, 0]
    assert tokenizer.decode(batch["input_ids"][0, 1]) == "[CLS] the movie [SEP] very bad [SEP]"


def masked(tokenizer, epoch, seed=0, count=400):
    text = " ".join(["the movie was very good"] * 4)
    encoded = parse_task("masked-lm").encode(
        [Example(text)] * count, Setting(tokenizer, 64, seed=seed), labelled=True
    )
    return encoded, encoded.batch(range(count), epoch)


def test_masking_hides_as_bert_does(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    encoded, batch = masked(tokenizer, epoch=1)
    original = torch.tensor([row["input_ids"] for row in encoded.rows])
    chosen = batch["labels"] != IGNORED
    assert chosen.sum(1).tolist() == [3] * 400, "15 % of 20"
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not chosen[:, [0, -1]].any(), "special tokens stay"
    hidden = batch["input_ids"][chosen]
    assert (hidden == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.04)
    assert (hidden == original[chosen]).float().mean().item() == pytest.approx(0.105, abs=0.03)


def test_what_is_hidden_depends_on_seed_and_epoch_alone(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    first, again, other, seeded = (
        masked(tokenizer, epoch, seed, 8)[1]["input_ids"]
        for epoch, seed in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, seeded)


def test_spans_are_dropped_behind_their_sentinels():
    tokenizer = word_tokenizer(end="</s>")
    text = "the movie was very good a film is dull bad poor plot actor scene end fine great awful"
    task = parse_task("span-corruption(rate=0.3, span=2)")
    encoded = task.encode([Example(text)], Setting(tokenizer, 64), labelled=True)
    for epoch in range(20):
        batch = encoded.batch([0], epoch)
        inputs, target = (
            words_of(tokenizer, batch[key][0].tolist()) for key in ("input_ids", "labels")
        )
        assert inputs[-1] == target[-1] == "</s>"
        assert target[-2] in SENTINELS, "a sentinel more ends the target"
        parts: dict[str, list[str]] = {}
        for word in target[:-2]:
            if word in SENTINELS:
                parts[word] = []
            else:
                parts[list(parts)[-1]].append(word)
        assert list(parts) == SENTINELS[: len(parts)] == [w for w in inputs if w in SENTINELS]
        whole = [w for word in inputs[:-1] for w in parts.get(word, [word])]
        assert " ".join(whole) == text
        assert sum(map(len, parts.values())) == 5
        assert len(parts) == 2


@given(st.integers(2, 600), st.floats(0.01, 0.99), st.floats(1, 10), st.integers(1, 99))
def test_span_lengths(tokens, rate, span, most):
    kept, dropped = span_lengths(tokens, rate, span, most, np.random.default_rng(0))
    assert len(kept) == len(dropped) <= most
    assert min(*kept, *dropped) >= 1
    assert sum(kept) + sum(dropped) == tokens
    assert sum(dropped) == min(max(round(tokens * rate), 1), tokens - 1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("masked-lm", "no mask token"),
        ("span-corruption", "sentinels"),
        ("causal-lm(data=chat)", "chat template"),
    ],
)
def test_a_tokenizer_that_lacks_what_a_task_needs(spec, expected):
    bare = word_tokenizer()
    bare.mask_token = None
    bare.chat_template = None
    vocabulary = {k: v for k, v in bare.get_vocab().items() if k not in SENTINELS}
    bare.get_vocab = lambda: vocabulary
    chat = Chat((("user", "a film"), ("assistant", "good")))
    example = chat if "chat" in spec else Example("the movie was good")
    with pytest.raises(ConfigError, match=expected):
        parse_task(spec).encode([example], Setting(bare, 32), labelled=True)


PROMPT = "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'}, model=%s)"


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_a_prompt_asks_for_the_label_word(backbones, kind):
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
def test_label_words_are_different_tokens(backbones, word):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task = parse_task({"prompted": {"words": {"pos": "good", "neg": word}}})
    with pytest.raises(ConfigError, match="one token"):
        task.encode([Example("a film", None, "pos")], Setting(tokenizer, 32), labelled=True)


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_worked_examples_stand_before_the_prompt(backbones, kind):
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


def test_worked_examples_that_cannot_be(backbones):
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
    with pytest.raises(ConfigError, match="takes no worked examples"):
        parse_task("classification").with_shots(train, 1, seed=0)
