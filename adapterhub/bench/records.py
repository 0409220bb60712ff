"""Records: one JSON file for each finished cell, in a folder that may be copied and merged.

A record has everything shown in the report: scores, predictions without texts, costs, and their
origin. It is written atomically, and never rewritten.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from adapterhub.bench.cells import FORMAT, Cell
from adapterhub.config.options import from_dict
from adapterhub.errors import ConfigError, FileError
from adapterhub.files.atomic import replace_file
from adapterhub.loop.report import without_nan
from adapterhub.pages.page import lower_is_better
from adapterhub.pages.row_scores import Outcome, current_kind

Status = Literal["done", "diverged", "failed"]
_DIGITS = 5  # digits of probabilities and losses kept for each row
PACK = ".jsonl.gz"
_TEXTS = ("id", "texts", "scores")
# For these kinds, labels and predictions are also texts of the user.
_NOT_KEPT = {kind: (*_TEXTS, "label", "prediction") for kind in ("texts", "choices")}


@dataclass(frozen=True)
class PredictedRows:
    """The predictions of a run on the test rows, by column, without their texts.

    Attributes:
        kind: one of `pages.row_scores.KINDS`.
        columns: by field name, such as label, prediction and score, a value for each row.
    """

    kind: str
    columns: dict[str, list[Any]]

    def outcomes(self) -> list[Outcome]:
        """Return a mapping for each row."""
        names = list(self.columns)
        return [
            dict(zip(names, row, strict=True)) for row in zip(*self.columns.values(), strict=True)
        ]


@dataclass(frozen=True)
class Costs:
    """The costs of a run: parameters, bytes, seconds.

    Attributes:
        trained: parameters of the method.
        head: parameters of the task head.
        backbone: parameters of the backbone.
        file_bytes: the adapter's files.
        seconds: the whole run, with evaluations.
        train_seconds: training alone.
        peak_memory: in bytes.
    """

    trained: int = 0
    head: int = 0
    backbone: int = 0
    file_bytes: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    peak_memory: int = 0

    @property
    def all_trained(self) -> int:
        """The trained parameters of the method and of the task head."""
        return self.trained + self.head


@dataclass(frozen=True)
class CellRecord:
    """The result of one cell.

    Attributes:
        key: the digest of the cell.
        cell: the cell.
        status: done, diverged (a loss that is not finite) or failed.
        error: the error, if it is not done.
        metric: the main metric.
        selected: the metrics of the best checkpoint on the selection rows.
        trained: the metrics on a sample of the training rows; for final cells.
        tested: the metrics on the test rows; for final cells.
        rows: the predictions on the test rows; for final cells.
        costs: the costs.
        origin: versions, device, recipe, and digests of data and backbone.
    """

    key: str
    cell: Cell
    status: Status
    error: str = ""
    metric: str = ""
    selected: dict[str, float | None] = field(default_factory=dict)
    trained: dict[str, float | None] = field(default_factory=dict)
    tested: dict[str, float | None] = field(default_factory=dict)
    rows: PredictedRows | None = None
    costs: Costs = field(default_factory=Costs)
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def selects(self) -> float:
        """The selection score: larger is better, -inf without a score."""
        value = self.selected.get(self.metric)
        if self.status != "done" or value is None:
            return -math.inf
        return -value if lower_is_better(self.metric) else value

    def to_json(self) -> str:
        """Return the content of the record's file."""
        return json.dumps({"format": FORMAT, **without_nan(asdict(self))}) + "\n"


class RecordFolder:
    """The records of a study in a folder: `KEY.json` each, or packed, `NAME.jsonl.gz`.

    A pack has one line per record, for studies that are kept: some hundred kilobytes for a hundred
    records. benchmarks/studies/pack.py creates it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Return the file of a record."""
        return self.folder / f"{key}.json"

    def write(self, record: CellRecord) -> None:
        """Write a record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.path(record.key), record.to_json().encode())

    def read(self, key: str) -> CellRecord | None:
        """Return the record of a cell; None if it does not exist.

        Raises:
            FileError: its file is broken.
        """
        path = self.path(key)
        return read_record(path) if path.is_file() else self.packed.get(key)

    def all(self) -> Iterator[CellRecord]:
        """Yield all records, in the order of their keys."""
        files = {path.stem: path for path in self.folder.glob("*.json")}
        for key in sorted(files.keys() | self.packed.keys()):
            yield read_record(files[key]) if key in files else self.packed[key]

    @cached_property
    def packed(self) -> dict[str, CellRecord]:
        """The records of the packs that existed at the first access, by key."""
        packs = sorted(self.folder.glob(f"*{PACK}"))
        return {record.key: record for pack in packs for record in _read_pack(pack)}


def read_record(path: Path) -> CellRecord:
    """Read one record.

    Raises:
        FileError: the file is not a record, or is broken.
    """
    with _reading(path):
        record = _parsed(path.read_bytes())
        if record.key != path.stem:
            raise ValueError("it has another name")
        return record


def _read_pack(path: Path) -> list[CellRecord]:
    with _reading(path):
        if not (lines := gzip.decompress(path.read_bytes()).splitlines()):
            raise ValueError("it is empty")
        return [_parsed(line) for line in lines]


def _parsed(text: bytes) -> CellRecord:
    data = json.loads(text)
    if data.pop("format") != FORMAT:
        raise ValueError("it has another format")
    if isinstance(rows := data.get("rows"), dict):
        rows["kind"] = current_kind(str(rows.get("kind")))
    return from_dict(CellRecord, data)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError,
            ConfigError) as error:  # fmt: skip
        raise FileError(
            f"{path} is not the record of a run: {error}",
            expected="a file that adapterhub bench wrote",
            hint=f"delete {path}: what it recorded is then repeated",
        ) from error


def predicted_rows(kind: str, outcomes: Sequence[Outcome]) -> PredictedRows:
    """Build the columns of some outcomes, without their texts."""
    names = [name for name in outcomes[0] if name not in _NOT_KEPT.get(kind, _TEXTS)]
    columns = {name: [_short(row[name]) for row in outcomes] for name in names}
    return PredictedRows(kind, columns)


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
