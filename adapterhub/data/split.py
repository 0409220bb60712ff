"""Hold rows out for evaluation: by a seed, in the same shares of each label, equal texts together.

An example's content is all that it has but its labels. Examples of equal content stay on one side,
so that nothing that is evaluated was trained on.
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
_SHARE = 0.1
_MIN_TOTAL, _MIN_HELD_OUT, _MOST_HELD_OUT = 10, 20, 10_000
_LARGEST_SHARE = 0.2  # of a small data set


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
        return sorted({tag.partition("-")[2] for tag in tags if "-" in tag})
    label = getattr(example, "labels", getattr(example, "label", None))
    if isinstance(label, list | tuple | set | frozenset):
        return list(label)
    return [label] if isinstance(label, str) else []


def hold_out(
    examples: Sequence[E],
    seed: int,
    strata: Sequence[Hashable],
    share: float = _SHARE,
    *,
    rows: int | None = None,
    flag: str = "--eval",
) -> tuple[list[E], list[E]]:
    """Split examples into training and evaluation, each in the original order.

    A tenth is held out, of small data at least 20 rows or a fifth, and at most 10,000 rows; or
    about so many `rows`. Every stratum keeps a row for training.

    Args:
        examples: what is divided.
        seed: draws the rows.
        strata: the group of each example, such as its label.
        share: the share to hold out.
        rows: the number of rows to hold out, in place of a share.
        flag: what names a file of such rows, for the error.

    Raises:
        DataError: there are too few examples, or too few different ones.
    """
    total = len(examples)
    wanted = rows or min(max(round(share * total), min(_MIN_HELD_OUT, int(_LARGEST_SHARE * total))),
                 _MOST_HELD_OUT)  # fmt: skip
    held: set[int] = set()
    if total >= _MIN_TOTAL:
        draw = random.Random(seed)
        groups = _groups(examples, strata)
        for stratum, quota in _quotas(groups, wanted, draw).items():
            held |= _drawn(groups[stratum], quota, draw)
    if not held:
        what = {"--eval": "evaluation"}.get(flag, flag.lstrip("-"))
        without = "--eval none to train without evaluation"
        raise DataError(
            f"{total} rows are too few to hold some out for {what}",
            expected=f"at least {_MIN_TOTAL} rows that differ, or {what} data",
            hint=f"{flag} FILE, or {without if flag == '--eval' else f'no {flag}'}",
        )
    sides = ([], [])  # type: tuple[list[E], list[E]]
    for index, example in enumerate(examples):
        sides[index in held].append(example)
    return sides


def _groups(examples: Sequence[Any], strata: Sequence[Hashable]) -> dict[Hashable, list[list[int]]]:
    """Group the indices of examples by stratum and, within one, by equal content."""
    by_content: dict[Hashable, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_content[content_of(example)].append(index)
    groups: dict[Hashable, list[list[int]]] = defaultdict(list)
    for indices in by_content.values():
        # Equal contents with several labels stay in training, with the label of the first.
        same = len({strata[i] for i in indices}) == 1
        groups[strata[indices[0]] if same else _Mixed].append(indices)
    return groups


class _Mixed:
    """The stratum of contents that have several labels: none of them is held out."""


def _quotas(
    groups: dict[Hashable, list[list[int]]], wanted: int, draw: random.Random
) -> dict[Hashable, int]:
    """Divide the rows to hold out among the strata: in proportion, by largest remainder."""
    sizes = {s: sum(map(len, each)) for s, each in groups.items() if s is not _Mixed}
    total = sum(sizes.values())
    exact = {s: wanted * size / total for s, size in sizes.items()}
    quotas = {s: min(int(share), sizes[s] - 1) for s, share in exact.items()}
    order = list(exact)
    draw.shuffle(order)
    order.sort(key=lambda s: int(exact[s]) - exact[s])
    for stratum in order[: wanted - sum(quotas.values())]:
        quotas[stratum] = min(quotas[stratum] + 1, sizes[stratum] - 1)
    return quotas


def _drawn(groups: list[list[int]], quota: int, draw: random.Random) -> set[int]:
    """Draw whole groups of about `quota` rows; at least one group stays."""
    held: set[int] = set()
    for group in draw.sample(groups, len(groups))[:-1]:
        if len(held) + len(group) <= quota:
            held.update(group)
    return held
