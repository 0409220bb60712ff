"""Cells: the training runs of a study, each known by the digest of what decides its result."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from adapterhub.errors import ConfigError

FORMAT = 1

Stage = Literal["search", "final"]


@dataclass(frozen=True, order=True)
class Group:
    """What is tuned together: one method on one task, with some number of training rows.

    `steps` is the number of optimizer steps of a whole run, `rate` the method's default learning
    rate, around which others are tried.
    """

    task: str
    method: str
    rows: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        task: the name of the task in the study.
        method: the name of the method in the study.
        rows: the number of training rows.
        steps: the number of optimizer steps.
        rate: the peak learning rate.
        seed: of initialization, sampling and batch order.
        stage: whether it serves to choose a rate, or has the chosen one.
    """

    task: str
    method: str
    rows: int
    steps: int
    rate: float
    seed: int
    stage: Stage

    @property
    def group(self) -> tuple[str, str, int]:
        """The task, the method and the rows."""
        return self.task, self.method, self.rows

    def describe(self) -> str:
        """Return the cell in a few words, for progress."""
        rows = f"{self.rows:,} rows" if self.stage == "search" else f"{self.rows:,} rows, final"
        return f"{self.task}: {self.method}, rate {self.rate:.1e}, seed {self.seed}, {rows}"


@dataclass(frozen=True)
class Shard:
    """A part of the cells of a study: number `number` of `count`, from 1."""

    number: int = 1
    count: int = 1

    def has(self, key: str) -> bool:
        """Return whether the cell of a key is in this part."""
        return int(key, 16) % self.count == self.number - 1


def parse_shard(text: str) -> Shard:
    """Read a shard such as 2/4.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard {text!r}", expected="K/N, with K from 1 to N: 2/4")
    return Shard(int(found[1]), int(found[2]))


def cell_key(cell: Cell, context: Any) -> str:
    """Return the digest of a cell: equal for equal results only."""
    facts = {k: v for k, v in asdict(cell).items() if k not in ("task", "method", "stage")}
    # A cell of the search is not the final one, which is tested as well.
    content = json.dumps([FORMAT, cell.stage, facts, context], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]
