"""Options of the training and evaluation data, and the names of labels: `0=negative,1=positive`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from adapterhub.config.options import option
from adapterhub.config.user_folders import is_there
from adapterhub.data.sources import DataSource, several_sources, split_rows
from adapterhub.errors import ConfigError, DataError, counted

NO_GROUPS = "none"  # of data.group: rows are held out individually
PREDICT = "predict"  # the split of data to predict on: each line gets a prediction


@dataclass(frozen=True)
class DataOptions:
    """The data sources, their format and their columns.

    Raises:
        ConfigError: the delimiter is not one character, the share of the test rows is not between 0
            and 1, or the buffer or the workers of a stream are out of range.
    """

    train: str | tuple[str | DataSource, ...] | None = option(
        None,
        "training data: files or dataset ids; FILE#500: 500 rows",
        resumed="same",
    )
    eval: str | None = option(
        None,
        "evaluation data: a file or dataset; none: no evaluation (null: hold rows out)",
        resumed="same",
    )
    test: str | float | None = option(
        None,
        "test data, evaluated once, at the end: a file, dataset, or share of the rows, such as 0.1 "
        "(null: none)",
        resumed="same",
    )
    retain: str | None = option(
        None,
        "rows of other data, scored with the adapter off and on",
        resumed="same",
    )
    text: str | None = option(
        None,
        "the column with the text, or a template: {title}. {body} (null: guess)",
        resumed="recorded",
    )
    pair: str | None = option(
        None, "the column with the second text, for tasks on pairs", resumed="recorded"
    )
    label: str | None = option(
        None,
        "the column with the label, tags, target text or answers (null: guess)",
        resumed="recorded",
    )
    labels: object = option(
        None, "names of labels: 0=no,1=yes, {0: no}, or an ordered list", resumed="fixed"
    )
    ignore_case: bool = option(
        False,
        "labels that differ in nothing but letter case are one, in small letters",
        resumed="fixed",
    )
    choices: str | tuple[str, ...] = option(
        "choices",
        "the column with the list of choices, or a list of columns with one choice each",
        resumed="recorded",
    )
    negatives: str | tuple[str, ...] | None = option(
        None,
        "the column with a negative for each pair, a list of columns, or one of lists",
        resumed="recorded",
    )
    group: str | None = option(
        None,
        "the column whose rows are held out together, such as speaker (null: by the task, such as "
        "all of a prompt; none: each text by itself)",
        resumed="recorded",
    )
    train_target: str | None = option(
        None,
        "the target texts of train, one per line; both files are then plain text",
        resumed="same",
    )
    eval_target: str | None = option(None, "the target texts of eval, one per line", resumed="same")
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "hub", "text", "conll", "conllu"] = (
        option(
            "auto",
            "the format of the data; auto infers it from the file suffix",
            resumed="recorded",
        )
    )
    delimiter: str | None = option(
        None, "the character between fields, such as ';' (null: detect)", resumed="recorded"
    )
    quoted: bool | None = option(
        None, "whether quotes enclose fields (null: detect)", resumed="recorded"
    )
    header: bool | None = option(
        None,
        "whether the first line names the columns, else 0, 1, ... (null: detect)",
        resumed="recorded",
    )
    encoding: str | None = option(
        None, "the encoding of files, such as cp1252 (null: detect)", resumed="recorded"
    )
    stream: bool = option(
        False,
        "read data of any size in pieces: raw text from disk, or rows of Parquet, JSON lines, CSV "
        "or a Hub dataset; files, patterns and URLs (s3://, gs://, az://, hf://)",
        resumed="fixed",
    )
    documents: Literal["paragraphs", "lines"] | None = option(
        None,
        "the documents of a streamed text file (null: paragraphs, between blank lines)",
        resumed="fixed",
    )
    buffer: int | None = option(
        None, "rows of a stream that are shuffled together (null: 10,000)", resumed="fixed"
    )
    workers: int | None = option(
        None,
        "processes that encode the rows of a stream ahead (null: none, the run encodes them)",
        resumed="same",
    )
    skip_empty: bool = option(False, "skip rows with an empty text or label", resumed="recorded")
    rows: int | None = option(
        None, "train on this many rows, sampled with the run's seed", resumed="recorded"
    )
    eval_rows: int | None = option(
        None, "evaluate on at most this many rows, sampled as well", resumed="recorded"
    )
    subset: str | None = option(
        None, "the configuration of a Hub dataset, such as sst2 of glue", resumed="recorded"
    )
    train_split: str = option("train", "the split of a Hub dataset to train on", resumed="recorded")
    eval_split: str = option(
        "validation", "the split of a Hub dataset to evaluate on", resumed="recorded"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.label_names or None)
        object.__setattr__(self, "test", _file_or_share(self.test))
        self._set_sources()
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ConfigError(
                f"data.delimiter is {self.delimiter[:20]!r}",
                expected="one character, such as ';' or '|'",
                hint="for tabs data.format=tsv",
            )
        if (self.buffer is not None and self.buffer < 1) or (self.workers or 0) < 0:
            raise ConfigError(
                f"data.buffer is {self.buffer}, data.workers is {self.workers}",
                expected="a buffer of one row or more, and no or more workers",
            )

    def _set_sources(self) -> None:
        """Bring `train` into its normal form: a path, or two or more named sources.

        Raises:
            ConfigError: the rows of one source are limited twice, or `rows` are of several ones.
        """
        sources = (self.train,) if isinstance(self.train, str) else self.train or ()
        if len(sources) > 1:
            if self.rows is not None:
                raise ConfigError(
                    f"data.rows={self.rows} with {len(sources)} sources",
                    expected="the rows of each source",
                    hint=f"FILE#{self.rows} (data.train=[{{path: FILE, rows: {self.rows}}}, ...])",
                )
            object.__setattr__(self, "train", several_sources(sources))
            return
        train: str | None = None
        for only in sources:
            one = only if isinstance(only, DataSource) else None
            train, rows = split_rows(only) if isinstance(only, str) else (only.path, only.rows)
            if rows is not None and self.rows not in (None, rows):
                raise ConfigError(
                    f"{train}#{rows} next to data.rows={self.rows}", hint="one of both"
                )
            own = {"rows": rows, "eval": one and one.eval, **(one.columns() if one else {})}
            for name, value in own.items():
                if value is not None:
                    object.__setattr__(self, name, value)
        object.__setattr__(self, "train", train)

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources of the training rows, none or more; only several ones have names."""
        if isinstance(self.train, str):
            return (DataSource(self.train, rows=self.rows),)
        return tuple(each for each in self.train or () if isinstance(each, DataSource))

    @property
    def several(self) -> bool:
        """Whether the training rows have several sources."""
        return isinstance(self.train, tuple)

    @property
    def location(self) -> str:
        """The path of the training rows; of several sources, all paths."""
        if isinstance(self.train, str):
            return self.train
        return ", ".join(each.path for each in self.sources)

    def of_source(self, source: DataSource) -> DataOptions:
        """Return the options of one of several sources, as if it were the only one."""
        own = source.columns()
        return replace(self, train=source.path, rows=source.rows, **own)

    @property
    def test_share(self) -> float | None:
        """The share of training rows held out to test on; None for a file, or no test."""
        return self.test if isinstance(self.test, float) else None

    @property
    def test_file(self) -> str | None:
        """The file or dataset to test on; None for a share, or no test."""
        return self.test if isinstance(self.test, str) else None

    @property
    def text_column(self) -> str:
        """The option `text`, or its usual column name."""
        return self.text or "text"

    @property
    def label_column(self) -> str:
        """The option `label`, or its usual column name."""
        return self.label or "label"

    @property
    def label_names(self) -> dict[str, str]:
        """The option `labels`: {value in the data: name}; {} if labels keep their values."""
        return parse_labels(self.labels)

    def target(self, split: str) -> str | None:
        """Return the file with the target texts of a split."""
        return self.train_target if split == "train" else self.eval_target


def _file_or_share(test: str | float | None) -> str | float | None:
    """Parse the option `test`: a file name, or a share (a text, if set by a flag).

    Raises:
        ConfigError: the number is not a share.
    """
    if isinstance(test, str):
        if is_there(test) or not _A_NUMBER.fullmatch(test):
            return test or None
        test = float(test)
    if test is None or 0 < test < 1:
        return test
    raise ConfigError(
        f"data.test is {test:g}",
        expected="a file, or a share of the training rows between 0 and 1",
        hint="--test 0.1, or --test FILE",
    )


_A_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_FRACTION = re.compile(r"-?\d+\.0+")
_FORMS = "0=negative,1=positive, a mapping {0: negative, 1: positive}, or a list [no, yes]"


SEPARATORS = (";", "|", ",")
"""The possible separators of labels in a cell: the first that occurs is used."""


def separator_of(cells: Iterable[str]) -> str | None:
    """Return the separator of several labels in the cells of a column, or None.

    Separated labels are fewer than the distinct cells, and most recur in other cells: "Hotels,
    Restaurants" may also be the name of one class.
    """
    counts = Counter(cells)
    for mark in SEPARATORS:
        parts: Counter[str] = Counter()
        for cell in counts:
            parts.update({part.strip() for part in cell.split(mark)} - {""})
        if any(mark in cell.strip(mark) for cell in counts):
            alone = [part for part, times in parts.items() if times == 1 and part not in counts]
            return mark if len(alone) <= len(parts) // 4 and len(parts) <= len(counts) else None
    return None


def parse_labels(spec: object) -> dict[str, str]:
    """Parse the option `labels`: {value in the file: name}, in the order of the logits.

    The option is text such as `0=negative,1=positive`, a mapping, or a list of labels, which only
    sets their order; None or an empty value is {}.

    Raises:
        ConfigError: the option has another form, or a value or name is empty or occurs twice.
    """
    pairs = _pairs(spec)
    values, names = [value for value, _ in pairs], [name for _, name in pairs]
    problems = [f"{value or name!r}: empty" for value, name in pairs if not (value and name)]
    problems += [f"the value {v!r}: {n} times" for v, n in Counter(values).items() if n > 1]
    problems += [f"the name {v!r}: {n} times" for v, n in Counter(names).items() if n > 1]
    problems += [
        f"{value}={name}: {name!r} is another value of the file"
        for value, name in pairs
        if name != value and name in values
    ]
    if problems:
        raise ConfigError("invalid names of labels", offenders=problems, expected=_FORMS)
    return dict(pairs)


def _pairs(spec: object) -> list[tuple[str, str]]:
    if isinstance(spec, str):
        words = [word.strip() for word in spec.split(",")] if spec.strip() else []
        if words and all("=" in word for word in words):
            pairs = (word.partition("=") for word in words)
            return [(value.strip(), name.strip()) for value, _, name in pairs]
        spec = words
    if isinstance(spec, Mapping) and all(map(_is_label, (*spec.keys(), *spec.values()))):
        return [(str(value).strip(), str(name).strip()) for value, name in spec.items()]
    if isinstance(spec, (list, tuple)) and all(map(_is_label, spec)):
        words = [str(word).strip() for word in spec]
        if not any("=" in word for word in words):
            return list(zip(words, words, strict=True))
    if spec is None:
        return []
    raise ConfigError(f"invalid names of labels: {str(spec)[:200]!r}", expected=_FORMS)


def _is_label(value: object) -> bool:
    return isinstance(value, (str, int, float))


def name_labels(labels: Iterable[str], options: DataOptions, source: str) -> list[str]:
    """Return the name of each label; a label that is already a name is kept.

    Classes written as 0.0 and 1.0 are 0 and 1, unless a name is given for "0.0".

    Raises:
        DataError: labels lack a name; all of them are counted.
    """
    names, labels = options.label_names, list(labels)
    if labels and not names.keys() & set(labels) and all(map(_FRACTION.fullmatch, labels)):
        labels = [label.partition(".")[0] for label in labels]
    if options.ignore_case:
        labels = [label.lower() for label in labels]
        names = {value.lower(): name for value, name in names.items()}
    if not names:
        return labels
    table = {name: name for name in names.values()} | dict(names)
    unnamed = Counter(label for label in labels if label not in table)
    if unnamed:
        flag = ",".join(f"{value}={name}" for value, name in names.items())
        raise DataError(
            f"{source} has labels without a name",
            offenders=[f"{label!r}: {counted(n, 'time')}" for label, n in unnamed.most_common()],
            expected=f"the labels of --labels {flag}, or their names",
            hint=f"--labels {flag},{next(iter(unnamed))}=NAME",
        )
    return [table[label] for label in labels]


def case_note(labels: Sequence[str]) -> list[str]:
    """Report labels that differ only in letter case or spaces, and how to merge them."""
    forms: dict[str, list[str]] = {}
    for label in labels:
        forms.setdefault("".join(label.lower().split()), []).append(label)
    alike = [" and ".join(map(repr, each)) for each in forms.values() if len(each) > 1]
    if not alike:
        return []
    more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
    spaces = any(len({x.lower() for x in each}) > 1 for each in forms.values())
    one = "correct the file" if spaces else "data.ignore_case=true makes them one"
    return [f"{alike[0]}{more} are different labels; {one}"]


def unnamed_note(labels: Sequence[str]) -> list[str]:
    """Suggest names if all labels are bare numbers."""
    if not labels or not all(label.removeprefix("-").isdecimal() for label in labels):
        return []
    few = labels[:3]
    more = ",..." * (len(labels) > len(few))
    names = ",".join(f"{label}=NAME" for label in few)
    return [f"the labels are numbers ({', '.join(few)}{more}); --labels {names}{more} names them"]
