"""Images with text: questions about an image, or chats with any number of images.

An image is a file or bytes, as in `adapterhub.data.media`. A table without questions has a caption
for each image: the answer to the same question. Chats have messages of several turns:

OpenAI      messages: [{role: user, content: [{type: image}, {type: text, text: ...}]}, ...]
LLaVA       conversations: [{from: human, value: "<image> ..."}, {from: gpt, value: ...}]

Images are in a column next to the messages (`images`, a list, or `image`), in the order of their
placeholders, or in the messages themselves: {type: image, image: FILE}. `<image>` in a text is also
a placeholder; images without one come first. The last message is the answer to the chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from adapterhub.config.user_folders import is_folder
from adapterhub.data.chat_formats import CHAT_COLUMNS, ROLES, message_keys
from adapterhub.data.columns import ColumnChoice, Wants, choose_columns
from adapterhub.data.examples import EmptyCell, Grouped, read_rows, refuse, text_problem
from adapterhub.data.media import MediaFile, open_media, opened_cell
from adapterhub.data.options import DataOptions
from adapterhub.data.table import Table
from adapterhub.data.tables import keep_table, read_table

Turn: TypeAlias = tuple[str, tuple[str | None, ...]]
"""A role, and the parts of its message: texts, and None for each image."""
PLACE = "<image>"
_PICTURES = ("images", "image", "pictures", "picture")
_OWN = ("image", "path", "file", "url", "image_url")  # keys of an image in a part
Parsed: TypeAlias = list[tuple[str, list[Any]]]
"""Roles with the parts of messages: texts, None for a placeholder, and inline images."""
Open = Callable[[bytes], Any]


@dataclass(frozen=True)
class PictureChat(Grouped):
    """Messages with images; the label is the answer to the last message.

    Attributes:
        sha256: the digests of the images, in the order of their placeholders.
        turns: the messages before the answer.
        label: the answer.
        pictures: the images, in the order of their placeholders.
    """

    sha256: tuple[str, ...]
    turns: tuple[Turn, ...]
    label: str | None = None
    pictures: tuple[MediaFile, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The names of the images."""
        return ", ".join(picture.name for picture in self.pictures)

    @property
    def question(self) -> str:
        """The text of the last message."""
        return " ".join(part for part in self.turns[-1][1] if part)

    def with_label(self, label: str) -> PictureChat:
        """Return the same chat with another answer."""
        return replace(self, label=label)


def chat_choice(source: str, options: DataOptions, split: str) -> ColumnChoice | None:
    """Infer the columns of chats with images; None if the data does not hold chats.

    `options.text` is the column of the messages, `pair` the column of the images.

    Raises:
        DataError: the source cannot be read.
    """
    table = read_table(source, options, split)
    column = options.text or next((c for c in table.columns if c.lower() in CHAT_COLUMNS), None)
    if column is None or not _has_chats(table, column):
        return None
    beside = options.pair or next((n for n in table.columns if n.lower() in _PICTURES), None)
    chosen = replace(options, text=column, pair=beside)
    keep_table(table, source, chosen, split)
    where = f"images from {beside!r}" if beside else "images in the messages"
    about = f"read as chats with images: messages from {column!r}, {where}"
    notes = (f"{table.shown_source}: {table.described()}", *table.notes, about)
    return ColumnChoice(chosen, table, notes)


def _has_chats(table: Table, column: str) -> bool:
    if column not in table.columns:
        return False
    first = next((value for value in table.spread(column, 20) if value), None)
    return isinstance(first, list) and all(message_keys(item) for item in first)


def read_chats(
    source: str,
    options: DataOptions,
    split: str,
    decode: Callable[[bytes], Any],
    *,
    labelled: bool,
) -> list[PictureChat]:
    """Read chats with images, in order; each image is decoded once.

    If chats are `labelled`, each needs an answer; otherwise a final answer is dropped.

    Raises:
        DataError: the source is missing, empty or malformed, or rows are invalid; lists all.
    """
    folder = Path(source) if is_folder(source) else Path(source).parent

    def build(messages: object, beside: object = None) -> PictureChat:
        turns, cells = _placed(_parsed(messages), _listed(beside))
        answer = _answer(turns, labelled=labelled)
        pictures = tuple(opened_cell(cell, None, folder, decode) for cell in cells)
        if not pictures:
            raise ValueError(EmptyCell("the chat has no image"))
        if not turns or turns[-1][0] != "user":
            raise ValueError("no message of the user is in front of the answer")
        return PictureChat(tuple(p.sha256 for p in pictures), tuple(turns), answer, pictures)

    columns = [str(options.text), *([options.pair] if options.pair else [])]
    return read_rows(source, options, split, columns, build)


def _listed(cell: object) -> list[object]:
    """Return the images of a cell: a list, one image, or none."""
    if cell is None or cell != cell:  # NaN marks a missing one
        return []
    return list(cell) if isinstance(cell, Sequence) and not isinstance(cell, str) else [cell]


@dataclass(frozen=True)
class _Own:
    """An inline image of a message."""

    cell: object


def _parsed(messages: object) -> Parsed:
    """Parse messages.

    Raises:
        ValueError: the messages have another form.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(EmptyCell("the list of messages is missing"))
    parsed = []
    for item in messages:
        keys = message_keys(item)
        if keys is None:
            raise ValueError(f"a message is {str(item)[:60]!r}: expected role and content")
        role = item[keys[0]] if keys[0] == "role" else ROLES.get(item["from"], item["from"])
        parsed.append((str(role), list(_parts(item.get(keys[1])))))
    return parsed


def _parts(content: object) -> Iterator[Any]:
    """Yield the parts of a message's content: a text, or a list of parts."""
    if isinstance(content, str):
        for number, text in enumerate(content.split(PLACE)):
            yield from [None] * (number > 0)
            yield from [text.strip()] * bool(text.strip())
        return
    for part in content if isinstance(content, Sequence) else ():
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if isinstance(part, str) or kind == "text":
            text = part if isinstance(part, str) else str(part.get("text") or "")
            yield from [text.strip()] * bool(text.strip())
        elif kind in ("image", "image_url"):
            value = next((part[key] for key in _OWN if part.get(key) is not None), None)
            cell = value.get("url", value) if isinstance(value, Mapping) else value
            yield None if cell is None else _Own(cell)
        else:
            raise ValueError(f"a part of a message has the type {kind!r}: expected text or image")


def _placed(parsed: Parsed, beside: list[object]) -> tuple[list[Turn], list[object]]:
    """Assign images to placeholders; images without a placeholder come first.

    Raises:
        ValueError: there are more placeholders than images.
    """
    places = sum(part is None for _, parts in parsed for part in parts)
    if places > len(beside):
        raise ValueError(f"the messages have {places} places for images, and {len(beside)} are "
                         "given")  # fmt: skip
    first = [None] * (len(beside) - places)
    if first:
        user = next((parts for role, parts in parsed if role == "user"), None)
        if user is None:
            raise ValueError("no message of the user is there for the images")
        user[:0] = first
    rest, cells = iter(beside), []
    for _, parts in parsed:
        for part in parts:
            if not isinstance(part, str):
                cells.append(part.cell if isinstance(part, _Own) else next(rest))
    turns = [
        (role, tuple(part if isinstance(part, str) else None for part in parts))
        for role, parts in parsed
    ]
    return turns, cells


def _answer(turns: list[Turn], *, labelled: bool) -> str | None:
    """Take the answer from the end of a chat.

    Raises:
        ValueError: the answer is missing, or is not a text.
    """
    role, parts = turns[-1]
    if role != "assistant":
        if labelled:
            raise ValueError(f"the last message is of the role {role!r}: expected the answer")
        return None
    del turns[-1]
    texts = [part for part in parts if part]
    if len(texts) < len(parts):
        raise ValueError("the answer has an image")
    if labelled and not texts:
        raise ValueError(EmptyCell("the answer is empty"))
    return " ".join(texts) if labelled else None


@dataclass(frozen=True)
class AskedPicture(MediaFile):
    """An image with a question; the label is the answer.

    Attributes:
        question: the question; "" if the data has none.
    """

    question: str = ""

    @property
    def pictures(self) -> tuple[MediaFile, ...]:
        """The image, as the only one."""
        return (self,)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The question about the image, as the only message."""
        return (("user", (None, self.question)),)


def ask(name: str, question: str, decode: Open) -> AskedPicture:
    """Return an image with a question, as typed on the command line.

    Raises:
        DataError: the file cannot be read or decoded.
    """
    return AskedPicture(**vars(open_media(name, decode)), question=question)


def read_asked(
    source: str, options: DataOptions, split: str, wants: Wants, decode: Open, *, labelled: bool
) -> list[AskedPicture]:
    """Read the images of a table, with their questions (`pair`) and answers, in order.

    Raises:
        DataError: the source is missing, empty or malformed, or rows are invalid; lists all.
    """
    options = choose_columns(source, options, split, wants, labelled=labelled).options
    folder = Path(source) if is_folder(source) else Path(source).parent
    columns = {"picture": options.text_column}
    columns |= {"question": options.pair} if options.pair else {}
    columns |= {"answer": options.label_column} if labelled else {}

    def build(*cells: object) -> AskedPicture:
        row = dict(zip(columns, cells, strict=True))
        question, answer = row.get("question", ""), row.get("answer")
        refuse(
            text_problem(question, str(options.pair), allow_empty="question" not in row),
            _answer_problem(answer, options.label_column) if labelled else "",
        )
        label = str(answer) if labelled else None
        file = opened_cell(row["picture"], label, folder, decode)
        return AskedPicture(**vars(file), question=str(question))

    return read_rows(source, options, split, list(columns.values()), build)


def _answer_problem(answer: object, column: str) -> str:
    """Return the reason why a cell is not an answer, or ""; numbers are answers as written."""
    if isinstance(answer, float) and answer != answer:  # NaN marks a missing number
        return EmptyCell(f"{column!r} is missing")
    is_number = isinstance(answer, int | float)
    return text_problem(str(answer) if is_number else answer, column, allow_empty=False)
