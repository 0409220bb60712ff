"""Infer the columns that a task reads if the options do not name them and no doubt remains.

A column with a usual name (`adapterhub.data.column_names`) is chosen if its cells fit; otherwise
the only column whose cells look like the required kind. Two candidates are ambiguous: the error
shows every column with samples, and the flags to type. Requirements have the form {option: kind},
such as {"text": "text", "pair": "text", "label": "class"}.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterhub.data import column_names as names
from adapterhub.data.media_formats import PICTURE_SUFFIXES, SOUND_SUFFIXES
from adapterhub.data.options import DataOptions, separator_of
from adapterhub.data.table import Table, first_few, is_template, numbers_rows, plain_name
from adapterhub.data.tables import BIO_TAG, keep_table, read_table
from adapterhub.errors import DataError

Wants = Mapping[str, str]
"""The kind of column that each option names."""

WANTS: Mapping[str, Wants] = {
    "texts": {"text": "text"},
    "images": {"text": "image", "label": "class"},
    "captioned images": {"text": "image", "label": "caption"},
    # The answer first: the remaining column may be the question.
    "images with questions": {"text": "image", "label": "reply", "pair": "asked"},
    "audio": {"text": "audio", "label": "class"},
    "speech": {"text": "audio", "label": "transcript"},
    "classes": {"text": "text", "pair": "text", "label": "class"},
    "labels": {"text": "text", "pair": "text", "label": "labels"},
    "numbers": {"text": "text", "pair": "text", "label": "number"},
    "targets": {"text": "prompt", "label": "target"},
    "tags": {"text": "tokens", "label": "tags"},
    "answers": {"text": "question", "pair": "context", "label": "answers"},
    "questions": {"text": "question", "pair": "context", "label": "target"},
    "questions with choices": {"text": "question", "choices": "choices", "label": "chosen"},
    "choices": {"text": "stem", "choices": "choices", "label": "chosen"},
    "pairs": {"text": "anchor", "pair": "positive"},
    "comparisons": {"text": "prompts", "label": "preferred", "pair": "rejected"},
    "answered prompts": {"text": "prompts", "label": "solution"},
    "rated responses": {"text": "prompts", "label": "response", "pair": "liked"},
    "scored pairs": {"text": "anchor", "pair": "positive", "label": "number"},
}
"""The columns that tasks require, by learning target."""


OPTIONAL = frozenset({"text", "asked"})
"""The kinds of optional second columns."""

FILES = frozenset({"image", "audio"})
"""The kinds of columns whose cells are files, which are unmistakable."""

# Columns with these names used to be the only ones read; problems of their cells are reported.
_USUAL = {"text": "text", "pair": "context", "label": "label", "choices": "choices"}

# Kinds with their own names.
_BY_NAME = frozenset(
    {
        "transcript",
        "asked",
        "reply",
        "prompts",
        "preferred",
        "rejected",
        "positive",
        "response",
        "liked",
        "solution",
        "tests",
    }
)


@dataclass(frozen=True)
class _Kind:
    """A kind of column: its usual names, in tiers, and tests of named and unnamed columns."""

    names: tuple[tuple[str, ...], ...]
    named: Callable[[ColumnProfile], bool]
    unnamed: Callable[[ColumnProfile], bool]
    words: str


def _never(profile: ColumnProfile) -> bool:
    return False


_ASKED = ("question", "prompt", "instruction", "query", "input", "user")
_WRITTEN = ("answer", "answers", "response", "output", "completion", "reply", "assistant")
_KINDS = {
    "text": _Kind(names.TEXTS, lambda p: p.is_string, lambda p: p.is_text, "the text"),
    "class": _Kind(names.CLASSES, lambda p: p.could_be_class, lambda p: p.is_class, "the label"),
    "labels": _Kind((("labels", "tags", "topics"), *names.CLASSES),
                    lambda p: bool(p.texts) or p.is_list,
                    lambda p: p.is_joined, "the labels"),
    "number": _Kind(names.NUMBERS, lambda p: p.numeric, lambda p: p.is_number, "the number"),
    "prompt": _Kind(names.PROMPTS, lambda p: p.is_string, lambda p: p.is_text, "the text"),
    "target": _Kind(names.TARGETS, lambda p: p.is_string, _never, "the target text"),
    "chat": _Kind((("messages",), ("conversations", "text")), lambda p: p.is_list,
                  lambda p: p.is_list, "the chats"),
    "tokens": _Kind(names.TOKENS, lambda p: p.is_words, lambda p: p.is_words and not p.is_tags,
                    "the list of words"),
    "tags": _Kind(names.TAGS, lambda p: p.is_list, lambda p: p.is_tags, "the list of tags"),
    "question": _Kind(names.QUESTIONS, lambda p: p.is_string, _never, "the question"),
    "context": _Kind(names.CONTEXTS, lambda p: p.is_string, _never, "the context"),
    "answers": _Kind(names.ANSWERS, lambda p: p.is_answers, lambda p: p.is_answers, "the answers"),
    "stem": _Kind(names.STEMS, lambda p: p.is_string, _never, "the text"),
    "choices": _Kind(names.CHOICES, lambda p: p.is_choices, lambda p: p.is_choices, "the choices"),
    "anchor": _Kind(names.ANCHORS, lambda p: p.is_string, lambda p: p.is_text, "the first text"),
    "positive": _Kind(names.POSITIVES, lambda p: p.is_string, lambda p: p.is_text,
                      "the text that belongs to it"),
    "image": _Kind(names.PICTURES, lambda p: p.is_string or p.is_files,
                   lambda p: p.is_files, "the image files"),
    "asked": _Kind(names.ASKED, lambda p: p.is_string, _never, "the questions"),
    "reply": _Kind(names.REPLIES, lambda p: bool(p.texts), _never, "the answers"),
    "caption": _Kind(names.CAPTIONS, lambda p: bool(p.texts), lambda p: p.is_text,
                     "the captions"),
    "audio": _Kind(names.SOUNDS, lambda p: p.is_string or p.is_files,
                   lambda p: p.is_files, "the audio files"),
    "transcript": _Kind(names.TRANSCRIPTS, lambda p: p.is_string, lambda p: p.is_text,
                        "the spoken text"),
    "prompts": _Kind(names.ASKINGS, lambda p: p.is_string or p.is_list,
                     lambda p: p.is_text or p.is_asking, "the prompt"),
    "preferred": _Kind(names.PREFERRED, lambda p: p.is_string or p.is_list or p.is_message,
                       _never, "the chosen response"),
    "rejected": _Kind(names.REJECTED, lambda p: p.is_string or p.is_list or p.is_message,
                      _never, "the rejected response"),
    "response": _Kind(names.RESPONSES, lambda p: p.is_string or p.is_list or p.is_message,
                      _never, "the response"),
    "liked": _Kind(names.LIKED, lambda p: p.is_switch, lambda p: p.is_switch,
                   "the mark that is true for a good response"),
    "solution": _Kind(names.SOLUTIONS, lambda p: bool(p.texts), _never, "the answer"),
    "tests": _Kind(names.UNIT_TESTS, lambda p: p.is_string or p.is_list, _never,
                   "the Python code that tests an answer"),
    "chosen": _Kind(names.CHOSEN, lambda p: bool(p.texts), _never, "the right choice"),
}  # fmt: skip


def described_columns(wants: Wants) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return a description of the column of each option, and its usual names."""
    return {
        option: (_KINDS[kind].words, tuple(name for tier in _KINDS[kind].names for name in tier))
        for option, kind in wants.items()
    }


@dataclass(frozen=True)
class ColumnChoice:
    """Options with all columns named, the table they were inferred from, and the guesses."""

    options: DataOptions
    table: Table | None = None
    notes: tuple[str, ...] = ()

    def places(self, rows: int) -> list[str]:
        """Return the location of each row, for errors; [] if rows were skipped."""
        table = self.table
        if table is None or len(table.lines) != rows:
            return []
        return [f"{table.shown_source}, {table.unit} {line}" for line in table.lines]


def choose_columns(
    source: str, options: DataOptions, split: str, wants: Wants, *, labelled: bool = True
) -> ColumnChoice:
    """Infer the columns that the options do not name; without `labelled`, all but the label.

    Columns named by the options are used. In data to predict on without column names, the columns
    are inferred again, since the options name columns of the training data.

    Raises:
        DataError: the source cannot be read, or its columns are ambiguous.
    """
    table = read_table(source, options, split)
    named = {n: table.named(v) for n in wants if isinstance(v := getattr(options, n), str)}
    options = replace(options, **named)  # type: ignore[arg-type]
    chooser = _Chooser(table, options, wants, split)
    chosen = chooser.choose([name for name in wants if labelled or name != "label"])
    resolved = replace(options, **chosen)  # type: ignore[arg-type]
    resolved = replace(resolved, text=resolved.text_column, label=resolved.label_column)
    keep_table(table, source, resolved, split)
    return ColumnChoice(resolved, table, chooser.notes(chosen))


class _Chooser:
    """Chooses columns of one table, each at most once."""

    def __init__(self, table: Table, options: DataOptions, wants: Wants, split: str) -> None:
        self.table, self.options, self.wants = table, options, wants
        self.recorded = split != "train"
        self._profiles: dict[str, ColumnProfile] = {}

    def profile(self, name: str) -> ColumnProfile:
        if name not in self._profiles:
            self._profiles[name] = profile_of(self.table, name)
        return self._profiles[name]

    def choose(self, options: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
        """Return a column or template for each required option that is not set."""
        open_ones = [name for name in options if self._is_open(name)]
        taken = {
            column
            for name in options
            if name not in open_ones and isinstance(value := getattr(self.options, name), str)
            for column in self.table.uses(value)
        }
        taken |= {column for column in self.table.columns if column == self.options.group}
        chosen: dict[str, str | tuple[str, ...]] = {}
        if "text" in open_ones and self.wants.get("pair") == "text":
            chosen |= self._pair(taken, [n for n in ("text", "pair") if n in open_ones])
        for name in sorted(open_ones, key=lambda n: n == "text" and self.wants[n] == "text"):
            if name in chosen or (name == "pair" and self.wants[name] == "text"):
                continue
            free = [c for c in self.table.columns if c not in taken | _columns_in(chosen)]
            column = self._choices(free) if name == "choices" else self._column(name, free)
            if name == "label" and column is None and isinstance(chosen.get("choices"), tuple):
                column = _right_of(chosen["choices"])
            if column is not None:
                chosen[name] = column
        optional = {"pair"} if self.wants.get("pair") in OPTIONAL else set()
        if missing := [name for name in open_ones if name not in {*chosen, *optional}]:
            raise self._doubt(chosen, missing)
        return chosen

    def _is_open(self, name: str) -> bool:
        value = getattr(self.options, name)
        if value is None:
            return True
        if name == "choices":
            return value == "choices" and value not in self.table.columns
        if not self.recorded or value in self.table.columns or is_template(value):
            return False
        if self.wants[name] in FILES:  # folders and tables of files have other columns
            return True
        # Numbers name columns in files without column names, other names in files with them.
        return value.isdecimal() or self.table.header is False

    def _column(self, name: str, free: Sequence[str]) -> str | None:
        """Return the column of an option by its name, or otherwise by its cells."""
        kind = _KINDS[self.wants[name]]
        if self.wants[name] == "stem" and (both := self._about(free)):
            return both
        usual = _USUAL.get(name, "")
        if usual in free and self.wants[name] not in {*FILES, *_BY_NAME}:
            return None if self._is_no_class(str(usual)) and self.wants[name] == "class" else usual
        flags = switches(map(self.profile, free)) if self.wants[name] == "labels" else []
        for tier in kind.names:
            hits = [c for c in free if plain_name(c) in tier and kind.named(self.profile(c))]
            hits = [c for c in hits if len(flags) < 2 or c not in flags]
            if len(hits) == 1:
                return self._with_title(hits[0], free) if self.wants[name] == "text" else hits[0]
            if hits:
                best = [c for c in hits if plain_name(c) == tier[0]]
                both = self._with_title(hits[0], free) if self.wants[name] == "text" else None
                return best[0] if len(best) == 1 and tier is kind.names[0] else both
        if len(flags) > 1:
            return ",".join(flags)
        if any(plain_name(c) in tier for c in free for tier in kind.names) and name == "label":
            return None  # a column has the right name but the wrong cells: ambiguous
        alike = [c for c in free if kind.unnamed(self.profile(c))]
        if len(alike) == 1:
            return alike[0]
        if self.wants[name] in ("prompt", "target") and self.table.header is False:
            return self._in_order(name, free)
        only = [c for c in free if self.profile(c).is_words_or_names]
        texts = self.wants[name] in ("text", "prompt") and not alike
        return only[0] if texts and len(free) == len(only) == 1 else None

    def _is_no_class(self, column: str) -> bool:
        """Return whether a column named label holds texts or row numbers instead."""
        profile = self.profile(column)
        return bool(profile.texts) and not profile.could_be_class

    def _with_title(self, column: str, free: Sequence[str]) -> str | None:
        """Return a template of title and body, if there is exactly one of each."""
        plain = {plain_name(c): c for c in free if self.profile(c).is_text}
        titles = [plain[n] for n in names.TITLES if n in plain]
        bodies = [plain[n] for n in names.BODIES if n in plain and plain[n] not in titles]
        if len(titles) == len(bodies) == 1 and column in (*titles, *bodies):
            return f"{{{titles[0]}}}. {{{bodies[0]}}}"
        others = [c for c in free if plain_name(c) in names.TEXTS[1] and self.profile(c).is_text]
        return column if set(others) <= {column} or plain_name(column) == "text" else None

    def _about(self, free: Sequence[str]) -> str | None:
        """Return a template of a question and its context, if there is exactly one of each."""
        plain = {plain_name(c): c for c in free if self.profile(c).is_string}
        questions = [plain[n] for n in ("question", "query") if n in plain]
        about = [plain[n] for n in names.ABOUT if n in plain]
        return (
            f"{{{about[0]}}}\n\n{{{questions[0]}}}" if len(questions) == len(about) == 1 else None
        )

    def _in_order(self, name: str, free: Sequence[str]) -> str | None:
        """Return the text and target columns of an unnamed table with just two columns."""
        strings = [c for c in self.table.columns if self.profile(c).is_string]
        if len(strings) != 2 or len(self.table.columns) != 2:
            return None
        column = strings[0] if name == "text" else strings[1]
        return column if column in free else None

    def _pair(self, taken: set[str], options: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
        """Return two columns that form a pair by their names, or match a recorded pair."""
        plain = {plain_name(c): c for c in self.table.columns if c not in taken}
        if "pair" in options and self.options.pair is None:
            pairs = [
                (plain[one], plain[two]) for one, two in names.PAIRS
                if one in plain and two in plain and "text" not in plain
                and self.profile(plain[one]).is_string and self.profile(plain[two]).is_string
            ]  # fmt: skip
            return dict(zip(("text", "pair"), pairs[0], strict=True)) if len(pairs) == 1 else {}
        texts = [c for c in plain.values() if self.profile(c).is_text]
        wanted_both = len(options) == 2 and len(texts) == 2
        return dict(zip(("text", "pair"), texts, strict=True)) if wanted_both else {}

    def _choices(self, free: Sequence[str]) -> tuple[str, ...] | str | None:
        """Return the column with lists of choices, or the columns with one choice each."""
        several = choice_families(free)
        return several[0] if len(several) == 1 else self._column("choices", free)

    def notes(self, chosen: Mapping[str, str | tuple[str, ...]]) -> tuple[str, ...]:
        """Report the columns read and guessed, and count the empty cells in templates."""
        table = self.table
        notes = [f"{table.shown_source}: {table.described()}", *table.notes]
        guessed = {n: chosen[n] for n in self.wants if n in chosen and chosen[n] != n}
        if guessed:
            notes.append(f"guessed: {' '.join(_typed(n, c) for n, c in guessed.items())}")
        for name in self.wants:
            value = chosen.get(name) or getattr(self.options, name)
            if isinstance(value, str) and value not in table.columns and is_template(value):
                notes += self._empty_cells(value)
        return tuple(notes)

    def _empty_cells(self, template: str) -> list[str]:
        columns = [c for c in dict.fromkeys(self.table.uses(template)) if c in self.table.columns]
        counts = {c: sum(_is_empty(v) for v in self.table.column(c)) for c in columns}
        return [
            f"{count:,} of {len(self.table.lines):,} rows have no {column!r}: it is left out there"
            for column, count in counts.items()
            if count
        ]

    def _doubt(
        self, chosen: Mapping[str, str | tuple[str, ...]], missing: Sequence[str]
    ) -> DataError:
        """Build the error that shows the columns and the flags to type."""
        lacking = [f"{_KINDS[self.wants[name]].words} (--{name})" for name in missing]
        flags = {
            **{n: c for n, c in chosen.items() if isinstance(c, str)},
            **self._likely(chosen, missing),
        }
        typed = " ".join(_typed(name, flags[name]) for name in self.wants if name in flags)
        if self.table.columns == ("text",) and self.table.header is False and "label" in missing:
            return DataError(
                f"{self.table.source} has one text a line, and no labels",
                offenders=first_few(self.table.samples()),
                expected="a table with a column of labels, or a task that learns the texts",
                hint="--task 'causal-lm(data=text)', or masked-lm for an encoder",
            )
        if task := self._task_of_files():
            return DataError(
                f"{self.table.source} has files that are not text",
                offenders=first_few(self.table.samples()),
                expected=f"the column with {' and '.join(lacking)}, or another task",
                hint=f"--task {task}",
            )
        return DataError(
            f"cannot tell which columns of {self.table.source} to use",
            offenders=first_few(self.table.samples()),
            expected=f"the column with {' and '.join(lacking)}{self._unfit(missing)}",
            hint=f"{self._other_task(missing)}{typed}{self.table.header_hint()}",
        )

    def _other_task(self, missing: Sequence[str]) -> str:
        """Return the flag for a task that fits a table without a class column, or ""."""
        if "label" not in missing or self.wants["label"] != "class":
            return ""
        plain = {plain_name(column): column for column in self.table.columns}
        questions = [plain[n] for n in _ASKED if n in plain]
        written = [plain[n] for n in _WRITTEN if n in plain]
        if questions and written:
            columns = f"{_typed('text', questions[0])} {_typed('label', written[0])}"
            return f"--task causal-lm {columns}, for a model that writes; or "
        profiles = map(self.profile, self.table.columns)
        if numbers := [p.name for p in profiles if p.is_number and not p.could_be_class]:
            return f"--task regression {_typed('label', numbers[-1])}; or "
        return ""

    def _task_of_files(self) -> str | None:
        """Return the task for a column of files; None without files, or if they are read."""
        if not FILES.isdisjoint(self.wants.values()):
            return None
        for profile in filter(lambda p: p.is_files, map(self.profile, self.table.columns)):
            names = (v["path"] if isinstance(v, dict) else v for v in profile.values)
            ends = {Path(str(name)).suffix.lower() for name in names}
            if ends <= {*PICTURE_SUFFIXES}:
                return "image-classification"
            if ends <= {*SOUND_SUFFIXES}:
                return "audio-classification"
        return None

    def _unfit(self, missing: Sequence[str]) -> str:
        """Explain why a column with the name of a label was not chosen."""
        if "label" not in missing or self.wants["label"] != "class":
            return ""
        tiers = _KINDS["class"].names
        named = (c for c in self.table.columns if any(plain_name(c) in tier for tier in tiers))
        unfit = [p for p in map(self.profile, named) if p.texts and not p.could_be_class]
        values = [f"{p.name!r} has {p.distinct:,} values in {len(p.texts):,} rows" for p in unfit]
        numbers = ", or --task regression" if any(p.numeric for p in unfit) else ""
        return "".join(f"; {value}" for value in values[:2]) + numbers

    def _likely(
        self, chosen: Mapping[str, str | tuple[str, ...]], missing: Sequence[str]
    ) -> dict[str, str]:
        """Return a column to suggest for each missing option, or COLUMN if none is likely."""
        free = [c for c in self.table.columns if c not in _columns_in(chosen)]
        profiles = [p for c in free if (p := self.profile(c)).values]
        likely: dict[str, str] = {}
        for name in missing:
            kind = _KINDS[self.wants[name]]
            rest = [p for p in profiles if p.name not in likely.values()]
            fitting = [p for p in rest if kind.unnamed(p)] or [p for p in rest if kind.named(p)]
            if self.wants[name] == "class":  # row numbers, and texts as classes, are not learned
                fitting = [p for p in fitting if not numbers_rows(p.name) and not p.is_text]
            if self.wants[name] in ("class", "number"):
                fitting.sort(key=lambda p: (numbers_rows(p.name), p.distinct))
            elif self.wants[name] == "text":
                fitting.sort(key=lambda p: -p.length)
            likely[name] = fitting[0].name if fitting else "COLUMN"
        return likely


def choice_families(columns: Iterable[str]) -> list[tuple[str, ...]]:
    """List the columns with one choice each, such as ending0, ending1 and ending2.

    Of correct_answer, distractor1 and distractor2, the right one comes first.
    """
    families: dict[str, list[str]] = {}
    plain = {column: plain_name(column) for column in columns}
    for column, name in plain.items():
        if name[:-1] in (*names.CHOICE_COLUMNS, "") and name[-1:].isalnum():
            families.setdefault(name[:-1], []).append(column)
    several = [tuple(family) for family in families.values() if len(family) > 1]
    wrong = [c for c, n in plain.items() if n[:-1] in names.WRONG_COLUMNS and n[-1:].isdigit()]
    right = next((c for n in names.RIGHT_COLUMNS for c in plain if plain[c] == n), None)
    return [(right, *sorted(wrong, key=plain_name))] if right and wrong else several


def _right_of(columns: str | tuple[str, ...]) -> str | None:
    """Return the first choice column if it has the right choices, which are not a label."""
    return columns[0] if plain_name(columns[-1])[:-1] in names.WRONG_COLUMNS else None


def marked_choices(value: object) -> bool:
    """Return whether a cell has choices keyed by letters: {"A": "a text", "B": "another"}."""
    if not isinstance(value, dict) or len(value) < 2:
        return False
    letters = [key for key in value if isinstance(key, str) and len(key) == 1 and key.isalnum()]
    return len(letters) == len(value) and all(isinstance(text, str) for text in value.values())


def switches(profiles: Iterable[ColumnProfile]) -> list[str]:
    """List the columns of 1 and 0, of true and false or of yes and no, that may be labels."""
    return [p.name for p in profiles if p.is_switch and "," not in p.name]


def _columns_in(chosen: Mapping[str, str | tuple[str, ...]]) -> set[str]:
    """Return the chosen columns; a template's columns stay free, as few kinds need them."""
    return {
        column
        for value in chosen.values()
        for column in ([value] if isinstance(value, str) else value)
    }


def _is_empty(value: object) -> bool:
    return value is None or value != value or not str(value).strip()


def _typed(name: str, column: str | tuple[str, ...]) -> str:
    """Format a choice as typed on the command line."""
    if not isinstance(column, str):
        return f"'data.{name}=[{', '.join(column)}]'"
    shown = column.replace("\n", "\\n")
    quoted = column if re.fullmatch(r"[\w-]+", column) else f"'{shown}'"
    return f"data.{name}={quoted}" if name == "choices" else f"--{name} {quoted}"


_SAMPLE = 1000  # cells
_LONGEST_CLASS = 60  # characters
_FEW = 20  # rows: fewer are too few to judge how often a value recurs
_NUMBER = re.compile(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?")
_CODE = re.compile(r"(?=.*\d)[\w:./-]+")
_FILE = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")


@dataclass(frozen=True)
class ColumnProfile:
    """A sample of the cells of a column that are not empty."""

    name: str
    values: tuple[Any, ...]

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The cells as texts; empty if some are lists or mappings."""
        scalar = all(isinstance(v, str | int | float) for v in self.values)
        return tuple(str(v).strip() for v in self.values) if scalar else ()

    @functools.cached_property
    def distinct(self) -> int:
        """The number of distinct cells."""
        return len(set(self.texts))

    @functools.cached_property
    def numeric(self) -> bool:
        """Return whether every cell is a number, perhaps with a decimal comma."""
        return bool(self.texts) and all(map(_NUMBER.fullmatch, self.texts))

    @functools.cached_property
    def length(self) -> float:
        """The mean length of the cells, in characters."""
        return statistics.fmean(map(len, self.texts)) if self.texts else 0.0

    @property
    def is_string(self) -> bool:
        """Return whether every cell is a text, however short."""
        return bool(self.values) and all(isinstance(value, str) for value in self.values)

    @property
    def is_words_or_names(self) -> bool:
        """Return whether the cells could be short texts, not numbers, dates or codes."""
        codes = sum(_is_address(t) or bool(_CODE.fullmatch(t)) for t in self.texts)
        return self.is_string and codes < 0.5 * len(self.texts) and not numbers_rows(self.name)

    @property
    def is_asking(self) -> bool:
        """Return whether the cells are short, mostly distinct texts that may be prompts."""
        return self.is_words_or_names and self.distinct > 0.5 * len(self.texts) > 1

    @property
    def is_message(self) -> bool:
        """Return whether the cells are messages."""
        return bool(self.values) and all(
            isinstance(v, dict)
            and (v.keys() >= {"role", "content"} or v.keys() >= {"from", "value"})
            for v in self.values
        )

    @property
    def is_text(self) -> bool:
        """Return whether the cells look like texts: several words, and mostly distinct."""
        if not self.is_string or self.numeric or numbers_rows(self.name):
            return False
        words = statistics.fmean(len(text.split()) for text in self.texts)
        # Languages without spaces have long words.
        wordy = words >= 3 or (self.length >= 12 and not "".join(self.texts[:50]).isascii())
        return wordy and not any(map(_is_address, self.texts[:20])) and (
            self.distinct > 0.3 * len(self.texts) or words >= 8
        )  # fmt: skip

    @property
    def could_be_class(self) -> bool:
        """Return whether the cells could be class names, given a matching column name."""
        if not self.texts:
            return False
        recurs = self.distinct <= max(2, len(self.texts) // 2)
        if max(map(len, self.texts)) > 4 * _LONGEST_CLASS and self.distinct > len(self.texts) // 3:
            return False
        fractions = self.numeric and any(not float(t.replace(",", ".")).is_integer()
                                         for t in self.texts)  # fmt: skip
        if fractions and self.distinct > _FEW:
            return False
        return recurs if len(self.texts) >= _FEW else self.length <= _LONGEST_CLASS

    @property
    def is_class(self) -> bool:
        """Return whether the cells look like classes: few, short and recurring."""
        if not self.could_be_class or numbers_rows(self.name) or self.is_text:
            return False
        few = self.distinct <= max(2, len(self.texts) // 5)
        return self.distinct >= 2 and few and max(map(len, self.texts)) <= _LONGEST_CLASS

    @property
    def is_number(self) -> bool:
        """Return whether the cells are numbers to learn, not row numbers."""
        return self.numeric and self.distinct > 1 and not numbers_rows(self.name)

    @property
    def is_switch(self) -> bool:
        """Return whether the cells are 1 and 0, true and false or yes and no, not row numbers."""
        states = {text.lower().removesuffix(".0") for text in self.texts}
        known = any(states <= pair for pair in ({"0", "1"}, {"true", "false"}, {"yes", "no"}))
        return bool(states) and known and not numbers_rows(self.name)

    @property
    def is_joined(self) -> bool:
        """Return whether the cells look like several labels each, which recur in other cells."""
        if not self.could_be_class or self.is_text or numbers_rows(self.name):
            return False
        return separator_of(self.texts) is not None

    @property
    def is_list(self) -> bool:
        """Return whether the cells are lists."""
        return bool(self.values) and all(isinstance(v, list | tuple) and v for v in self.values)

    @property
    def is_words(self) -> bool:
        """Return whether the cells are lists of texts."""
        return self.is_list and all(isinstance(item, str) for v in self.values for item in v)

    @property
    def is_labels(self) -> bool:
        """Return whether the cells are lists of names or numbers."""
        return self.is_list and all(isinstance(i, str | int) for v in self.values for i in v)

    @property
    def is_choices(self) -> bool:
        """Return whether the cells are lists of choices: texts, possibly with marks."""
        return self.is_words or (bool(self.values) and all(
            marked_choices(v)
            or (isinstance(v, dict) and isinstance(v.get("text"), list) and "label" in v)
            or (isinstance(v, list) and v and all(
                isinstance(i, dict) and {"text", "label"} <= i.keys() for i in v))
            for v in self.values
        ))  # fmt: skip

    @property
    def is_files(self) -> bool:
        """Return whether the cells are file names, or files stored by the library datasets."""
        return bool(self.values) and all(
            {"bytes", "path"} <= v.keys() if isinstance(v, dict)
            else isinstance(v, str) and bool(_FILE.search(v))
            for v in self.values
        )  # fmt: skip

    @property
    def is_tags(self) -> bool:
        """Return whether the cells are lists of BIO tags."""
        return self.is_words and all(BIO_TAG.fullmatch(tag) for tags in self.values for tag in tags)

    @property
    def is_answers(self) -> bool:
        """Return whether the cells are answers as in SQuAD: {text: [...], answer_start: [...]}."""
        return bool(self.values) and all(
            isinstance(v, dict) and {"text", "answer_start"} <= v.keys() for v in self.values
        )


def profile_of(table: Table, name: str) -> ColumnProfile:
    """Profile a column from cells spread over the table."""
    cells = table.spread(name, _SAMPLE)
    return ColumnProfile(name, tuple(v for v in cells if v is not None and str(v).strip()))


def _is_address(text: str) -> bool:
    return bool(re.match(r"https?://\S+$|\d{4}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{2,4}", text))
