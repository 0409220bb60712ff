"""Examples from text tables, JSON, Parquet and Hugging Face Hub datasets, read strictly.

A malformed line raises an error with its line number; fields are not shifted, and rows are not
dropped unless the option `skip_empty` is set.

Rows are held out for evaluation by a seed, in the same shares of each label, whole groups.

A group consists of rows that share content: one query, text, context, prompt or conversation, as
defined by the task, or one value of a column (`data.group`). So no evaluated content was trained
on. A group whose rows have several labels is held out like any other.

Notes list probable mistakes with exact figures, a line each, the most important first; only the
first few are shown.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.options import NO_GROUPS, PREDICT, DataOptions
from adapterhub.data.table import Table, first_few
from adapterhub.data.tables import read_table
from adapterhub.errors import DataError, counted, one_line

E = TypeVar("E")

_LABELS = frozenset({"label", "labels", "tags", "answers"})
SHARE = 0.1  # of the groups
_MIN_TOTAL, _MIN_HELD_OUT, _MOST_HELD_OUT = 10, 20, 10_000
_LARGEST_SHARE = 0.2  # of a small data set
_ROUNDING = 1e-9


def content_of(example: Any) -> Hashable:
    """Return the content of an example: its fields without label, tags or answers."""
    return tuple([getattr(example, name) for name in _content_fields(type(example))])  # type: ignore[arg-type]


@functools.cache
def _content_fields(kind: type[Any]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.compare and f.name not in _LABELS)


def strata_of(examples: Sequence[Any]) -> list[Hashable]:
    """Return the stratum of each example: its class, or the rarest of several tags or labels.

    Examples with numbers or texts as labels are one stratum.
    """
    single = [getattr(example, "label", None) for example in examples]
    if all(isinstance(label, str) for label in single):
        return list(single)
    many = [_labels_of(example) for example in examples]
    counts = Counter(label for labels in many for label in labels)
    return [
        min(labels, key=lambda name: (counts[name], str(name)), default=None) for labels in many
    ]


def _labels_of(example: Any) -> list[Hashable]:
    tags = getattr(example, "tags", None)
    if tags is not None:
        return sorted({tag.partition("-")[2] or tag for tag in tags if tag != "O"})
    label = getattr(example, "labels", getattr(example, "label", None))
    if isinstance(label, list | tuple | set | frozenset):
        return list(label)
    return [label] if isinstance(label, str) else []


def plain_key(value: Any) -> Hashable:
    """Return a value with letter case and spaces of its texts normalized."""
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, tuple | list):
        return tuple(map(plain_key, value))
    return value  # type: ignore[no-any-return]


class TooFewGroups(DataError):
    """There are too few rows, or too few groups of rows, to hold any out."""


def hold_out(
    examples: Sequence[E],
    seed: int,
    strata: Sequence[Hashable],
    share: float = SHARE,
    *,
    rows: int | None = None,
    flag: str = "--eval",
    groups: Sequence[Hashable] | None = None,
) -> tuple[list[E], list[E]]:
    """Split examples into training and evaluation, each in the original order.

    A tenth of the groups is held out (for small data at least 20 or a fifth), at most 10,000 rows;
    or about `rows` rows. Every stratum keeps a row for training.

    Args:
        examples: the examples to split.
        seed: the seed that draws the groups.
        strata: the stratum of each example, such as its label; strata are drawn in equal shares.
        share: the share to hold out.
        rows: the number of rows to hold out, instead of a share.
        flag: the flag that names a file of such rows, for the error.
        groups: the group of each example; None groups examples of equal content.

    Raises:
        TooFewGroups: there are too few examples, or too few groups.
    """
    total = len(examples)
    keys = [plain_key(content_of(e)) for e in examples] if groups is None else groups
    by_key: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        by_key[key].append(index)
    units = list(by_key.values())
    held: set[int] = set()
    if total >= _MIN_TOTAL:
        target = rows or min(_wanted(len(units), share) * total / len(units), _MOST_HELD_OUT)
        held = _drawn(units, strata, target, random.Random(seed))
    if not held:
        purpose = {"--eval": "evaluation"}.get(flag, flag.lstrip("-"))
        without = "--eval none to train without evaluation"
        few = "1 row is" if total == 1 else f"{total} rows are"
        raise TooFewGroups(
            f"{few} too few to hold any out for {purpose}",
            expected=f"at least {_MIN_TOTAL} rows that differ, or {purpose} data",
            hint=f"{flag} FILE, or {without if flag == '--eval' else f'no {flag}'}",
        )
    sides = ([], [])  # type: tuple[list[E], list[E]]
    for index, example in enumerate(examples):
        sides[index in held].append(example)
    return sides


def _wanted(units: int, share: float) -> int:
    return max(round(share * units), min(_MIN_HELD_OUT, int(_LARGEST_SHARE * units)), 1)


def _drawn(
    units: list[list[int]], strata: Sequence[Hashable], target: float, draw: random.Random
) -> set[int]:
    """Draw whole groups with about the given number of rows, in equal shares of their strata.

    Large and small groups have equal chances: a group that only partly fits is decided by a random
    point in it, and is the last of its strata. The next strata make up for any excess or deficit.
    """
    left, total = Counter(strata), len(strata)
    by_stratum: dict[Hashable, list[list[int]]] = defaultdict(list)
    for unit in units:
        by_stratum[frozenset(strata[i] for i in unit)].append(unit)
    held: set[int] = set()
    due, usual = 0.0, total / len(units)

    def stays(unit: list[int]) -> bool:
        """Return whether a group has the last rows of a stratum."""
        return any(count >= left[s] for s, count in Counter(strata[i] for i in unit).items())

    for stratum in draw.sample(list(by_stratum), len(by_stratum)):
        own = by_stratum[stratum]
        due += target * sum(map(len, own)) / total
        most = max(due, 2 * usual)
        for unit in draw.sample(own, len(own)):
            if len(unit) > most or stays(unit):
                continue
            point = 0.5 if len(unit) == 1 else draw.random()
            if point * len(unit) >= due - _ROUNDING:
                break
            left.subtract(strata[i] for i in unit)
            held.update(unit)
            due -= len(unit)
        due = max(-usual, min(usual, due))
    if not held:
        able = [unit for unit in units if 2 * len(unit) <= total and not stays(unit)]
        if able:
            smallest = min(draw.sample(able, len(able)), key=len)
            held.update(smallest)
    return held


_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """An example with a group named by the data; None leaves the grouping to the task."""

    group: str | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Example(Grouped):
    """One text or text pair with a class name, a number (regression) or no label."""

    text: str
    pair: str | None = None
    label: str | float | None = None


class Streamed(ABC):
    """Examples that are read from disk sequentially, with a known digest."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """The sha256 of the content."""


def read_examples(
    source: str,
    options: DataOptions,
    *,
    labelled: bool,
    regression: bool = False,
    split: str = "train",
) -> list[Example]:
    """Read the examples in a file or Hub dataset, in order.

    Labels are floats for `regression`, else stripped texts, or the class names of a Hub dataset.

    Raises:
        DataError: the source is missing, empty or malformed, lacks a column, or has missing texts
            or labels, values of the wrong type, or empty texts with a label.
    """
    kinds = WANTS["numbers" if regression else "classes"]
    choice = choose_columns(source, options, split, kinds, labelled=labelled)
    options, commas = choice.options, choice.table is not None and choice.table.decimal_comma
    text_columns = [name for name in (options.text, options.pair) if name is not None]
    columns = [*text_columns, options.label_column] if labelled else text_columns

    def build(*values: object) -> Example:
        texts, labels = values[: len(text_columns)], values[len(text_columns) :]
        problems = [
            text_problem(value, name, allow_empty=not labelled)
            for value, name in zip(texts, text_columns, strict=True)
        ]
        label, problem = parse_label(labels[0], regression, commas) if labels else (None, "")
        if problem or any(problems):
            refuse(*problems, problem)
        text, pair = (*texts, None)[:2]
        return Example(text, pair, label)  # type: ignore[arg-type]

    return read_rows(source, options, split, columns, build)


def read_rows(
    source: str,
    options: DataOptions,
    split: str,
    columns: Sequence[str],
    build: Callable[..., E],
) -> list[E]:
    """Build an example from the column values of each row, in order.

    `build` reports an invalid row as a `ValueError` with one argument per problem.

    Raises:
        DataError: the source cannot be read, lacks a column or has invalid rows; lists all of them.
    """
    table = read_table(source, options, split)
    values = [list(column) for column in table.take(columns)]
    groups = _groups(table, options, split)
    problems: list[str] = []
    empty = 0
    examples = []
    for line, group, *row in zip(table.lines, groups, *values, strict=True):
        try:
            example = build(*row)
            examples.append(example if group is None else _in_group(example, group))
        except ValueError as error:
            is_empty = all(isinstance(problem, EmptyCell) for problem in error.args)
            empty += is_empty
            if not (is_empty and options.skip_empty):
                problems += [f"{table.unit} {line}: {problem}" for problem in error.args]
    if problems:
        skip = f"data.skip_empty=true skips the {empty:,} with an empty cell"
        skip = skip if empty and split != PREDICT else ""
        raise DataError(
            f"{source} has invalid rows",
            offenders=first_few(problems),
            hint=skip or "correct or delete these rows",
        )
    if not examples:
        raise AllEmpty(f"{source} has empty cells in all of its {len(table.lines):,} rows")
    return examples


def _groups(table: Table, options: DataOptions, split: str) -> Iterable[object]:
    """Return the `data.group` cell of each row; evaluation data may lack the column."""
    column = options.group
    if column in (None, NO_GROUPS) or (split != "train" and column not in table.columns):
        return [None] * len(table.lines)
    return next(iter(table.take([str(column)])))


def _in_group(example: E, group: object) -> E:
    """Return an example with a group.

    Raises:
        ValueError: the cell is not a name or a number.
    """
    if group != group or not str(group).strip():  # NaN marks a missing number
        return example
    if not isinstance(group, str | int | float):
        raise ValueError(f"the group has type {type(group).__name__}, expected a name or number")
    return dataclasses.replace(example, group=str(group).strip())  # type: ignore[type-var]


class AllEmpty(DataError):
    """Every row was skipped because of an empty cell."""


class EmptyCell(str):
    """An empty cell, whose row the option `skip_empty` leaves out."""


def refuse(*problems: str) -> None:
    """Raise a ValueError with the non-empty problems, if any."""
    if nonempty := [problem for problem in problems if problem]:
        raise ValueError(*nonempty)


def read_texts(source: str, options: DataOptions, split: str = "eval") -> list[Example]:
    """Read the texts of a source, without labels.

    Raises:
        DataError: as in `read_examples`.
    """
    choice = choose_columns(source, options, split, WANTS["texts"], labelled=False)
    return read_examples(source, choice.options, labelled=False, split=split)


def sample(examples: Sequence[E], rows: int | None, seed: int) -> list[E]:
    """Draw a random subset of `rows` examples in their original order; None keeps all.

    Raises:
        DataError: `rows` is less than 1.
    """
    if rows is not None and rows < 1:
        raise DataError(f"rows is {rows}", expected="1 or more, or null for all")
    if rows is None or rows >= len(examples):
        return list(examples)
    indices = random.Random(seed).sample(range(len(examples)), rows)
    return [examples[i] for i in sorted(indices)]


def labels_of(examples: Iterable[Example]) -> list[str]:
    """List the distinct class labels, sorted; numerically if all are numbers."""
    return sorted_labels(e.label for e in examples if isinstance(e.label, str))


def sorted_labels(values: Iterable[str]) -> list[str]:
    """List distinct labels, sorted; numerically if all are numbers."""
    labels = sorted(set(values))
    if all(_NUMBER.fullmatch(label) for label in labels):
        labels.sort(key=float)
    return labels


def check_labels(train_labels: Sequence[str], eval_labels: Iterable[str | float | None]) -> None:
    """Reject fewer than two training labels, and evaluation labels missing from training.

    Raises:
        DataError: the labels are invalid.
    """
    if len(train_labels) < 2:
        raise DataError(
            f"the training data has {counted(len(train_labels), 'label')}",
            offenders=[repr(label) for label in train_labels],
            expected="two or more classes",
            hint="check the option label, the name of the label column",
        )
    unseen = collections.Counter(label for label in eval_labels if label not in train_labels)
    if unseen:
        raise DataError(
            "the evaluation data has labels that the training data lacks",
            offenders=[
                f"{label!r}: {counted(unseen[label], 'time')}" for label in sorted(unseen, key=str)
            ],
            expected=f"one of {', '.join(first_few([repr(label) for label in train_labels]))}",
        )


def data_hash(examples: Iterable[Any]) -> str:
    """Return the sha256, in hex, of the examples as JSON lines of their fields, in order.

    The line of an `Example` is `[text, pair, label]`. Fields excluded from comparison do not count
    as content.
    """
    if isinstance(examples, Streamed):
        return examples.sha256
    digest = hashlib.sha256()
    for example in examples:
        fields = (field.name for field in dataclasses.fields(example) if field.compare)
        values = [getattr(example, name) for name in fields]
        row = json.dumps(values, separators=(",", ":"))
        digest.update(f"{row}\n".encode("ascii"))
    return digest.hexdigest()


def text_problem(value: object, column: str, *, allow_empty: bool) -> str:
    """Return the reason why a value of a column is not text, or "".

    In any format, an empty text counts as missing if it would be learned from.
    """
    if value is None:
        return EmptyCell(f"{column!r} is missing")
    if not isinstance(value, str):
        return f"{column!r} has type {type(value).__name__}, expected text"
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        return f"{column!r} contains a lone surrogate, which is not valid Unicode"
    return "" if allow_empty or value.strip() else EmptyCell(f"{column!r} is empty")


def parse_label(
    value: object, regression: bool = False, decimal_comma: bool = False
) -> tuple[str | float | None, str]:
    """Return the label of a cell, or None and a description of the problem."""
    text = "" if value is None else str(value).strip()
    if not text or value != value:  # NaN marks a missing float
        return None, EmptyCell("the label is empty")
    if not isinstance(value, (str, int, float)):
        return None, f"the label has type {type(value).__name__}, expected a string or number"
    if not regression:
        return text, ""
    if decimal_comma and text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        return None, f"the label {text[:40]!r} is not a number"
    return number, ""


_MOST_NOTES = 5
_MANY_LABELS = 100
_MAJORITY = 0.9  # share of one label from which accuracy is not informative
_NAMED = 3  # labels or texts listed in a note
_SHOWN = 40  # characters
ENOUGH_FOR_SCORES = 30  # rows: with fewer, the interval of a share is wider than a third
_ENOUGH = 20  # rows: fewer are a trial, not data
_NOTED_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?")


def notes_on(
    train: Sequence[Any], evaluation: Sequence[Any], labels: Sequence[str]
) -> tuple[str, ...]:
    """Return notes for the user on the data before training, at most five lines.

    `labels` are the classes; empty for tasks without classes.
    """
    single = bool(labels) and all(isinstance(getattr(e, "label", None), str) for e in train)
    contents = [content_of(example) for example in train]
    notes = [
        *(_about_labels(train) if single and len(train) >= _ENOUGH else ()),
        *_about_shared(set(contents), evaluation),
        *(_about_conflicts(contents, train) if single else ()),
        *(_about_contents(train) if single and len(train) >= _ENOUGH else ()),
    ]
    return tuple(notes[:_MOST_NOTES])


def notes_on_test(train: Sequence[Any], tested: Sequence[Any], labels: Sequence[str]) -> list[str]:
    """Return a note if some test rows are among the training rows."""
    notes = notes_on(train, tested, labels)
    return [note.replace("evaluation", "test") for note in notes if "evaluation" in note]


def notes_on_scores(
    rows: int, labels: Collection[object], what: str = "evaluation", more: str = ""
) -> list[str]:
    """Explain why the scores of rows are not informative: few rows, or only one class.

    Args:
        rows: the number of rows.
        labels: the classes of the rows; empty without classes.
        what: the purpose of the rows.
        more: the flag for a file with more rows.
    """
    notes = []
    if rows < ENOUGH_FOR_SCORES:
        number = _count(rows, f"{what} row", f"{what} rows")
        better = f"{more}, or more rows" if more else "evaluate on more"
        notes.append(f"{number}: the scores are uncertain; {better}")
    if rows > 1 and len(set(labels)) == 1:
        label = _quoted(str(next(iter(labels))))
        notes.append(
            f"all {rows:,} {what} rows are of one class, {label}: the scores tell nothing "
            f"about others"
        )
    return notes


def classes_in(examples: Sequence[Any], labels: Sequence[str]) -> set[str]:
    """Return the classes of examples; none if examples have no class or several."""
    own = [getattr(example, "label", None) for example in examples] if labels else []
    return {label for label in own if isinstance(label, str)}


def _about_labels(train: Sequence[Any]) -> Iterator[str]:
    counts = Counter(example.label for example in train)
    rows = f"{len(train):,} training rows"
    if len(counts) > _MANY_LABELS or len(counts) > len(train) / 3:
        yield f"{len(counts):,} labels in {rows}: is it the right column? (--label)"
        return
    if len(counts) > 10 and all(map(_NOTED_NUMBER.fullmatch, counts)):
        yield f"the {len(counts):,} labels are all numbers: --task regression learns their size"
    label, count = counts.most_common(1)[0]
    if count > _MAJORITY * len(train) and len(counts) > 1:
        yield (
            f"{_quoted(label)} is the label of {count / len(train):.1%} of the {rows}: "
            "compare macro_f1, not accuracy"
        )
    if once := [label for label, count in counts.items() if count == 1]:
        yield f"{_count(len(once), 'label has', 'labels have')} one training row: {_few(once)}"


def _about_shared(seen: set[Hashable], evaluation: Sequence[Any]) -> Iterator[str]:
    shared = sum(content_of(example) in seen for example in evaluation)
    if shared:
        yield (
            f"{shared:,} of {len(evaluation):,} evaluation rows ({shared / len(evaluation):.1%}) "
            "are also training rows: the scores are too good"
        )


def _about_conflicts(contents: Sequence[Hashable], train: Sequence[Any]) -> Iterator[str]:
    rows = Counter(contents)
    labels: dict[Hashable, set[str]] = defaultdict(set)
    for content, example in zip(contents, train, strict=True):
        if rows[content] > 1:
            labels[content].add(example.label)
    conflicts = [content for content, each in labels.items() if len(each) > 1]
    if conflicts:
        number = list(contents).index(conflicts[0])
        kind, shown = _named(train[number], conflicts[0])
        words = _count(len(conflicts), f"{kind} occurs", f"{kind}s occur")
        yield (
            f"{words} with different labels, in {sum(rows[c] for c in conflicts):,} training rows, "
            f"such as {_quoted(shown)}"
        )


def _named(example: Any, content: Hashable) -> tuple[str, str]:
    """Return the kind of an example, a text or a file, and the text or the file name."""
    name = getattr(example, "name", None)
    return ("text", str(content[0])) if name is None else ("file", name)  # type: ignore[index]


def _about_contents(train: Sequence[Any]) -> Iterator[str]:
    texts = [example.text for example in train if hasattr(example, "text")]
    if not texts:
        return
    distinct = len(set(texts))
    if distinct < len(texts) / 2:
        yield f"only {distinct:,} of the {len(texts):,} training texts are different"
    words = [example.label for example in train]
    if min(map(len, set(words))) >= 4 and not any(map(_NOTED_NUMBER.fullmatch, set(words))):
        named = sum(w.lower() in text.lower() for w, text in zip(words, texts, strict=True))
        if named > _MAJORITY * len(texts):
            yield f"{named / len(texts):.1%} of the training texts contain their label as a word"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(_quoted, names[:_NAMED])) + more


def _quoted(text: str) -> str:
    return f"'{one_line(text, _SHOWN)}'"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
