"""Small data sets to try commands on: made here, without a download, equal on every machine.

A table is texts with labels, or chats. Images and audio are files in folders, as data sets of these
kinds are often kept: one folder for each class, or `metadata.csv` with a text for each file. All
have rows to train on and held-out rows. `docstrings` is real text; the others are generated.
"""

from __future__ import annotations

import csv
import json
import math
import random
import wave
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.data.docstrings import load_docstrings
from adapterhub.data.examples import Example
from adapterhub.data.tickets import load_tickets
from adapterhub.errors import ConfigError, did_you_mean

Columns = dict[str, list[Any]]
"""The cells of a table, by column."""
_RATE = 16000  # Hz
_LETTERS = "abcde"  # each is a tone
_WORDS = ("ab", "ba cab", "dad", "bed", "a bad ace", "cede", "ebb", "add a", "dab", "bead", "ace")


@dataclass(frozen=True)
class Sample:
    """A small data set.

    Attributes:
        description: its contents, in one line.
        example: how to train on it, with PATH for where it was written.
        table: returns the columns to train on and the held-out columns; None for a folder.
        folder: writes the files of one part, of about so many rows, into a folder.
    """

    description: str
    example: str
    table: Callable[[], tuple[Columns, Columns]] | None = None
    folder: Callable[[Path, int, bool], int] | None = None


def sample_table(name: str, rows: int | None = None, *, held_out: bool = False) -> Columns:
    """Return the columns of a sample; `rows` draws so many, in their order.

    Raises:
        ConfigError: no such sample, or the sample is a folder of files.
    """
    sample = find_sample(name)
    if sample.table is None:
        raise ConfigError(
            f"{name} is a sample of files, not a table", hint=f"adapterhub sample {name} FOLDER"
        )
    columns = sample.table()[held_out]
    total = len(next(iter(columns.values())))
    drawn = random.Random(0).sample(range(total), total if rows is None else min(rows, total))
    kept = sorted(drawn)
    return {column: [cells[i] for i in kept] for column, cells in columns.items()}


def write_sample_folder(name: str, folder: Path, rows: int | None = None) -> dict[str, int]:
    """Write the files of a sample into `train` and `eval` of a folder; return their numbers.

    Raises:
        ConfigError: no such sample, or the sample is a table.
    """
    sample = find_sample(name)
    if sample.folder is None:
        raise ConfigError(
            f"{name} is a sample of rows, not of files", hint=f"adapterhub sample {name} FILE.csv"
        )
    train = 120 if rows is None else rows
    parts = {"train": (train, False), "eval": (max(train // 4, 1), True)}
    return {part: sample.folder(folder / part, *of) for part, of in parts.items()}


def find_sample(name: str) -> Sample:
    """Return a sample by its name.

    Raises:
        ConfigError: no sample has the name.
    """
    if name not in SAMPLES:
        raise ConfigError(
            f"no sample {name!r}{did_you_mean(name, SAMPLES)}", expected=", ".join(SAMPLES)
        )
    return SAMPLES[name]


# Tables


def _docstrings() -> tuple[Columns, Columns]:
    train, held_out = (_docstring_columns(part) for part in load_docstrings())
    return train, held_out


def _docstring_columns(rows: Sequence[Example]) -> Columns:
    return {"text": [row.text for row in rows], "label": [row.label for row in rows]}


def _tickets() -> tuple[Columns, Columns]:
    train, held_out = (_ticket_columns(part) for part in load_tickets())
    return train, held_out


def _ticket_columns(chats: Sequence[dict[str, list[dict[str, str]]]]) -> Columns:
    turns = [[turn["content"] for turn in chat["messages"]] for chat in chats]
    fields = [json.loads(answer) for _, answer in turns]
    texts: Columns = {"text": [text for text, _ in turns]}
    return texts | {name: [each[name] for each in fields] for name in fields[0]}


def _chats() -> tuple[Columns, Columns]:
    train, held_out = ({"messages": [c["messages"] for c in part]} for part in load_tickets())
    return train, held_out


def _reviews() -> tuple[Columns, Columns]:
    """Return opinions on places, with a label; the held-out ones are about other places."""
    places = ("café", "bar", "hotel", "museum", "cinema", "market", "station", "library")
    words = (("good", "quiet", "lovely", "clean"), ("bad", "noisy", "dull", "dirty"))
    rows = [
        (f"a {word} {place} {where}", label)
        for place in places
        for where in ("near the river", "in the old town", "by the park")
        for good, bad in zip(*words, strict=True)
        for word, label in ((good, "positive"), (bad, "negative"))
    ]
    split = len(rows) * 3 // 4
    train, held_out = (
        {"review": [text for text, _ in part], "sentiment": [label for _, label in part]}
        for part in (rows[:split], rows[split:])
    )
    return train, held_out


# Files


def _digits(folder: Path, rows: int, held_out: bool) -> int:
    """Write scanned digits of 8 by 8 pixels, one folder for each digit."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    numbers = [n for n in range(len(digits.target)) if (n % 4 == 0) == held_out][:rows]
    for number in numbers:
        place = folder / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 255 / 16).astype("uint8")
        Image.fromarray(pixels).save(place / f"{number}.png")
    return len(numbers)


def _squares(folder: Path, rows: int, held_out: bool) -> int:
    """Write drawings of coloured squares, with captions in `metadata.csv`."""
    from PIL import Image, ImageDraw

    colours = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}
    rng = random.Random(held_out)
    folder.mkdir(parents=True, exist_ok=True)
    captions = []
    for number in range(rows):
        name, colour = list(colours.items())[number % len(colours)]
        image = Image.new("RGB", (32, 32), "white")
        left, top = rng.randrange(2, 8), rng.randrange(2, 8)
        shade = rng.randrange(180, 256)
        fill = (colour[0] * shade, colour[1] * shade, colour[2] * shade)
        ImageDraw.Draw(image).rectangle((left, top, left + 20, top + 20), fill=fill)
        image.save(folder / f"{number}.png")
        captions.append((f"{number}.png", f"a {name} square"))
    _write_metadata(folder, ("file_name", "text"), captions)
    return rows


def _tones(folder: Path, rows: int, held_out: bool) -> int:
    """Write sounds of 0.4 seconds, one folder for each kind: low, high, siren."""
    rng = random.Random(1 + held_out)
    kinds = {"low": (250, 0), "high": (2000, 0), "siren": (400, 2500)}  # Hz, and Hz a second
    for number in range(rows):
        name, (hertz, rise) = list(kinds.items())[number % len(kinds)]
        pitch = hertz * rng.uniform(0.8, 1.25)
        times = (i / _RATE for i in range(int(0.4 * _RATE)))
        tone = [
            0.3 * math.sin(math.tau * (pitch * t + rise * t * t)) + rng.gauss(0, 0.05)
            for t in times
        ]
        (folder / name).mkdir(parents=True, exist_ok=True)
        _write_wave(folder / name / f"{number}.wav", tone)
    return rows


def _speech(folder: Path, rows: int, held_out: bool) -> int:
    """Write words of five letters, each letter a tone, with their text in `metadata.csv`."""
    rng = random.Random(3 + held_out)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for number in range(rows):
        text = _WORDS[number % len(_WORDS)]
        _write_wave(folder / f"{number}.wav", list(_spoken(text, rng)))
        texts.append((f"{number}.wav", text))
    _write_metadata(folder, ("audio", "text"), texts)
    return rows


def _spoken(text: str, rng: random.Random) -> Iterator[float]:
    for letter in text:
        hertz = 0 if letter == " " else 300 * 2 ** (0.8 * _LETTERS.index(letter))
        for i in range(_RATE // 10):
            yield 0.4 * math.sin(math.tau * hertz * i / _RATE) + rng.gauss(0, 0.05)
        yield from [0.0] * (_RATE // 25)


def _write_wave(path: Path, samples: Sequence[float]) -> None:
    values = array("h", (round(max(-1.0, min(1.0, each)) * 32767) for each in samples))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(values.tobytes())


def _write_metadata(folder: Path, names: tuple[str, str], rows: Sequence[tuple[str, str]]) -> None:
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])


SAMPLES = {
    "docstrings": Sample(
        "docstrings of Python's library, by part: text, label",
        "adapterhub train PATH",
        table=_docstrings,
    ),
    "tickets": Sample(
        "tickets to a shop: text, team, product, urgency",
        "adapterhub train PATH --text text --label team",
        table=_tickets,
    ),
    "reviews": Sample(
        "short opinions on places: review, sentiment", "adapterhub train PATH", table=_reviews
    ),
    "chats": Sample(
        "tickets as chats that a language model answers with JSON: messages",
        "adapterhub train PATH --backbone ID --task causal-lm",
        table=_chats,
    ),
    "digits": Sample(
        "scanned digits, one folder for each",
        "adapterhub train PATH/train --eval PATH/eval --backbone ID",
        folder=_digits,
    ),
    "squares": Sample(
        "drawings with captions", "adapterhub train PATH/train --backbone ID", folder=_squares
    ),
    "tones": Sample(
        "recordings, one folder for each kind",
        "adapterhub train PATH/train --eval PATH/eval --backbone ID",
        folder=_tones,
    ),
    "speech": Sample(
        "words in tones, with their text",
        "adapterhub train PATH/train --backbone ID",
        folder=_speech,
    ),
}
"""The samples by name."""
