"""question-answering, multiple-choice and unified-qa: SQuAD's format, windows, spans, choices."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.multiple_choice import Choices
from adapterhub.tasks.question_answering import Question
from adapterhub.tasks.unified_qa import question_text
from tests.kit.data import words_of, write_json_lines


def test_squad_and_columns(tmp_path):
    answer = {"text": "good", "answer_start": 4}
    paragraph = {"context": "the good film", "qas": [
        {"id": "1", "question": "what", "answers": [answer, answer]},
        {"id": "2", "question": "who", "answers": [], "is_impossible": True},
    ]}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}, indent=1))
    task = parse_task("question-answering(unanswerable=true)")
    first, second = task.read(str(tmp_path / "a.json"), DataOptions(), "train")
    assert first == Question("what", "the good film", (("good", 4), ("good", 4)))
    assert second == Question("who", "the good film", ())
    answers = [{"text": ["good"] * n, "answer_start": [4] * n} for n in (2, 0)]
    rows = [{"question": "what", "context": "the good film", "answers": each} for each in answers]
    file = write_json_lines(tmp_path / "a.jsonl", rows)
    found = task.read(str(file), DataOptions(text="question", label="answers"), "train")
    assert [q.answers for q in found] == [first.answers, ()]


def test_a_long_context_is_split_into_overlapping_windows(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    context = " ".join(["the movie was very dull a film is good"] * 5)
    answer = context.rindex("good")
    question = Question("a plot", context, (("good", answer),))
    task = parse_task("question-answering(stride=4)")
    encoded = task.encode([question], Setting(tokenizer, 24), labelled=True)
    assert set(encoded.owners) == {0}
    assert max(encoded.lengths) <= 24
    read = [o for row in encoded.rows for o in row["offsets"] if o]
    assert " ".join(context[a:b] for a, b in sorted(set(read))) == context
    assert len(read) > len(set(read)), "windows overlap"
    first, *_, last = encoded.rows
    assert first["start_positions"] == first["end_positions"] == 0
    span = slice(last["start_positions"], last["end_positions"] + 1)
    assert words_of(tokenizer, last["input_ids"][span]) == ["good"]
    # A long question leaves room for the context.
    long = Question("very " * 50, "the movie was good", (("good", 14),))
    encoded = parse_task("question-answering").encode([long], Setting(tokenizer, 24), labelled=True)
    assert any(row["start_positions"] for row in encoded.rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_answers_follow_the_padding(backbones, side):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)
    contexts = ["the movie was very dull a good film", "a good film"]
    questions = [Question("is", each, (("good", each.index("good")),)) for each in contexts]
    task = parse_task("question-answering")
    batch = task.encode(questions, Setting(tokenizer, 32), labelled=True).batch([0, 1])
    for i in range(2):
        span = slice(batch["start_positions"][i], batch["end_positions"][i] + 1)
        assert words_of(tokenizer, batch["input_ids"][i, span].tolist()) == ["good"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_best_span_over_all_windows_answers(backbones, side):
    """By the logits of a stub: a span of the context that is not too long, or none."""
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"), padding_side=side)

    class Stub(torch.nn.Module):
        device, null = torch.device("cpu"), 0.0

        def forward(self, input_ids, **_):
            word = tokenizer.convert_tokens_to_ids("good")
            start = (input_ids == word) * 3.0 + (input_ids == tokenizer.sep_token_id) * 9.0
            start[input_ids == tokenizer.cls_token_id] = self.null
            return {"start_logits": start, "end_logits": start.clone()}

    stub, contexts = Stub(), ("the movie was very dull a good film", "a good film")
    questions = [Question("is good", context, None) for context in contexts]
    for spec, null, expected in (
        ("question-answering", 5.0, "good"),
        ("question-answering(unanswerable=true)", 5.0, ""),
        ("question-answering(unanswerable=true)", 2.0, "good"),
        ("question-answering(unanswerable=true, threshold=9.0)", 5.0, "good"),
    ):
        task = parse_task(spec)
        encoded = task.encode(questions, Setting(tokenizer, 32), labelled=False)
        stub.null = null
        answers = task.predict(stub, encoded, 4)
        for answer, context in zip(answers, contexts, strict=True):
            assert answer.text == expected
            assert context[answer.start : answer.end] == expected


def test_a_question_needs_a_fast_tokenizer_and_room_for_its_context(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    task, question = parse_task("question-answering"), Question("is", "a good film", ())
    with pytest.raises(ConfigError, match="no room for a context"):
        task.encode([question], Setting(tokenizer, 4), labelled=True)
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(ConfigError, match="a fast tokenizer"):
        task.encode([question], Setting(slow, 32), labelled=True)


# multiple-choice


@pytest.mark.parametrize("label", ["B", 1, "1", "y"])
def test_choices_in_a_list_and_in_columns(tmp_path, label):
    row = {"text": "a", "choices": ["x", "y"], "label": label}
    file, task = write_json_lines(tmp_path / "a.jsonl", [row]), parse_task("multiple-choice")
    expected = [Choices("a", ("x", "y"), 1)]
    assert task.read(str(file), DataOptions(), "train") == expected
    (tmp_path / "a.tsv").write_text(f"text\tone\tother\tlabel\na\tx\ty\t{label}\n")
    options = DataOptions(choices=("one", "other"))
    assert task.read(str(tmp_path / "a.tsv"), options, "train") == expected


def test_choices_are_pairs_of_one_row(backbones):
    """Of examples to predict on, one may have more than another."""
    model, tokenizer = ah.load_backbone(str(backbones("bert")), task="multiple-choice")
    task, setting = parse_task("multiple-choice"), Setting(tokenizer, 16)
    examples = [Choices("the movie", ("good", "very bad"), 1), Choices("a", ("dull", "fine"), 0)]
    batch = task.encode(examples, setting, labelled=True).batch([0, 1])
    assert batch["input_ids"].shape == (2, 2, 7)
    assert batch["labels"].tolist() == [1, 0]
    assert tokenizer.decode(batch["input_ids"][0, 1]) == "[CLS] the movie [SEP] very bad [SEP]"
    examples = [Choices("the movie", ("good", "bad")), Choices("a film", ("good", "bad", "dull"))]
    predictions = task.predict(model, task.encode(examples, setting, labelled=False), 8)
    for example, prediction in zip(examples, predictions, strict=True):
        assert len(prediction.scores) == len(example.choices)
        assert prediction.text == example.choices[prediction.index]
        assert prediction.scores[prediction.index] == max(prediction.scores)


# unified-qa: the texts of its four forms, as in table 1 of the paper and its released models


def read_rows(tmp_path, form, row, **options):
    file = write_json_lines(tmp_path / "rows.jsonl", [row])
    task = parse_task({"unified-qa": {"form": form}})
    fitted, choice = task.fitted(str(file), DataOptions(**options), "train")
    return fitted.read(str(file), choice.options, "train")


def test_choices_have_letters_and_parts_a_literal_backslash_n():
    text = question_text("What  do plants produce?", choices=["water", "Oxygen"])
    assert text == r"what do plants produce? \n (a) water (b) oxygen"
    assert question_text("Why?", "It\nis so.", ["a"]) == r"why? \n (a) a \n it is so."


def test_answers_are_lower_case_texts_yes_or_no(tmp_path):
    row = {"question": "Who sleeps?", "context": "The cat sleeps.", "answer": "The Cat"}
    for form in ("extractive", "abstractive"):
        (example,) = read_rows(tmp_path, form, row)
        assert example == Example(r"who sleeps? \n the cat sleeps.", None, "the cat")
    given = {True: "yes", False: "no", "Yes": "yes", "no": "no"}
    for value, answer in [*given.items(), (1, "yes")]:
        row = {"question": "Is it?", "context": "It is.", "answer": value}
        (example,) = read_rows(tmp_path, "yes-no", row, label="answer")
        assert example.label == answer


@pytest.mark.parametrize("answer", ["Oxygen", 1, "B"])
def test_a_choice_is_named_by_text_index_or_letter(tmp_path, answer):
    row = {"question": "What?", "choices": ["water", "Oxygen"], "answer": answer}
    (example,) = read_rows(tmp_path, "multiple-choice", row)
    assert example == Example(r"what? \n (a) water (b) oxygen", None, "oxygen")
    row["context"] = "Air."
    (with_context,) = read_rows(tmp_path, "multiple-choice", row, pair="context")
    assert with_context.text == r"what? \n (a) water (b) oxygen \n air."


def test_examples_of_the_command_line():
    for task, fields, given, text in (
        ("unified-qa", 2, ["Who?", "The cat."], r"who? \n the cat."),
        ("unified-qa", 2, ["Who?"], "who?"),
        ("unified-qa(form=multiple-choice)", 0, ["Who?", "x", "y"], r"who? \n (a) x (b) y"),
    ):
        assert parse_task(task).fields(DataOptions()) == fields
        assert parse_task(task).example(given, DataOptions()).text == text
