"""Bad data and options of each task: one error that names the rows and what to type next."""

from __future__ import annotations

import json

import pytest
from fixtures import sentences, write_json_lines

from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError
from adapterhub.tasks import parse_task
from adapterhub.tasks.tagging import Sentence


def squad(**question: object) -> str:
    item = {"id": "q7", "question": "what", "answers": [{"text": "good", "answer_start": 4}]}
    paragraph = {"context": "the good film", "qas": [item | question]}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


CHOICES = {"text": "a", "choices": ["x", "y"], "label": "A"}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("task", "name", "text", "expected"),
    [
        ("tagging", "a.conll", "a\tO\nb\tI-x\n", "sentence at line 1: token 2: 'I-x' continues"),
        ("tagging", "a.conll", "a\tO\n\t\nb\tB-x\nc\tI-y\n", "sentence at line 3: token 2: 'I-y'"),
        ("tagging", "a.conll", "a\tO\nb\tx\n", "'x' is not O, B-kind or I-kind"),
        ("tagging", "a.conll", "a\tO\nb\n", "line 2: 1 fields"),
        ("tagging", "a.conll", "-DOCSTART- O\n", "no sentences"),
        ("tagging", "a.conll", "a\nb\n", "'label'"),
        ("tagging", "a.jsonl", '{"text": ["a", "b"], "label": ["O"]}', "2 tokens and 1 tags"),
        ("tagging", "a.jsonl", '{"text": "a b", "label": ["O"]}', "not a list of strings"),
        ("tagging", "a.jsonl", '{"text": [], "label": []}', "'text' is empty"),
        ("question-answering", "a.json", squad(answers=[]), "question q7: it has no answer"),
        ("question-answering", "a.json", squad(is_impossible=True), "unanswerable=true"),
        (
            "question-answering",
            "a.json",
            squad(answers=[{"text": "good", "answer_start": 5}]),
            "'good' does not stand at 5",
        ),
        ("question-answering", "a.json", '{"data": [{}]}', "SQuAD's form: KeyError 'paragraphs'"),
        ("question-answering", "a.json", '{"data": []}', "no questions"),
        (
            "question-answering",
            "a.jsonl",
            '{"text": "q", "context": "c", "label": "c"}',
            "answer_start",
        ),
        ("seq2seq", "a.jsonl", '{"text": "a", "label": " "}', "line 1: the target is empty"),
        ("seq2seq", "a.jsonl", '{"text": "a", "label": 3}', "'label' has type int, expected text"),
        ("causal-lm", "a.jsonl", '{"text": "a"}', "'label'"),
        ("causal-lm(data=chat)", "a.jsonl", '{"text": "hello"}', "not a list of messages"),
        ("causal-lm(data=chat)", "a.jsonl", json.dumps({"text": MESSAGES}), "not the assistant's"),
        ("causal-lm(data=text)", "a.jsonl", '{"text": null}', "'text' is missing"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"label": "C"}), "'C' is no choice"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"label": 2}), "'2' is no choice"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"choices": ["x"]}), "less than two"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"choices": "xy"}), "not a list"),
        (
            "multiple-choice",
            "a.jsonl",
            "\n".join(json.dumps(CHOICES | {"choices": ["x", "y", "z"][:n]}) for n in (2, 2, 3)),
            "'a': 3 choices",
        ),
        ("masked-lm", "a.txt", " \n", "is empty"),
    ],
)
def test_broken_data_is_named(tmp_path, task, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(AdapterhubError) as caught:
        parse_task(task).read(str(tmp_path / name), DataOptions(), "train")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sequence2seq", "'seq2seq'"),
        ("seq2seq(metrics=bleu)", "seq2seq.metrics is not an option; did you mean 'metric'"),
        ("seq2seq(metric=blue)", "bleu"),
        ("seq2seq(template='no place')", "{text}"),
        ("seq2seq, causal-lm", "invalid task spec"),
        ("seq2seq(", "invalid task spec"),
        ({"seq2seq": 3}, "invalid task spec"),
        ("causal-lm(answer='####')", "0 groups"),
        ("causal-lm(answer='(')", "no regular expression"),
        ("causal-lm(data=text, generate=true)", "no response"),
        ("masked-lm(rate=15)", "between 0 and 1"),
        ("span-corruption(span=0.5)", "1 or more"),
        ("prompted(template='{text}')", "{mask} once"),
        ("prompted(template='{text} {mask}.', model=causal-lm)", "ends with {mask}"),
        ("prompted(words={'a': 'b'})", "less than two labels"),
    ],
)
def test_a_bad_spec(spec, expected):
    with pytest.raises(AdapterhubError) as caught:
        parse_task(spec)
    assert expected in str(caught.value)


def test_parallel_files_that_are_not(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    options = DataOptions(train_target=str(tmp_path / "a.de"))
    with pytest.raises(AdapterhubError, match=r"not parallel(.|\n)*2 lines(.|\n)*1 lines"):
        parse_task("seq2seq").read(str(tmp_path / "a.en"), options, "train")
    (tmp_path / "a.de").write_text("eins\n\n")
    with pytest.raises(AdapterhubError, match=r"empty lines\n  - line 2"):
        parse_task("seq2seq").read(str(tmp_path / "a.en"), options, "train")


def test_packed_texts_and_virtual_tokens(adapterhub, backbones, tmp_path):
    rows = [{"text": text, "label": "good"} for text, _ in sentences(4)]
    file = write_json_lines(tmp_path / "a.jsonl", rows)
    words = ("--train", file, "--eval", file, "--output", tmp_path / "run", "--method", "prompt")
    task = ("--task", "causal-lm(pack=true)", "--backbone", backbones("llama"))
    code, _, err = adapterhub("train", *words, *task)
    assert code == 2
    assert "pack=false" in err


@pytest.mark.parametrize(
    ("task", "words", "expected"),
    [
        ("question-answering", ("what",), "needs a context"),
        ("multiple-choice", ("what", "--pair", "a"), "two choices or more"),
    ],
)
def test_predict_without_all_texts(task, words, expected):
    fields = [word for word in words if word != "--pair"]
    with pytest.raises(AdapterhubError, match=expected):
        parse_task(task).example(fields, DataOptions())


def test_tags_that_training_lacks():
    task = parse_task("tagging")
    with pytest.raises(AdapterhubError, match="'B-x': 1 time"):
        task.check(("O", "B-y", "I-y"), [Sentence("a", ("a",), ("B-x",))])
    with pytest.raises(AdapterhubError, match="each tag is O"):
        task.check(("O",), [])
