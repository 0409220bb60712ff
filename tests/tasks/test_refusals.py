"""What tasks refuse: options, and rows of data files. Texts of files are those of their lines."""

import json

import pytest

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import parse_task
from tests.kit.data import read_error

MESSAGES = [{"role": "user", "content": "a"}]
CHOICES = {"text": "a", "choices": ["x", "y"], "label": "A"}
MIXED = "\n".join(json.dumps(CHOICES | {"choices": ["x", "y", "z"][:n]}) for n in (2, 2, 3))
SHIFTED = {"text": "good", "answer_start": 5}


def squad(**question: object) -> str:
    item = {"id": "q7", "question": "what", "answers": [{"text": "good", "answer_start": 4}]}
    paragraph = {"context": "the good film", "qas": [item | question]}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("seq2seq(metrics=bleu)", "seq2seq.metrics is not an option; did you mean 'metric'"),
        ({"seq2seq": 3}, "invalid task spec"),
        ("causal-lm(answer='####')", "0 groups"),
        ("causal-lm(answer='(')", "not a regular expression"),
        ("causal-lm(data=text, generate=true)", "no response"),
        ("causal-lm(template='no text')", "{text}"),
        ("masked-lm(rate=15)", "between 0 and 1"),
        ("prompted(template='{text}')", "{mask} once"),
        ("prompted(template='{text} {mask}.', model=causal-lm)", "ends with {mask}"),
        ("prompted(words={'a': 'b'})", "fewer than two labels"),
        ("seq2seq(metric=blue)", "bleu"),
        ("seq2seq(beams=0)", "beams is 0"),
        ("seq2seq(beams=1001)", "1 to 1000 beams"),
        ("span-corruption(span=0.5)", "1 or more"),
        ("denoising(mask=1.0)", "expected: shares from 0 to 1"),
        ("denoising(span=0)", "expected: shares from 0 to 1"),
        ({"audio-classification": {"seconds": float("nan")}}, "a number above 0"),
        ("image-text-to-text(pixels=0)", "pixels is 0"),
        ({"classification": {"class_weights": {"a": -1.0}}}, "class_weights"),
        ({"classification": {"class_weights": "even"}}, "class_weights"),
        ("causal-lm(data=text, shots=2)", "raw text"),
        ("seq2seq(shots=-1)", "shots is -1"),
        ("seq2seq(examples=[[a]])", "not pairs"),
        ("embedding(temperature=0)", "temperature is 0"),
        ("multi-label(threshold=1.0)", "threshold is 1"),
        ("preference(beta=0)", "beta is"),
        ("preference(loss_type=ipo, label_smoothing=0.1)", "ipo does not read label_smoothing"),
        ("preference(loss_type=exo_pair)", "infinite without label_smoothing"),
        ("preference(loss_type=kto, sft_weight=1)", "kto reads rated responses"),
        ("preference(undesirable_weight=nan)", "undesirable_weight"),
        ({"grpo": {"reward": "good"}}, "reward 'good' is unknown"),
        ({"grpo": {"reward": "regex:("}}, "not a regular expression"),
        ({"grpo": {"reward": ["exact", "tests"]}}, "both read the label column"),
        ({"grpo": {"reward": ["exact"], "weights": [1, 2]}}, "for 1 rewards"),
        ({"grpo": {"weights": [float("nan")]}}, "a finite number"),
        ("grpo(group=1)", "group is 1"),
        ("grpo(epsilon=1)", "epsilon is 1"),
        ("grpo(iterations=0)", "iterations is 0"),
        ("grpo(temperature=0)", "a temperature above 0"),
        ("preference(desirable_weight=-1)", "weights of 0 or more"),
        ({"speech-recognition": {"seconds": 0}}, "a number above 0"),
    ],
)
def test_options(spec, expected):
    with pytest.raises(ConfigError) as error:
        parse_task(spec)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("spec", "file", "text", "expected"),
    [
        ("masked-lm", "a.txt", " \n", "is empty"),
        ("seq2seq", "a.jsonl", '{"text": "a", "label": " "}', "line 1: 'label' is empty"),
        ("seq2seq", "a.jsonl", '{"text": "a", "label": "b", "src_lang": "x", "tgt_lang": ""}',
         "line 1: 'tgt_lang' is empty"),
        ("seq2seq", "a.jsonl", '{"text": "a", "label": 3}', "'label' has type int, expected text"),
        ("tagging", "a.conll", "a\tO\n\t\nb\tB-x\nc\tI-y\n",
         "sentence at line 3: token 2: 'I-y' cannot follow 'B-x'"),
        ("tagging", "a.conll", "a\tO\nb\tx\n",
         "scheme=kinds, if they are of entities, or scheme=plain"),
        ("tagging", "a.conll", "a\tU-x\nb\tE-x\n",
         "token 1: the tag 'U-x' is not O, B-kind, I-kind, E-kind"),
        ("tagging", "a.conllu", "1\ta\t_\tDET\n", "line 1: 4 fields"),
        ("tagging", "a.conllu", "# sent_id = 1\n", "no sentences"),
        ("tagging", "a.conll", "a\tO\nb\n", "line 2: 1 fields"),
        ("tagging", "a.conll", "-DOCSTART- O\n", "no sentences"),
        ("tagging", "a.conll", "a\nb\n", "--label"),
        ("tagging", "a.jsonl", '{"text": ["a", "b"], "label": ["O"]}', "2 tokens and 1 tags"),
        ("tagging", "a.jsonl", '{"text": [], "label": []}', "'text' is empty"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"label": 2}), "'2' is not a choice"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"choices": ["x"]}), "fewer than two"),
        ("multiple-choice", "a.jsonl", MIXED, "'a': 3 choices"),
        ("multiple-choice", "a.jsonl", json.dumps(CHOICES | {"choices": "x"}), "not a list of"),
        ("tagging", "a.jsonl", '{"text": "a", "label": ["O"]}', "not a list of strings"),
        ("question-answering", "a.json", squad(answers=[]), "question q7: it has no answer"),
        ("question-answering", "a.json", squad(is_impossible=True), "unanswerable=true"),
        ("question-answering", "a.json", squad(answers=[SHIFTED]), "'good' is not at character 5"),
        ("question-answering", "a.json", squad(question=" "), "question q7: 'question' is empty"),
        ("question-answering", "a.json", '{"data": [{}]}', "SQuAD's format: KeyError 'paragraphs'"),
        ("question-answering", "a.json", '{"data": []}', "no questions"),
        ("question-answering", "a.jsonl", '{"text": "q", "context": "c", "label": "c"}',
         "answer_start"),
        ("causal-lm", "a.jsonl", '{"text": "a"}', "--label"),
        ("reranking", "a.jsonl", '{"query": "q", "passage": "p", "score": 3}',
         "not probabilities, such as 3.0"),
        ("embedding(loss_type=triplet)", "a.jsonl", '{"anchor": "a", "positive": "b"}',
         "without a negative"),
        ("unified-qa(form=multiple-choice)", "a.jsonl", json.dumps(CHOICES | {"label": "z"}),
         "'z' is not a choice"),
        ("unified-qa(form=multiple-choice)", "a.jsonl",
         json.dumps(CHOICES | {"choices": [*map(str, range(27))]}), "27 choices"),
        ("embedding(loss_type=cosine)", "a.jsonl",
         '{"sentence1": "a", "sentence2": "b", "score": 4.5}', "no cosine reaches"),
        ("causal-lm(data=chat)", "a.jsonl", '{"text": "hello"}', "not a list of messages"),
        ("causal-lm(data=chat)", "a.jsonl", json.dumps({"text": MESSAGES}), "not the assistant's"),
    ],
)  # fmt: skip
def test_data(tmp_path, spec, file, text, expected):
    assert expected in read_error(spec, tmp_path / file, text)


@pytest.mark.parametrize(
    ("spec", "fields", "options", "expected"),
    [
        ("classification", ["one"], {"pair": "other"}, "second text is missing"),
        ("multiple-choice", ["what", "a"], {}, "two or more choices"),
        ("unified-qa(form=multiple-choice)", ["Who?", "x"], {}, "two or more"),
        ("question-answering", ["what"], {}, "needs a context"),
        ("reward", ["a prompt"], {}, "response is missing"),
    ],
)
def test_fields_of_the_command_line(spec, fields, options, expected):
    with pytest.raises(DataError, match=expected):
        parse_task(spec).example(fields, DataOptions(**options))


@pytest.mark.parametrize("task", ["masked-lm", "span-corruption"])
def test_the_lines_of_a_file_are_texts(task, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \r\n")
    texts = parse_task(task).read(str(tmp_path / "a.txt"), DataOptions(), "train")
    assert texts == [Example("one"), Example(" two ")]
