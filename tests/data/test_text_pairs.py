"""Pairs of texts with negatives or scores: columns, cells and what is refused."""

import pytest
from transformers import ByT5Tokenizer

from adapterhub.data import text_pairs
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison, TextPair
from adapterhub.errors import DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from tests.kit.data import write_json_lines


def write(path, *rows):
    return str(write_json_lines(path, rows))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pairs.jsonl"


@pytest.mark.parametrize(
    ("negatives", "expected"),
    [({"negative": "c"}, ("c",)), ({"negative_1": "c", "negative_2": "d"}, ("c", "d")),
     ({"hard_negatives": ["c", "d"]}, ("c", "d")), ({"neg": None}, ())],
)  # fmt: skip
def test_negatives(file, negatives, expected):
    source = write(file, {"anchor": "a", "positive": "b", "score": 1, **negatives})
    assert not text_pairs.has_scores(source, DataOptions(), "train")
    (pair,) = text_pairs.read_text_pairs(source, DataOptions(), "train", scored=False)
    assert pair == TextPair("a", "b", expected)
    assert pair.texts == ("a", "b", *expected)
    source = write(file, {"anchor": "a", "positive": "b", "other": "c", "negative": "d"})
    options = DataOptions(negatives=("other",))
    assert text_pairs.read_text_pairs(source, options, "train", scored=False)[0].negatives == ("c",)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"anchor": "a", "positive": " "}, "'positive' is empty"),
        ({"anchor": "a", "positive": "b", "negative": ""}, "'negatives' is empty"),
        ({"anchor": "a", "positive": "b", "negative": [1]}, "type int"),
    ],
)
def test_texts_that_are_refused(file, row, problem):
    source = write(file, {"anchor": "a", "positive": "b", "negative": "c"}, row)
    with pytest.raises(DataError, match=f"line 2: .*{problem}"):
        text_pairs.read_text_pairs(source, DataOptions(), "train", scored=False)
    rows = [{"sentence1": "a", "sentence2": "b", "score": s} for s in (1, "high")]
    with pytest.raises(DataError, match="'high' is not a number"):
        text_pairs.read_text_pairs(
            write(file, *rows), DataOptions(label="score"), "train", scored=True
        )


def test_to_predict_on_only_the_first_texts_are_read(file):
    source = write(file, {"anchor": "a"}, {"anchor": ""})
    options = DataOptions(text="anchor", pair="positive", label="score")
    pairs = text_pairs.read_text_pairs(source, options, "eval", scored=True, labelled=False)
    assert pairs == [TextPair("a"), TextPair("")]
    options = DataOptions(text="anchor", label="chosen", pair="rejected")
    rows = text_pairs.read_comparisons(source, options, "eval", labelled=False)
    assert rows == [Comparison("a"), Comparison("")]


# Comparisons: columns, chats and what is refused.


USER = [{"role": "user", "content": "hi"}]


def answer(text, role="assistant"):
    return [{"role": role, "content": text}]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": USER + answer("c"), "rejected": answer("no") + answer("r")}, "differ before"),
        ({"chosen": USER + answer("c", "user"), "rejected": USER + answer("r")}, "not the assist"),
        ({"chosen": USER + answer(" "), "rejected": USER + answer("r")}, "is empty"),
        ({"chosen": None, "rejected": USER + answer("r")}, "is missing"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, problem):
    first = {"prompt": "p", "chosen": USER + answer("c"), "rejected": USER + answer("r")}
    source = str(write_json_lines(tmp_path / "a.jsonl", [first, {"prompt": "p"} | row]))
    with pytest.raises(DataError, match=f"line 2: .*{problem}"):
        text_pairs.read_comparisons(source, DataOptions(), "train")


QUESTIONS = [f"name the {word} that is near the river" for word in
             ("castle", "market", "bridge", "island", "garden", "village")]  # fmt: skip
GOOD, BAD = "I think so: it is good", "I think not"  # which begin with the same words


def responses(form):
    """Return rows of which both responses have a form, made of the question and the answer."""
    return lambda question: {"chosen": form(question, GOOD), "rejected": form(question, BAD)}


def said(*contents, system=None):
    roles = ("user", "assistant") * len(contents)
    front = () if system is None else (("system", system),)
    return front + tuple(zip(roles, contents, strict=False))


def lists(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def shared(question, answer):
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


# Dialogues in one text, with a question and an answer.
DIALOGUES = {
    "HH": "\n\nHuman: {q}\n\nAssistant: {a}",
    "HH in a line": "Human: {q} Assistant: {a}",
    "User and Bot": "User: {q}\nBot: {a}",
    "Q and A": "Q: {q}\nA: {a}",
    "Question and Answer": "Question: {q} Answer: {a}",
    "Alpaca": "### Instruction:\n{q}\n\n### Response:\n{a}",
    "Guanaco": "### Human: {q}### Assistant: {a}",
    "Llama 3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{q}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{a}<|eot_id|>",
    "Llama 2": "<s>[INST] {q} [/INST] {a} </s>",
    "Zephyr": "<|user|>\n{q}</s>\n<|assistant|>\n{a}</s>",
    "OASST": "<|prompter|>{q}<|endoftext|><|assistant|>{a}",
    "Gemma": "<start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n{a}",
}


TURNS = "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: {q}\n\nAssistant: {a}"


CHATML = (
    "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n{q}<|im_end|>\n"
    "<|im_start|>assistant\n{a}<|im_end|>\n"
)


def dialogue(text):
    return responses(lambda q, a: text.format(q=q, a=a))


def beside(**columns):
    """Return rows of two answers beside other columns, in which {q} is the question."""
    return lambda question: {
        **{name: cell.replace("{q}", question) if isinstance(cell, str) else cell
           for name, cell in columns.items()}, "chosen": GOOD, "rejected": BAD,
    }  # fmt: skip


def kind(question):
    return said(question, system="be kind")


# The rows of a question, and the prompt that they must have.
FORMS = {
    **{name: (dialogue(text), said) for name, text in DIALOGUES.items()},
    "HH of turns": (dialogue(TURNS), lambda q: said("hi", "yes", q)),
    "Vicuna": (dialogue("A chat. USER: {q} ASSISTANT: {a}"), lambda q: said(q, system="A chat.")),
    "ChatML": (dialogue(CHATML), kind),
    "a prompt beside a dialogue": (
        lambda q: {"prompt": q, **dialogue(DIALOGUES["HH"])(q), "score_chosen": 2}, said,
    ),
    "a dialogue beside its prompt": (beside(prompt="Human: {q}\n\nAssistant:"),
                                     "Human: {}\n\nAssistant:".format),
    "any other name": (beside(frage="{q}", id=1), str),
    "a prompt in front, too": (lambda q: {"prompt": q, **dialogue("{q} {a}")(q)}, str),
    "a constant beside": (beside(source="web", ask="{q}"), str),
    "a label beside": (beside(label=1, prompt="{q}"), str),
    "an input": (beside(instruction="Say it.", input="{q}"), "Say it.\n\n{}".format),
    "a context": (beside(question="{q}", context="All of it."), "All of it.\n\n{}".format),
    "a system message": (beside(system="be kind", question="{q}"), kind),
    "lists": (responses(lists), said),
    "lists of ShareGPT": (responses(shared), said),
    "lists beside their prompt": (
        lambda q: {"prompt": q, "messages": lists(q, GOOD), **responses(lists)(q), "margin": 2},
        said,
    ),
    "lists with a system message": (lambda q: {"system": "be kind", **responses(lists)(q)}, kind),
    "lists whose prompt has a system message": (
        lambda q: {"prompt": [{"role": "system", "content": "be kind"}, lists(q, "")[0]],
                   **responses(lists)(q)}, kind,
    ),
    "lists of answers alone": (
        lambda q: {"prompt": lists(q, "")[:1], **responses(lambda q, a: lists(q, a)[1:])(q)}, said,
    ),
    "lists of answers beside a text": (
        lambda q: {"prompt": q, **responses(lambda q, a: lists(q, a)[1:])(q)}, said,
    ),
    "conversations": (
        lambda q: {"conversations": shared(q, "")[:1], "chosen": shared(q, GOOD)[1],
                   "rejected": shared(q, BAD)[1]}, said,
    ),
    "messages": (lambda q: {"ask": q, **responses(lambda q, a: lists(q, a)[1])(q)}, said),
}  # fmt: skip


DOUBTS = [
    (responses(lambda q, a: f"{q}? {a}"), "expected: the column with the prompt .--text."),
    (responses(lambda q, a: f"{a} {q}"), "--text COLUMN"),
    (lambda q: {"one": q, "two": f"{q} now", "chosen": GOOD, "rejected": BAD}, "--text one"),
    (lambda q: {"frage": q.split()[2] + "1", "chosen": GOOD, "rejected": BAD}, "--text frage"),
    (lambda q: {"chosen": f"Human: {q}\n\nAssistant: yes\n\nHuman: so\n\nAssistant: {GOOD}",
                "rejected": f"Human: {q}\n\nAssistant: {BAD}"}, "differ before their last turns"),
]  # fmt: skip


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_found_and_answers_alone_are_compared(tmp_path, form):
    rows, prompt = FORMS[form]
    source = str(write_json_lines(tmp_path / "a.jsonl", map(rows, QUESTIONS)))
    for name in ("reward", "preference"):
        task, choice = parse_task(name).fitted(source, DataOptions(), "train")
        examples = task.read(source, choice.options, "train")
        assert examples == [Comparison(prompt(question), GOOD, BAD) for question in QUESTIONS]
    for template in (None, TEMPLATE):
        if task.data == "chat" and template is None:
            continue  # which is refused, as for chats of causal-lm
        tokenizer = ByT5Tokenizer()
        tokenizer.chat_template = template
        encoded = task.encode(examples, Setting(tokenizer, 2000), labelled=True).rows
        for row, question in zip(encoded, QUESTIONS, strict=True):
            for response, answer in zip(row["responses"], (GOOD, BAD), strict=True):
                ids, labels = response["input_ids"], response["labels"]
                kept = [i for i in labels if i != IGNORED]
                assert tokenizer.decode(kept, skip_special_tokens=True) == answer
                text = tokenizer.decode(ids[: labels.index(kept[0])])
                assert text.count(question) == 1
                if template and not isinstance(prompt(question), str):
                    said_before = "".join(f"[{role}]{each}" for role, each in prompt(question))
                    assert text == f"{said_before}[assistant]"


@pytest.mark.parametrize(("rows", "problem"), DOUBTS)
def test_prompts_that_are_in_doubt_are_refused(tmp_path, rows, problem):
    source = str(write_json_lines(tmp_path / "a.jsonl", map(rows, QUESTIONS)))
    with pytest.raises(DataError, match=problem):
        text_pairs.read_comparisons(source, DataOptions(), "train")


def test_a_row_of_another_form_is_named(tmp_path):
    rows = [FORMS["HH"][0](f"{question}{n}") for question in QUESTIONS for n in range(4)]
    rows[5] = {"chosen": "Yes.", "rejected": "No."}
    source = str(write_json_lines(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=r"line 6: .* share no turn of the assistant"):
        text_pairs.read_comparisons(source, DataOptions(), "train")


def test_prompts_of_dialogues_are_predicted_on(tmp_path):
    source = str(write_json_lines(tmp_path / "a.jsonl", map(FORMS["HH"][0], QUESTIONS)))
    options = text_pairs.comparison_columns(source, DataOptions(), "train").options
    rows = text_pairs.read_comparisons(source, options, "eval", labelled=False)
    assert rows == [Comparison(said(question)) for question in QUESTIONS]
    rows = text_pairs.read_comparisons(source, options, "eval", labelled=False, chosen=True)
    assert rows == [Comparison(said(question), GOOD) for question in QUESTIONS]
