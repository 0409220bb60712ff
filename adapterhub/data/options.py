"""Options of the training and evaluation data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from adapterhub.config.options import option
from adapterhub.data.labels import parse_labels


@dataclass(frozen=True)
class DataOptions:
    """The data sources, their format and their columns."""

    train: str | None = option(None, "training data: a file, or a dataset id on the Hub")
    eval: str | None = option(None, "evaluation data: a file, or a dataset id on the Hub")
    text: str = option("text", "the column with the text")
    pair: str | None = option(None, "the column with the second text, for tasks on pairs")
    label: str = option("label", "the column with the label, tags, target text or answers")
    labels: object = option(
        None,
        "names of the labels: 0=negative,1=positive, a mapping {0: negative}, or a list that "
        "fixes their order",
    )
    choices: str | tuple[str, ...] = option(
        "choices", "the column with the list of choices, or a list of columns with one choice each"
    )
    train_target: str | None = option(
        None, "the target texts of train, one per line; both files are then plain text"
    )
    eval_target: str | None = option(None, "the target texts of eval, one per line")
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "hub", "text", "conll"] = option(
        "auto", "the format of the data; auto infers it from the file suffix"
    )
    quoted: bool | None = option(None, "whether quotes enclose TSV fields; null detects it")
    header: bool = option(
        True, "whether the first line names the columns; if not, they are 0, 1, ..."
    )
    rows: int | None = option(None, "train on this many rows, sampled with the run's seed")
    subset: str | None = option(None, "the configuration of a Hub dataset, such as sst2 of glue")
    train_split: str = option("train", "the split of a Hub dataset to train on")
    eval_split: str = option("validation", "the split of a Hub dataset to evaluate on")

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.label_names or None)

    @property
    def label_names(self) -> dict[str, str]:
        """The option `labels`: {value in the data: name}; {} if labels keep their values."""
        return parse_labels(self.labels)

    def target(self, split: str) -> str | None:
        """Return the file with the target texts of a split."""
        return self.train_target if split == "train" else self.eval_target
