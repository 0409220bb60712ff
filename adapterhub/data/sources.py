"""The sources of the training rows of a run: files, patterns and datasets, each with its columns.

    train a.jsonl b.parquet hf:imdb#500
    data: {train: [{path: a.jsonl, weight: 2}, {path: hf:imdb, rows: 500, label: rating}]}

A run with one source has its path in `data.train`. One with several has a list of `DataSource`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterhub.config.options import option
from adapterhub.config.user_folders import is_there
from adapterhub.errors import ConfigError

_ROWS = re.compile(r"(.+)#([^#/]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_TAKEN = ("test", "mean", "eval")  # prefixes of other metrics
_FORMS = "FILE#500: 500 rows of a file, drawn with the run's seed"
COLUMNS = ("text", "pair", "label", "labels", "choices", "negatives", "group", "format", "subset",
           "train_split", "eval_split")  # fmt: skip


@dataclass(frozen=True)
class DataSource:
    """One of several sources of training rows; an option that is null is taken from `data`.

    Raises:
        ConfigError: the path is missing, or the weight, the rows or the name are invalid.
    """

    path: str = option("", "a file, a pattern in quotes, or a dataset id on the Hub; FILE#500")
    name: str | None = option(None, "the name of its scores (null: by the path)", omitted=True)
    weight: float = option(
        1.0, "how often its rows are drawn, relative to a source of weight 1",
        omitted=True,
    )  # fmt: skip
    rows: int | None = option(
        None, "use this many of its rows, sampled with the run's seed", omitted=True
    )
    eval: str | None = option(
        None, "evaluation data of this source: a file or dataset (null: hold rows out)",
        omitted=True,
    )  # fmt: skip
    text: str | None = option(None, "its column of the text, or a template", omitted=True)
    pair: str | None = option(None, "its column of the second text", omitted=True)
    label: str | None = option(None, "its column of the label or target", omitted=True)
    labels: object = option(None, "its names of labels: 0=no,1=yes", omitted=True)
    choices: str | tuple[str, ...] | None = option(None, "its columns of choices", omitted=True)
    negatives: str | tuple[str, ...] | None = option(None, "its columns of negatives", omitted=True)
    group: str | None = option(None, "its column of groups", omitted=True)
    format: str | None = option(None, "its format", omitted=True)
    subset: str | None = option(None, "its configuration on the Hub", omitted=True)
    train_split: str | None = option(None, "its split to train on", omitted=True)
    eval_split: str | None = option(None, "its split to evaluate on", omitted=True)

    def __post_init__(self) -> None:
        path, rows = split_rows(self.path)
        if not path:
            raise ConfigError("a source of data.train has no path", expected="{path: FILE}")
        if rows is not None and self.rows is not None:
            raise ConfigError(f"{self.path} next to rows: {self.rows}", hint="one of both")
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "rows", self.rows if rows is None else rows)
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(
                f"the weight of {path} is {self.weight:g}",
                expected="a number above 0",
                hint="leave out a source that should not be drawn",
            )
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"{path}: {self.rows} rows", expected="1 or more", hint=_FORMS)
        if self.name is not None and (not _NAME.fullmatch(self.name) or self.name in _TAKEN):
            raise ConfigError(
                f"the name of {path} is {self.name[:60]!r}",
                expected="1 to 40 of A-Z a-z 0-9 _ -, beginning with a letter or digit, and not "
                + ", ".join(_TAKEN),
            )

    def columns(self) -> dict[str, Any]:
        """Return the options of `data` that this source has for itself."""
        own = {name: getattr(self, name) for name in COLUMNS}
        return {name: value for name, value in own.items() if value is not None}


def split_rows(text: str) -> tuple[str, int | None]:
    """Split FILE#500 into a path and a number of rows; a file with such a name is the file itself.

    A prefix `hf:` of a dataset id is dropped.

    Raises:
        ConfigError: the text after `#` is not a number of rows.
    """
    match, rows = None if is_there(text) else _ROWS.fullmatch(text), None
    if match and (match[2].isdecimal() or "://" not in text):
        text, number = match.groups()
        if not (number.isascii() and number.isdecimal() and int(number[:12])):
            raise ConfigError(
                f"{text}#{number} is not a file, and {number[:40]!r} is not a number of rows",
                expected=_FORMS,
            )
        rows = int(number[:12])
    is_id = text.startswith("hf:") and not text.startswith("hf://") and not is_there(text)
    return text.removeprefix("hf:") if is_id else text, rows


def several_sources(listed: Sequence[str | DataSource]) -> tuple[DataSource, ...]:
    """Return named sources, in order.

    Raises:
        ConfigError: two sources are equal, or have the same name.
    """
    sources = [DataSource(each) if isinstance(each, str) else each for each in listed]
    # An unhashable option, such as a mapping of labels, is compared by its text.
    same = Counter(repr(replace(each, weight=1.0, name=None)) for each in sources)
    twice = [s.path for s in sources if same[repr(replace(s, weight=1.0, name=None))] > 1]
    if twice:
        raise ConfigError(
            f"{twice[0]} is a source of data.train twice",
            expected="each source once",
            hint="data.train=[{path: FILE, weight: 2}, ...] draws the rows of FILE twice as often",
        )
    names = [each.name for each in sources if each.name]
    if again := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"two sources of data.train have the name {again[0]}")
    stems = Counter(_stem(each.path) for each in sources)
    named = []
    for each in sources:
        if each.name is None:
            stem = _stem(each.path)
            first = stem if stems[stem] == 1 else _plain(f"{Path(each.path).parent.name}-{stem}")
            numbered = (f"{first[:36]}-{n}" for n in range(2, len(sources) + 2))
            free = (n for n in (first, *numbered) if n not in (*names, *_TAKEN))
            names.append(next(free))
            each = replace(each, name=names[-1])
        named.append(each)
    return tuple(named)


def _stem(path: str) -> str:
    """Return the name of a file without its suffix; of a pattern, its folder's name."""
    place = Path(path.rstrip("/").removesuffix(".gz"))
    stem = place.stem
    if any(mark in stem for mark in "*?["):
        stem = place.parent.name or place.stem
    return _plain(stem)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:40] or "data"
