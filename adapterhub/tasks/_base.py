"""What a task is: its examples, how they become tensors, and what the model's outputs mean.

A task is one frozen dataclass of options in one file, registered by its name. A task spec reads
like a method spec: `seq2seq`, `seq2seq(metric=rouge)`, `{seq2seq: {metric: rouge}}`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.config.options import from_dict, to_dict
from adapterhub.config.spec import parse_calls, spec_error
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, unknown

IGNORED = -100  # the label of a position that the loss leaves out
EXAMPLES = "classification, seq2seq(metric=rouge) or {seq2seq: {metric: rouge}}"

Row = dict[str, Any]
"""The model's inputs for one example, without padding; lists of numbers, and perhaps `labels`."""


@dataclass(frozen=True)
class Setting:
    """What examples are encoded for. `max_length` is that of an input, in tokens, `positions` all
    that the model has; `seed` decides random inputs."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    labels: tuple[str, ...] = ()
    seed: int = 0
    positions: int = 1 << 30


class Prediction(ABC):
    """What a model says of one example."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """For JSON lines."""

    @abstractmethod
    def __str__(self) -> str:
        """For one line on a terminal."""


@dataclass(frozen=True)
class Generated(Prediction):
    """A text that a model wrote."""

    text: str

    def as_dict(self) -> dict[str, Any]:
        """The text, under a name that the input does not have."""
        return {"generated": self.text}

    def __str__(self) -> str:
        return self.text.replace("\n", "\\n")


@dataclass(frozen=True)
class Encoded:
    """Examples as rows of token ids: cut to the longest length, padded a batch at a time.

    An example may have several rows, or a row several examples; `owners` are the indices of the
    rows' examples, where each row has one.
    """

    task: Task
    setting: Setting
    examples: tuple[Any, ...]
    rows: list[Row]
    owners: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        return [len(row["input_ids"]) for row in self.rows]

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        """The model's inputs for some rows, padded to the longest: (batch, tokens).

        Inputs with a random part depend on the seed, the epoch and the row alone.
        """
        rows = [
            self.task.vary(self.rows[i], self.setting, (self.setting.seed, epoch, i))
            for i in indices
        ]
        return self.task.collate(rows, self.setting)


class Task(ABC):
    """The base of all tasks. A subclass is a frozen dataclass of options.

    `main_metric` selects the best checkpoint.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @property
    def head(self) -> str:
        """The kind of model that `load_backbone` gives for the task."""
        return self.name

    @property
    def packs(self) -> bool:
        """Whether a row may hold several examples, of which only the first follows virtual tokens
        at the start of the row."""
        return False

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric that selects the best checkpoint."""

    @abstractmethod
    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """The examples of a file or Hub dataset; `split` is "train", "eval" or a Hub split.

        Raises:
            DataError: they cannot be used; every offending row is named.
        """

    def example(self, fields: Sequence[str], options: DataOptions) -> Any:
        """An unlabelled example from texts that were typed, `options` being those of training.

        Raises:
            DataError: too few texts.
        """
        return Example(fields[0])

    def fields(self, options: DataOptions) -> int:
        """How many texts such an example has; 0 is any number from two."""
        return 1

    def shown(self, example: Any) -> list[str]:
        """An example's texts, as they are printed beside its prediction."""
        return [example.text]

    def labels(self, train: Sequence[Any]) -> tuple[str, ...]:
        """The classes, in the order of the logits; () if the task has none."""
        return ()

    def check(self, labels: Sequence[str], examples: Sequence[Any]) -> None:  # noqa: B027
        """Refuse evaluation data that does not fit the labels of training.

        Raises:
            DataError: it has labels that training lacks.
        """

    def with_shots(self, examples: Sequence[Any], shots: int, seed: int) -> Task:
        """The task with so many worked examples of each label in front of every input, drawn from
        `examples`: a few-shot prompt.

        Raises:
            ConfigError: the task has no place for them. DataError: a label has too few.
        """
        raise ConfigError(
            f"{self.name} takes no worked examples", expected="a task that asks by a prompt"
        )

    @abstractmethod
    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """The examples as rows; with `labelled` each has what the model's loss needs."""

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """A row as it is in one epoch; `key` (seed, epoch, row) decides all that is random."""
        return row

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Rows as one batch: (batch, tokens)."""
        return pad(rows, setting.tokenizer)

    @abstractmethod
    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """One prediction an example, in their order."""

    @abstractmethod
    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """The metrics of predictions against the examples' labels."""

    def evaluate(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> dict[str, float]:
        """The metrics of a model on labelled examples."""
        return self.metrics(data.examples, self.predict(model, data, batch_size))


def one_row_each(task: Task, examples: Sequence[Any], setting: Setting, rows: list[Row]) -> Encoded:
    """Rows that are one an example."""
    return Encoded(task, setting, tuple(examples), rows, tuple(range(len(rows))))


def rows_from_columns(encoded: Mapping[str, Any]) -> list[Row]:
    """A tokenizer's columns as rows."""
    return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


def pad(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, side: str | None = None
) -> dict[str, Tensor]:
    """Rows as tensors. Lists are padded to the longest of their name, by default on the tokenizer's
    side: (batch, tokens); numbers become (batch,)."""
    fills = {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "labels": IGNORED,
    }
    left = (side or tokenizer.padding_side) == "left"
    batch = {}
    for key, first in (rows[0] if rows else {}).items():
        values = [row[key] for row in rows]
        if isinstance(first, list):
            longest = max(map(len, values))
            gaps = [[fills.get(key, 0)] * (longest - len(value)) for value in values]
            pairs = zip(values, gaps, strict=True)
            values = [gap + value if left else value + gap for value, gap in pairs]
        batch[key] = torch.tensor(values)
    return batch


def limit_of(setting: Setting) -> int:
    """The tokens that an input may have, by the options and the tokenizer."""
    return min(setting.max_length, setting.tokenizer.model_max_length)


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """A text of at most so many tokens."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def random_of(key: tuple[int, int, int]) -> np.random.Generator:
    """The random numbers of one row in one epoch."""
    return np.random.default_rng(key)


def forward(
    model: PreTrainedModel, data: Encoded, batch_size: int, *, labels: bool = False
) -> Iterator[tuple[list[int], dict[str, Tensor], Any]]:
    """(rows, batch, output) of each batch, in the order of length, to pad less.

    `labels` are left out of the batch unless they are asked for.
    """
    model.eval()
    for indices in by_length(data, batch_size):
        batch = {k: v.to(model.device) for k, v in data.batch(indices).items()}
        inputs = {k: v for k, v in batch.items() if labels or k != "labels"}
        with torch.inference_mode():
            output = model(**inputs)
        yield indices, batch, output


def by_length(data: Encoded, batch_size: int) -> Iterator[list[int]]:
    """The rows of each batch, short ones first."""
    lengths = data.lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def register_task(cls: T) -> T:
    """Enter a task into the registry under its name."""
    TASKS[cls.name] = cls
    return cls


def task_class(name: str) -> type[Task]:
    """The registered task of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise unknown("task", name, sorted(TASKS), hint="adapterhub tasks")
    return TASKS[name]


def parse_task(spec: object) -> Task:
    """The task of a spec: a name, a name with options, or a mapping of one name to its options.

    Raises:
        ConfigError: no such task or option, or not a spec of one task.
    """
    if isinstance(spec, Task):
        return spec
    found = parse_calls(spec, "task", EXAMPLES) if isinstance(spec, str) else spec
    pairs = list(found.items()) if isinstance(found, Mapping) else found
    if not isinstance(pairs, list) or len(pairs) != 1 or not _is_named_options(pairs[0]):
        raise spec_error(spec, "task", EXAMPLES)
    ((name, options),) = pairs
    return from_dict(task_class(name), options or {}, where=name)


def _is_named_options(pair: object) -> bool:
    if not isinstance(pair, tuple) or not isinstance(pair[0], str):
        return False
    return pair[1] is None or isinstance(pair[1], Mapping)


def dump_task(task: Task) -> str | dict[str, Any]:
    """The normal form of a task: its name, or {name: all options} where it has options."""
    assert dataclasses.is_dataclass(task)
    return {task.name: to_dict(task)} if dataclasses.fields(task) else task.name
