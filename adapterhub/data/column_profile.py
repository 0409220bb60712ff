"""What a column contains, from a sample of its cells: texts, classes, numbers, lists."""

from __future__ import annotations

import functools
import re
import statistics
from dataclasses import dataclass
from typing import Any

from adapterhub.data.column_names import numbers_rows
from adapterhub.data.table import Table

_SAMPLE = 1000  # cells
_LONGEST_CLASS = 60  # characters
_FEW = 20  # rows: fewer say little about how often a value recurs
_NUMBER = re.compile(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?")
_CODE = re.compile(r"(?=.*\d)[\w:./-]+")
_FILE = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")
_TAG = re.compile(r"O|[BIESLU]-\S+")


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
        """The number of different cells."""
        return len(set(self.texts))

    @functools.cached_property
    def numeric(self) -> bool:
        """Whether every cell is a number, perhaps with a decimal comma."""
        return bool(self.texts) and all(map(_NUMBER.fullmatch, self.texts))

    @functools.cached_property
    def length(self) -> float:
        """The mean length of the cells, in characters."""
        return statistics.fmean(map(len, self.texts)) if self.texts else 0.0

    @property
    def is_string(self) -> bool:
        """Whether every cell is a text, however short."""
        return bool(self.values) and all(isinstance(value, str) for value in self.values)

    @property
    def is_words_or_names(self) -> bool:
        """Whether the cells could be short texts: no numbers, dates and codes such as user9."""
        codes = sum(_is_address(t) or bool(_CODE.fullmatch(t)) for t in self.texts)
        return self.is_string and codes < 0.5 * len(self.texts) and not numbers_rows(self.name)

    @property
    def is_text(self) -> bool:
        """Whether the cells are texts by their look: of several words, and hardly one twice."""
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
        """Whether the cells could be names of classes if the column's name says that they are."""
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
        """Whether the cells are classes by their look: few, short, and each one recurs."""
        if not self.could_be_class or numbers_rows(self.name) or self.is_text:
            return False
        few = self.distinct <= max(2, len(self.texts) // 5)
        return self.distinct >= 2 and few and max(map(len, self.texts)) <= _LONGEST_CLASS

    @property
    def is_number(self) -> bool:
        """Whether the cells are numbers that may be learned, not ones that number rows."""
        return self.numeric and self.distinct > 1 and not numbers_rows(self.name)

    @property
    def is_list(self) -> bool:
        """Whether the cells are lists."""
        return bool(self.values) and all(isinstance(v, list | tuple) and v for v in self.values)

    @property
    def is_words(self) -> bool:
        """Whether the cells are lists of texts."""
        return self.is_list and all(isinstance(item, str) for v in self.values for item in v)

    @property
    def is_files(self) -> bool:
        """Whether the cells are names of files, or files as the library datasets stores them."""
        return bool(self.values) and all(
            {"bytes", "path"} <= v.keys() if isinstance(v, dict)
            else isinstance(v, str) and bool(_FILE.search(v))
            for v in self.values
        )  # fmt: skip

    @property
    def is_tags(self) -> bool:
        """Whether the cells are lists of BIO tags."""
        return self.is_words and all(_TAG.fullmatch(tag) for tags in self.values for tag in tags)

    @property
    def is_answers(self) -> bool:
        """Whether the cells are answers as in SQuAD: {text: [...], answer_start: [...]}."""
        return bool(self.values) and all(
            isinstance(v, dict) and {"text", "answer_start"} <= v.keys() for v in self.values
        )


def profile_of(table: Table, name: str) -> ColumnProfile:
    """Profile a column from cells all over the table."""
    cells = table.spread(name, _SAMPLE)
    return ColumnProfile(name, tuple(v for v in cells if v is not None and str(v).strip()))


def _is_address(text: str) -> bool:
    return bool(re.match(r"https?://\S+$|\d{4}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{2,4}", text))
