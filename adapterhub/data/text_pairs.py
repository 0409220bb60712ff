"""Texts that belong together, read from tables: a text with another one, negatives or a score."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub.data import column_names as names
from adapterhub.data.column_names import plain_name
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.examples import parse_label, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import read_table


@dataclass(frozen=True)
class TextPair:
    """A text, the one that belongs to it, texts that do not, and the score of the pair."""

    text: str
    pair: str | None = None
    negatives: tuple[str, ...] = ()
    label: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts: of the pair, and the negatives."""
        partner = () if self.pair is None else (self.pair,)
        return (self.text, *partner, *self.negatives)


def has_scores(source: str, options: DataOptions, split: str) -> bool:
    """Return whether pairs have scores: a column is chosen or named so, and there is no negative.

    Raises:
        DataError: the source cannot be read.
    """
    if options.label is not None:
        return True
    columns = read_table(source, options, split).columns
    scores = {name for tier in names.NUMBERS for name in tier}
    named = {plain_name(column) for column in columns}
    return bool(scores & named) and not _negatives(columns, options) and "positive" not in named


def pair_columns(
    source: str, options: DataOptions, split: str, *, scored: bool, labelled: bool = True
) -> ColumnChoice:
    """Choose the columns of pairs, `scored` or with negatives; unlabelled, of first texts alone.

    Raises:
        DataError: the source cannot be read, or its columns are in doubt.
    """
    wants = WANTS["scored pairs" if scored else "pairs"]
    return choose_columns(source, options, split, wants if labelled else {"text": "anchor"})


def read_text_pairs(
    source: str, options: DataOptions, split: str, *, scored: bool, labelled: bool = True
) -> list[TextPair]:
    """Read pairs, `scored` or with negatives; unlabelled, the first texts alone.

    Raises:
        DataError: the source cannot be read, its columns are in doubt, or rows are invalid.
    """
    choice = pair_columns(source, options, split, scored=scored, labelled=labelled)
    table, options = choice.table, choice.options
    assert table is not None
    others = [] if scored or not labelled else _negatives(table.columns, options)
    columns = [options.text_column, *[str(options.pair)] * labelled]
    columns += [options.label_column] * (scored and labelled)

    def build(*values: Any) -> TextPair:
        texts, rest = values[: 1 + labelled], values[1 + labelled :]
        label, problem = None, ""
        if scored and labelled:
            label, problem = parse_label(rest[0], True, table.decimal_comma)
        negatives = _flat(values[len(columns) :])
        named = zip(texts, columns, strict=False)
        problems = [text_problem(text, name, allow_empty=not labelled) for text, name in named]
        problems += [text_problem(text, "negatives", allow_empty=False) for text in negatives]
        refuse(*problems, problem)
        pair = texts[1] if labelled else None
        return TextPair(texts[0], pair, tuple(negatives), None if label is None else float(label))

    return read_rows(source, options, split, [*columns, *others], build)


def _flat(cells: Sequence[Any]) -> list[Any]:
    """Return the texts of cells: each is a text or a list of texts; missing ones are left out."""
    lists = [cell if isinstance(cell, list) else [cell] for cell in cells if cell is not None]
    return [text for each in lists for text in each]


def _negatives(columns: Sequence[str], options: DataOptions) -> list[str]:
    """Return the columns with negatives: those that the options name, or that are called so."""
    if options.negatives is not None:
        return [options.negatives] if isinstance(options.negatives, str) else [*options.negatives]
    return [c for c in columns if re.fullmatch(names.NEGATIVE, plain_name(c))]
