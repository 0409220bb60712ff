r"""unified-qa: the texts of its four forms, as in the paper's table 1 and its released models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.tasks import parse_task
from adapterhub.tasks.unified_qa import question_text

QUESTION = "What does photosynthesis produce that  helps plants grow?"


def read(tmp_path: Path, form: str, *rows: dict[str, object], **options: object) -> list[Example]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = parse_task({"unified-qa": {"form": form}})
    fitted, choice = task.fitted(str(file), DataOptions(**options), "train")  # type: ignore[arg-type]
    return fitted.read(str(file), choice.options, "train")


def test_choices_have_letters_and_parts_a_literal_backslash_n():
    text = question_text(QUESTION, choices=["water", "Oxygen", "protein", "sugar"])
    assert text == (
        r"what does photosynthesis produce that helps plants grow? "
        r"\n (a) water (b) oxygen (c) protein (d) sugar"
    )
    assert "\n" not in text
    assert question_text("Why?", "It\nis so.", ["a"]) == r"why? \n (a) a \n it is so."


def test_answers_are_lower_case_texts_yes_or_no(tmp_path):
    row = {"question": "Who sleeps?", "context": "The cat sleeps.", "answer": "The Cat"}
    for form in ("extractive", "abstractive"):
        (example,) = read(tmp_path, form, row)
        assert example == Example(r"who sleeps? \n the cat sleeps.", None, "the cat")
    given = {True: "yes", False: "no", "Yes": "yes", "no": "no"}
    for value, answer in [*given.items(), (1, "yes")]:
        row = {"question": "Is it?", "context": "It is.", "answer": value}
        (example,) = read(tmp_path, "yes-no", row, label="answer")
        assert example.label == answer


@pytest.mark.parametrize("answer", ["Oxygen", 1, "B"])
def test_a_choice_is_named_by_text_index_or_letter(tmp_path, answer):
    row = {"question": "What?", "choices": ["water", "Oxygen"], "answer": answer}
    (example,) = read(tmp_path, "multiple-choice", row)
    assert example == Example(r"what? \n (a) water (b) oxygen", None, "oxygen")
    (with_context,) = read(tmp_path, "multiple-choice", {**row, "context": "Air."}, pair="context")
    assert with_context.text == r"what? \n (a) water (b) oxygen \n air."


def test_examples_of_the_command_line():
    options = DataOptions()
    extractive = parse_task("unified-qa")
    assert extractive.fields(options) == 2
    assert extractive.example(["Who?", "The cat."], options).text == r"who? \n the cat."
    assert extractive.example(["Who?"], options).text == "who?"
    choice = parse_task("unified-qa(form=multiple-choice)")
    assert choice.fields(options) == 0
    assert choice.example(["Who?", "x", "y"], options).text == r"who? \n (a) x (b) y"
