r"""Questions in four forms as text to text, in the format of UnifiedQA.

    example      the question, with its context or choices, as one text, and the answer
    row          as in `seq2seq`
    prediction   a generated answer
    metrics      as in `seq2seq`

Khashabi et al. 2020, https://arxiv.org/abs/2005.00700, section 3.2: the question comes first, then
the choices as (a) ... (b) ..., then the context. As in its published models, texts are in lower
case, and the separator is a backslash and the letter n, since T5's vocabulary has no line feed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, ColumnChoice, Wants, choose_columns
from adapterhub.data.examples import Example, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks.common.base import Task, register_task
from adapterhub.tasks.multiple_choice import choice_index, choices_problem, listed_choices
from adapterhub.tasks.seq2seq import Seq2Seq

Form = Literal["extractive", "abstractive", "multiple-choice", "yes-no"]
SEPARATOR = r" \n "
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_YES_NO = {"true": "yes", "1": "yes", "false": "no", "0": "no"}


def question_text(question: str, context: str = "", choices: Sequence[str] = ()) -> str:
    """Return a question in the format of UnifiedQA."""
    listed = " ".join(f"({_LETTERS[i]}) {choice}" for i, choice in enumerate(choices))
    parts = (question, listed, context)
    return SEPARATOR.join(" ".join(part.split()) for part in parts if part.strip()).lower()


@register_task
@dataclass(frozen=True)
class UnifiedQA(Seq2Seq):
    r"""Questions as text to text: extractive, abstractive, multiple choice, yes or no.

    Rows of `train.jsonl`:

        {"question": "Who sleeps?", "context": "The cat sleeps.", "answer": "the cat"}
        {"question": "Who barks?", "context": "A dog barked.", "answer": "a dog"}

    With `form: multiple-choice` a row has a list of `choices`, and the answer is the text of one,
    its index from 0, or its letter. The model reads `who sleeps? \n the cat sleeps.`, and with
    choices `who sleeps? \n (a) the dog (b) the cat`.

    `predict` prints the answer:

        the cat
        {"generated": "the cat"}
    """

    form: Form = option("extractive", "the form of the questions, and so the columns")
    metric: Literal["bleu", "rouge", "exact"] = option("exact", "metric of generated answers")

    name = "unified-qa"
    head = "seq2seq"
    summary = "questions of four forms as text to text"
    columns = WANTS["questions"]

    @property
    def _wants(self) -> Wants:
        return WANTS["questions with choices"] if self._has_choices else self.columns

    @property
    def _has_choices(self) -> bool:
        return self.form == "multiple-choice"

    # Examples

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns of the form."""
        return self, choose_columns(source, options, split, self._wants, labelled=labelled)

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Read questions with their context or choices, and answers."""
        options = choose_columns(source, options, split, self._wants, labelled=labelled).options
        columns = {"question": options.text_column, "context": options.pair}
        names = [name for name in columns.values() if name is not None]
        in_columns = not isinstance(options.choices, str)
        choices = [*options.choices] if in_columns else [str(options.choices)]
        names += choices * self._has_choices
        names += [options.label_column] * labelled

        def build(*cells: Any) -> Example:
            values = dict(zip(names, cells, strict=True))
            question = values[options.text_column]
            context = values.get(options.pair, "") if options.pair else ""
            refuse(
                text_problem(question, options.text_column, allow_empty=not labelled),
                text_problem(context, str(options.pair), allow_empty=True),
            )
            listed: Sequence[str] = ()
            marks: Sequence[str] = ()
            if self._has_choices:
                own = [values[c] for c in choices] if in_columns else values[choices[0]]
                listed, marks = listed_choices(own)
                refuse(choices_problem(listed, choices, allow_empty=not labelled))
                refuse(*_too_many(listed))
            answer = self._answer(values[options.label_column], listed, marks) if labelled else None
            return Example(question_text(question, context or "", listed), None, answer)

        return read_rows(source, options, split, names, build)

    def read_texts(self, example: Example) -> list[str]:
        """Return the question: a context is optional."""
        return [example.text.partition(SEPARATOR)[0]]

    def group_of(self, example: Example) -> Hashable:
        """Return the context, which may have several questions; without one, the question."""
        context = example.text.partition(SEPARATOR)[2]
        return example.text if self._has_choices or not context else context

    def _answer(self, value: Any, choices: Sequence[str], marks: Sequence[str]) -> str:
        """Return the target text of an answer: the text of a choice, or yes and no for booleans."""
        if choices:
            value = choices[choice_index(value, choices, marks)]
        elif self.form == "yes-no":
            value = _YES_NO.get(str(value).strip().lower(), value)
        elif isinstance(value, (list, tuple)) and value:
            value = value[0]
        refuse(text_problem(value, "answer", allow_empty=False))
        return " ".join(str(value).split()).lower()

    def example(self, fields: Sequence[str], options: DataOptions) -> Example:
        """Build an example from a question and its context, or its choices."""
        question, *rest = fields
        if self._has_choices:
            if len(rest) < 2:
                raise DataError(
                    "a question with choices needs two or more",
                    hint='adapterhub predict ADAPTER "question" --pair "one" --pair "another"',
                )
            return Example(question_text(question, "", rest))
        return Example(question_text(question, rest[0] if rest else ""))

    def fields(self, options: DataOptions) -> int:
        """Return 2, a question and its context; 0 with any number of choices."""
        return 0 if self._has_choices else 2


def _too_many(choices: Sequence[str]) -> list[str]:
    most = len(_LETTERS)
    return [f"{len(choices)} choices, more than {most}"] if len(choices) > most else []
