"""Hold rows out for evaluation: by a seed, in the same shares of each label, whole groups.

A group is what would be known from training: the rows of one query, text, context, prompt or
conversation, as the task says, or of one value of a column (`data.group`). Nothing that is
evaluated was trained on, and a group whose rows have several labels is held out like any other.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from adapterhub.errors import DataError

E = TypeVar("E")

_LABELS = frozenset({"label", "labels", "tags", "answers"})
SHARE = 0.1  # of the groups
_MIN_TOTAL, _MIN_HELD_OUT, _MOST_HELD_OUT = 10, 20, 10_000
_LARGEST_SHARE = 0.2  # of a small data set
_ROUNDING = 1e-9


def content_of(example: Any) -> Hashable:
    """Return the content of an example: its fields but its label, tags or answers."""
    return tuple([getattr(example, name) for name in _content_fields(type(example))])  # type: ignore[arg-type]


@functools.cache
def _content_fields(kind: type[Any]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.compare and f.name not in _LABELS)


def strata_of(examples: Sequence[Any]) -> list[Hashable]:
    """Return what each example is grouped by: its class, or its rarest tag or label if it has many.

    Examples that learn numbers or texts are one group.
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
    """Return a value without differences of letter case and spaces in its texts."""
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, tuple | list):
        return tuple(map(plain_key, value))
    return value  # type: ignore[no-any-return]


class TooFewGroups(DataError):
    """There are too few rows, or too few groups of them, to hold some out."""


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

    A tenth of the groups is held out, of small data at least 20 or a fifth, and at most 10,000
    rows; or about so many `rows`. Every stratum keeps a row for training.

    Args:
        examples: what is divided.
        seed: draws the groups.
        strata: what each example is drawn by in equal shares, such as its label.
        share: the share to hold out.
        rows: the number of rows to hold out, in place of a share.
        flag: what names a file of such rows, for the error.
        groups: what each example is held out with; None: with those of equal content.

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
        wanted = rows or min(_wanted(len(units), share) * total / len(units), _MOST_HELD_OUT)
        held = _drawn(units, strata, wanted, random.Random(seed))
    if not held:
        what = {"--eval": "evaluation"}.get(flag, flag.lstrip("-"))
        without = "--eval none to train without evaluation"
        raise TooFewGroups(
            f"{total} rows are too few to hold some out for {what}",
            expected=f"at least {_MIN_TOTAL} rows that differ, or {what} data",
            hint=f"{flag} FILE, or {without if flag == '--eval' else f'no {flag}'}",
        )
    sides = ([], [])  # type: tuple[list[E], list[E]]
    for index, example in enumerate(examples):
        sides[index in held].append(example)
    return sides


def _wanted(units: int, share: float) -> int:
    return max(round(share * units), min(_MIN_HELD_OUT, int(_LARGEST_SHARE * units)), 1)


def _drawn(
    units: list[list[int]], strata: Sequence[Hashable], wanted: float, draw: random.Random
) -> set[int]:
    """Draw whole groups of about so many rows, in equal shares of the strata that they are of.

    Large and small groups are drawn alike: one that is only partly due, by a random point of it,
    is the last of its strata. What they are over or under their share is made up for by the next.
    """
    left, total = Counter(strata), len(strata)
    by_stratum: dict[Hashable, list[list[int]]] = defaultdict(list)
    for unit in units:
        by_stratum[frozenset(strata[i] for i in unit)].append(unit)
    held: set[int] = set()
    due, usual = 0.0, total / len(units)

    def stays(unit: list[int]) -> bool:
        """Return whether a stratum has its last rows in a group."""
        return any(count >= left[s] for s, count in Counter(strata[i] for i in unit).items())

    for stratum in draw.sample(list(by_stratum), len(by_stratum)):
        own = by_stratum[stratum]
        due += wanted * sum(map(len, own)) / total
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
