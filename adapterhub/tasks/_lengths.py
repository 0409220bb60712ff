"""Lengths of examples before and after truncation, with one pass of the tokenizer.

All examples are encoded without a limit. Those that fit a limit have the same rows under it, so
only the others are encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adapterhub.errors import AdapterhubError
from adapterhub.status import counting
from adapterhub.tasks._base import Encoded, Task
from adapterhub.tasks._rows import Row, Setting

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    Counts = NDArray[int64]


CHUNK = 1000  # examples that are encoded between two reports of how many are done


@dataclass(frozen=True)
class LostTokens:
    """What truncation removes from one part of the examples, their texts or their targets.

    Attributes:
        part: "texts" or "targets".
        option: the option that limits the part.
        limit: the limit, in tokens.
        examples: the number of examples.
        cut: the number of examples that lose tokens.
        tokens: the tokens of these examples, before truncation.
        lost: how many of these tokens are removed.
        longest: the tokens of the longest example.
    """

    part: str
    option: str
    limit: int
    examples: int
    cut: int
    tokens: int
    lost: int
    longest: int

    def sentence(self, name: str) -> str:
        """Describe the loss; `name` is that of the data, such as "training"."""
        return (
            f"{self.cut:,} of {self.examples:,} {name} {self.part} are longer than {self.limit:,} "
            f"tokens and lose {self.lost / self.tokens:.0%} of their tokens "
            f"(longest {self.longest:,})"
        )


def encode_whole(task: Task, examples: Sequence[Any], setting: Setting) -> Encoded:
    """Encode labelled examples without truncation."""
    unlimited = setting.unlimited if task.limits(setting) else setting
    return encode_in_chunks(task.unlimited(), examples, unlimited)


def encode_in_chunks(task: Task, examples: Sequence[Any], setting: Setting) -> Encoded:
    """Encode labelled examples as `task.encode` does, and report how many are done.

    Packed rows, and what is refused, depend on all examples at once.
    """
    if task.packs or len(examples) <= CHUNK:
        return task.encode(examples, setting, labelled=True)
    rows: list[Row] = []
    owners: list[int] = []
    with counting(len(examples), "encoding") as done:
        for start in range(0, len(examples), CHUNK):
            chunk = examples[start : start + CHUNK]
            try:
                encoded = task.encode(chunk, setting, labelled=True)
            except AdapterhubError:
                return task.encode(examples, setting, labelled=True)
            rows += encoded.rows
            owners += (start + owner for owner in encoded.owners)
            done(len(chunk))
    return replace(encoded, examples=tuple(examples), rows=rows, owners=tuple(owners))


def longest_row(whole: Encoded) -> int:
    """Return the number of tokens of the longest row."""
    return max((whole.task.row_lengths(row)[0] for row in whole.rows), default=0)


def truncate(whole: Encoded, task: Task, setting: Setting) -> Encoded:
    """Return the rows of `task.encode` under the limits of a setting, if the task has limits."""
    if not task.limits(setting):
        return whole
    if task.packs:
        return task.encode(whole.examples, setting, labelled=True)
    pairs = list(zip(whole.owners, whole.rows, strict=True))
    cut = {owner for owner, row in pairs if not task.fits(row, setting)}
    if not cut:
        return Encoded(task, setting, whole.examples, whole.rows, whole.owners)
    long = sorted(cut)
    again = encode_in_chunks(task, [whole.examples[i] for i in long], setting)
    kept = [(owner, row) for owner, row in pairs if owner not in cut]
    kept += [(long[owner], row) for owner, row in zip(again.owners, again.rows, strict=True)]
    kept.sort(key=lambda pair: pair[0])  # stable: the windows of an example stay in order
    owners, rows = tuple(owner for owner, _ in kept), [row for _, row in kept]
    return Encoded(task, setting, whole.examples, rows, owners)


def lost_tokens(whole: Encoded, encoded: Encoded) -> list[LostTokens]:
    """Count what truncation removes; examples that are split into windows lose nothing."""
    task, setting = encoded.task, encoded.setting
    if not task.limits(setting):
        return []
    if not encoded.owners:  # packed: encoded once more, in rows of their own
        unpacked = task.unlimited()
        encoded = truncate(whole, unpacked, setting)
    before = _tokens(whole)
    after = before if encoded.rows is whole.rows else _tokens(encoded)
    found = []
    for (name, option, limit), b, a in zip(task.limits(setting), before, after, strict=True):
        cut = a < b
        found.append(
            LostTokens(
                part=name,
                option=option,
                limit=limit,
                examples=len(b),
                cut=int(cut.sum()),
                tokens=int(b[cut].sum()),
                lost=int((b - a)[cut].sum()),
                longest=int(b.max(initial=0)),
            )
        )
    return found


def lost_of_each(encoded: Encoded) -> list[int]:
    """Count the tokens that were cut of each example; only those of full rows are encoded again."""
    task, setting = encoded.task, encoded.setting
    lost = [0] * len(encoded.examples)
    limits = [limit - getattr(task, "new_tokens", 0) for _, _, limit in task.limits(setting)]
    if not limits or not encoded.owners:
        return lost
    full = {
        owner
        for owner, row in zip(encoded.owners, encoded.rows, strict=True)
        if any(n >= limit for n, limit in zip(task.row_lengths(row), limits, strict=True))
    }
    if not full:
        return lost
    long = sorted(full)
    examples = [encoded.examples[index] for index in long]
    whole = task.unlimited().encode(examples, setting.unlimited, labelled=False)
    missing = _tokens(whole).sum(0) - _tokens(encoded)[:, long].sum(0)
    for index, count in zip(long, missing.clip(min=0).tolist(), strict=True):
        lost[index] = count
    return lost


def _tokens(encoded: Encoded) -> Counts:
    """Count the tokens of each example by part, over all of its rows: (parts, examples)."""
    import numpy as np

    task, owners = encoded.task, np.array(encoded.owners, dtype=np.int64)
    parts, count = len(task.limits(encoded.setting)), len(encoded.examples)
    lengths = np.array([task.row_lengths(row) for row in encoded.rows], dtype=np.int64)
    lengths = lengths.reshape(-1, parts).T
    return np.stack([np.bincount(owners, row, count).astype(np.int64) for row in lengths])
