"""Answer typed lines interactively; the adapter is loaded once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._answers import HowToWrite, Shape, answers, print_pieces
from adapterhub.cli._format import say, say_text
from adapterhub.errors import AdapterhubError
from adapterhub.inference.inputs import texts_of

if TYPE_CHECKING:
    from adapterhub.inference.open import Predictor

_NEW = "/new"


def answer_lines(
    opened: Predictor, pair: Sequence[str], writing: HowToWrite | None, shape: Shape
) -> None:
    """Answer each typed line, until an empty one or the end of input (Ctrl-D).

    Args:
        opened: the adapter.
        pair: the other texts of each example, if any.
        writing: the generation options; None for tasks that do not generate text.
        shape: the output format of predictions.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (lines can be edited)
    chats = writing is not None and opened.task.chat_example((("user", ""),)) is not None
    ending = "an empty line or Ctrl-D ends"
    if chats:
        say(f"a message, then Enter; {_NEW} begins a new conversation; {ending}", err=True)
    else:
        say(f"{opened.task.input_name}, then Enter; {ending}", err=True)
    messages: list[dict[str, str]] = []
    for line in _lines():
        if chats and line.strip() == _NEW:
            messages = []
            continue
        try:
            if chats:
                turns = [*messages, {"role": "user", "content": line}]
                answer = _answer(opened, opened.task.chat_example(_turns(turns)), writing, shape)
                messages = [*turns, {"role": "assistant", "content": answer}]
            else:
                _answer(opened, _example(opened, line, pair), writing, shape)
        except AdapterhubError as error:
            say_text(f"error: {error}", err=True)  # the next line may be valid


def _turns(messages: Sequence[dict[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in messages)


def _lines(prompt: str = "> ") -> Iterator[str]:
    """Yield the lines typed at a prompt, up to an empty one or the end of input."""
    while line := _typed_line(prompt):
        yield line


def _typed_line(prompt: str) -> str:
    if not sys.stdout.isatty():  # only predictions go to a file or pipe
        click.echo(prompt, nl=False, err=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        click.echo(err=True)
        return ""


def _example(opened: Predictor, line: str, pair: Sequence[str]) -> Any:
    """Return the example of a line; tabs separate its texts, or a second text is requested."""
    texts = [*texts_of([line], opened.task, opened.data), *pair]
    if opened.task.fields(opened.data) == 2 and len(texts) == 1:
        texts += filter(None, [_typed_line(f"{opened.task.pair_name or 'second text'}> ")])
    return opened.task.example(texts, opened.data)


def _answer(opened: Predictor, example: Any, writing: HowToWrite | None, shape: Shape) -> str:
    """Print the prediction for an example, and return its text; generated text is streamed."""
    if writing is not None and not shape.as_json:
        writer = opened.writing(writing.options)
        if getattr(writer.task, "beams", 1) == 1:
            return print_pieces(writer.streamed([example], writing.options))
    (prediction,) = answers(opened, [example], writing)
    shape.show(opened.task, example, prediction, alone=True)
    return str(getattr(prediction, "text", prediction))
