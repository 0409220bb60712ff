"""The base class of tasks and of predictions, and the registry of tasks.

A task is a frozen dataclass of options. A task spec has the same syntax as a method spec:
`seq2seq`, `seq2seq(metric=rouge)`, `{seq2seq: {metric: rouge}}`.

Lengths before and after truncation take one pass of the tokenizer: all examples are encoded without
a limit. Those that fit a limit have the same rows under it, so only the others are encoded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from adapterhub.config.options import OptionNames, from_dict, is_neutral, to_dict
from adapterhub.config.yaml import parse_calls, spec_error
from adapterhub.data.chat_formats import Message
from adapterhub.data.columns import WANTS, ColumnChoice, Wants, choose_columns
from adapterhub.data.examples import Example, content_of, plain_key
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import TextStream
from adapterhub.errors import AdapterhubError, ConfigError, unknown
from adapterhub.status import counting
from adapterhub.tasks.common.batches import (
    Items,
    Loss,
    Passed,
    Row,
    Setting,
    batch_labels,
    each_row,
    limit_of,
    pad,
)
from adapterhub.tasks.common.other_names import OTHER_NAMES
from adapterhub.tasks.common.packing import Frame, Windows, stream_tokens
from adapterhub.tasks.common.preview import learned_line, tokens_line

if TYPE_CHECKING:
    import torch
    from numpy import int64
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel


POOLING_HELP = (
    "what the head reads of each text: its first token (cls), its last, the mean or max of all, "
    "or what the model's class chooses (model); none: as the backbone was trained"
)

Pooling = Literal["cls", "mean", "last", "max", "model"]


class Prediction(ABC):
    """The output for one example.

    Attributes:
        truncated: the number of input tokens that were cut.
    """

    truncated: int = 0

    def cut(self, tokens: int) -> None:
        """Record the number of input tokens that were cut."""
        object.__setattr__(self, "truncated", tokens)

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the fields printed by `predict --json`."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the prediction as one line."""

    def cells(self, every: bool = False) -> tuple[str, ...]:
        """Return the columns that `predict` prints; `every` adds all labels' probabilities."""
        return (str(self),)

    def columns(self, every: bool = False) -> dict[str, Any]:
        """Return the values that `predict --output` writes, by name; `every`: as in `cells`."""
        return self.as_dict()


@dataclass(frozen=True)
class NoPrediction(Prediction):
    """The placeholder prediction of an empty input; its other attributes are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return a note that the input is empty."""
        return {"empty": True}

    def __str__(self) -> str:
        return ""

    def columns(self, every: bool = False) -> dict[str, Any]:
        """Return no columns: the cells stay empty."""
        return {}


@dataclass(frozen=True)
class Generated(Prediction):
    """A generated text."""

    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return the text as `generated`; `text` is the input."""
        return {"generated": self.text}

    def __str__(self) -> str:
        return self.text.replace("\n", "\\n")


@dataclass(frozen=True)
class Encoded:
    """Encoded examples: rows of token ids, truncated, and padded when batched.

    An example may have several rows; a packed row holds several examples. `owners[i]` is the index
    of the example of row i; `owners` is empty if rows are packed.
    """

    task: Task
    setting: Setting
    examples: Sequence[Any]
    rows: Sequence[Row]
    owners: Sequence[int]

    @property
    def lengths(self) -> list[int]:
        """The size of each row, in tokens."""
        if isinstance(self.rows, Windows):
            return self.rows.lengths
        return [self.task.size(row) for row in self.rows]

    @property
    def lost(self) -> list[int]:
        """The tokens cut from each example; only examples with full rows are encoded again."""
        lost = [0] * len(self.examples)
        new_tokens = getattr(self.task, "new_tokens", 0)
        limits = [limit - new_tokens for _, _, limit in self.task.limits(self.setting)]
        if not limits or not self.owners:
            return lost
        full = {
            owner
            for owner, row in zip(self.owners, self.rows, strict=True)
            if any(n >= limit for n, limit in zip(self.task.row_lengths(row), limits, strict=True))
        }
        if not full:
            return lost
        long = sorted(full)
        examples = [self.examples[index] for index in long]
        whole = self.task.unlimited().encode(examples, self.setting.unlimited, labelled=False)
        missing = whole.counts().sum(0) - self.counts()[:, long].sum(0)
        for index, count in zip(long, missing.clip(min=0).tolist(), strict=True):
            lost[index] = count
        return lost

    def counts(self) -> NDArray[int64]:
        """Count the tokens of each example by part, over all of its rows: (parts, examples)."""
        import numpy as np

        owners, count = np.array(self.owners, dtype=np.int64), len(self.examples)
        parts = len(self.task.limits(self.setting))
        lengths = np.array([self.task.row_lengths(row) for row in self.rows], dtype=np.int64)
        lengths = lengths.reshape(-1, parts).T
        return np.stack([np.bincount(owners, row, count).astype(np.int64) for row in lengths])

    @property
    def parts(self) -> tuple[Encoded, ...]:
        """The rows, split by task; a run with one task returns only itself."""
        return (self,)

    @property
    def score_prefix(self) -> str:
        """The start of the names of the scores of these rows; "" unless a run has several tasks."""
        return ""

    def by_source(self) -> Iterator[tuple[str, int, Encoded]]:
        """Yield the name, the first example's index and the rows of each of several sources."""
        return iter(())

    def source_scores(
        self,
        model: PreTrainedModel,
        batch_size: int,
        recorded: Sequence[Prediction],
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the metrics of each of several sources, after an evaluation of all rows."""
        return {}

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        """Return the model inputs for some rows, padded to the longest: (batch, tokens).

        Random inputs, such as masks, depend only on the seed, the epoch and the row.
        """
        rows = [
            self.task.vary(self.rows[i], self.setting, (self.setting.seed, epoch, i))
            for i in indices
        ]
        return self.task.collate(rows, self.setting)


class Task(ABC):
    """The base class of tasks; a subclass is a frozen dataclass of options.

    Its methods are in the order of the data flow: examples, rows, predictions, metrics.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    pooling: str | None = None
    """The vector of a text that the head reads: an option of tasks whose head reads one."""
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    """The metrics for which smaller values are better."""
    has_labels: ClassVar[bool] = False
    """Whether examples have labels that the option `labels` of the data can name."""
    has_scores: ClassVar[bool] = False
    """Whether a prediction has the probability of each label."""
    decodes: ClassVar[bool] = False
    """Whether rows name image or audio files, which are decoded for each batch."""
    input_name: ClassVar[str] = "text"
    """The name of an example in the output of `predict --json`."""
    pair_name: ClassVar[str] = ""
    """The name of the second text of an example, such as "question"; "" for a plain pair."""
    keeps_length: ClassVar[bool] = False
    """Whether predictions read windows of the training length, without losing any text."""
    most_tokens: ClassVar[int] = 512
    """The longest input that is chosen by default, in tokens."""
    cuts_as_trained: ClassVar[bool] = False
    """Whether inputs are cut at the length that a sentence encoder was trained with."""
    cut_note: ClassVar[str] = ""
    """The end of a sentence that says how truncation affects the task."""
    outcomes: ClassVar[str] = ""
    """What `outcome` returns: classes, sets, choices, numbers, spans, texts, losses or ""."""
    measures: ClassVar[tuple[str, ...]] = ()
    """The metrics of a task whose metrics do not depend on the examples."""
    printed_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that `predict --json` prints in addition to the input."""
    columns: ClassVar[Wants] = WANTS["texts"]
    """The columns that `read` reads, and their kinds."""
    groups: ClassVar[str] = "different inputs"
    """The plural name of the groups that are held out whole: queries, contexts, prompts."""
    ranks_groups: ClassVar[bool] = False
    """Whether a metric ranks the rows of a group; a partial group would be easier."""

    @property
    def head(self) -> str:
        """The kind of model that `load_backbone` loads for the task."""
        return self.name

    @classmethod
    def typed_input(cls) -> str:
        """Return the arguments to type after `adapterhub predict ADAPTER`."""
        return cls.input_name.upper() if cls.decodes else '"a text"'

    @property
    def packs(self) -> bool:
        """Return whether rows may be packed; virtual tokens then precede only the first example."""
        return False

    @property
    def streams(self) -> bool:
        """Return whether the task learns from raw text that is streamed from disk."""
        return False

    @property
    def on_policy(self) -> bool:
        """Return whether batches have texts that the model generates as it trains: `rollout`."""
        return False

    @property
    def passes(self) -> int:
        """The optimizer steps on each batch; the schedule counts them as one step."""
        return 1

    @property
    def varies(self) -> bool:
        """Return whether rows change with each epoch."""
        return self.on_policy or type(self).vary is not Task.vary

    def recorded(self) -> Task:
        """Return the task of a run's record; newer options keep the old behavior."""
        return self

    @property
    def model_note(self) -> str:
        """A note for the user on the options that `for_model` chose, or ""."""
        return ""

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric that selects the best checkpoint."""

    # Examples

    @abstractmethod
    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read the examples of a file or Hub dataset.

        `source` is a file or the id of a Hub dataset, `split` "train", "eval", PREDICT or the name
        of a Hub split; without `labelled`, no labels are read.

        Raises:
            DataError: rows are invalid; the error lists them.
        """

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Return the task that fits the form of the data, and the data options with its columns.

        Columns that are not set in the options are inferred.

        Raises:
            DataError: the data cannot be read, or its columns are ambiguous.
        """
        return self, choose_columns(source, options, split, self.columns, labelled=labelled)

    def joined(self, other: Task) -> Task | None:
        """Return the task that learns from the examples of both, or None.

        Both are `fitted` to sources of one run, which may have different forms.
        """
        return self if self == other else None

    def for_model(self, model: PreTrainedModel) -> Task:
        """Return the task with the options that follow from the backbone.

        Raises:
            ConfigError: the task cannot be learned with this backbone.
        """
        return self

    def for_examples(self, examples: Sequence[Any]) -> Task:
        """Return the task with the options that follow from the training examples."""
        return self

    def example(self, fields: Sequence[str], options: DataOptions) -> Any:
        """Build an unlabelled example from the texts of a command line.

        `options` are the options of the training data.

        Raises:
            DataError: there are too few texts.
        """
        return Example(fields[0])

    def chat_example(self, messages: tuple[Message, ...]) -> Any:
        """Build an unlabelled example from a chat; None if the task does not support chats."""
        return None

    def fields(self, options: DataOptions) -> int:
        """Return the number of texts per example; 0 means two or more."""
        return 1

    def shown(self, example: Any) -> list[str]:
        """Return the texts that `predict` prints next to a prediction."""
        return [example.text]

    def read_texts(self, example: Any) -> list[str]:
        """Return the texts that a prediction requires: if one is empty, there is no prediction."""
        return [] if self.decodes else self.shown(example)

    def printed(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return the object that `predict --json` prints: the text and its prediction."""
        return {self.input_name: self.shown(example)[0], **prediction.as_dict()}

    def labels(self, train: Sequence[Any]) -> tuple[str, ...]:
        """Return the classes in the order of the logits, or () if the task has none."""
        return ()

    def group_of(self, example: Any) -> Hashable:
        """Return the key of an example's group; a group is held out as a whole."""
        return content_of(example)

    def groups_of(self, examples: Sequence[Any]) -> list[Hashable]:
        """Return the group of each example, as named by the data or defined by the task."""
        return [
            (e.group,)
            if getattr(e, "group", None) is not None
            else plain_key(self.group_of(e)) or plain_key(content_of(e))
            for e in examples
        ]

    def check(self, labels: Sequence[str], examples: Sequence[Any]) -> None:  # noqa: B027
        """Check the training labels, and the evaluation labels against them.

        Raises:
            DataError: there are too few labels, or evaluation examples have unknown labels.
        """

    def with_shots(self, examples: Sequence[Any], shots: int, seed: int) -> Task:
        """Return the task with few-shot examples in front of each prompt.

        `shots` examples are drawn per label, or in total if answers are generated.

        Raises:
            ConfigError: the task does not use a prompt.
            DataError: there are too few examples.
        """
        raise ConfigError(
            f"{self.name} takes no few-shot examples",
            expected="a task with a prompt: prompted, causal-lm, seq2seq or unified-qa",
        )

    def drawn(self, train: Sequence[Any], seed: int) -> Task:
        """Return the task with the examples it draws from the training rows: none by default."""
        return self

    @property
    def draws_shots(self) -> bool:
        """Return whether few-shot examples are to be drawn from the training rows."""
        return False

    # Rows

    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """Encode examples as rows; with `labelled`, rows also hold the inputs of the loss."""
        groups = [self.rows_of(each, setting, labelled=labelled) for each in examples]
        owners = tuple(index for index, rows in enumerate(groups) for _ in rows)
        return Encoded(self, setting, tuple(examples), [r for rows in groups for r in rows], owners)

    def rows_of(self, example: Any, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return the rows of an example; implement either this or `encode`."""
        raise NotImplementedError(f"{self.name} has neither encode nor rows_of")

    def encode_stream(self, texts: TextStream, setting: Setting) -> Encoded:
        """Cut streamed text into rows of one length, for tasks that stream.

        Raises:
            DataError: the text has no tokens.
        """
        frame = self.frame(setting)
        tokens = stream_tokens(texts, setting.tokenizer, frame)
        build = partial(self.window_row, frame=frame)
        rows = Windows(tokens, frame, limit_of(setting), build)
        return Encoded(self, setting, (), rows, ())

    def frame(self, setting: Setting) -> Frame:
        """Return the tokens around streamed texts, and around the windows cut from them."""
        raise NotImplementedError(self.name)

    def window_row(self, ids: list[int], starts: list[int], frame: Frame) -> Row:
        """Return the row of a window; `starts` are the positions where words start."""
        return {"input_ids": ids}

    def unlimited(self) -> Task:
        """Return the task without its own limits, with one or more rows per example."""
        return self

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether `encode` also returns this row, which was encoded without truncation."""
        limit = limit_of(setting)
        return all(len(v) <= limit for v in row.values() if isinstance(v, list))

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """List the limits that truncate: (part of the examples, option, limit in tokens)."""
        return [("texts", "train.max_length", limit_of(setting))]

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Return further notes for the user on encoded examples, one per line."""
        return ()

    def size(self, row: Row) -> int:
        """Return the size of a row, in tokens; rows of similar size share a batch."""
        return len(row["input_ids"])

    def row_lengths(self, row: Row) -> list[int]:
        """Count the tokens of a row for each of `limits`."""
        return [len(row["input_ids"])]

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Return the row to use in one epoch; `key` (seed, epoch, row) seeds random choices."""
        return row

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad rows to one batch: (batch, tokens)."""
        return pad(rows, setting.tokenizer, self.padding_side(setting))

    def padding_side(self, setting: Setting) -> str:
        """Return the padding side of rows, by default the tokenizer's."""
        return str(setting.tokenizer.padding_side)

    def rollout(
        self,
        model: PreTrainedModel,
        data: Encoded,
        indices: Sequence[int],
        epoch: int,
        bare: Callable[[], AbstractContextManager[None]],
    ) -> dict[str, Tensor]:
        """Return the batch of some rows with texts that the model generates for them.

        It depends on the weights, the seed, the epoch and the rows alone. `bare` returns a context
        in which the adapter is off. Tasks that are `on_policy` implement it.
        """
        raise NotImplementedError(self.name)

    def with_reference(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> Encoded:
        """Return the rows with the reference values that the loss reads.

        The reference is the model with the adapter off. `data` has labels.
        """
        return data

    @property
    def compares_with_reference(self) -> bool:
        """Return whether `with_reference` changes rows."""
        return False

    @property
    def evaluates_with_reference(self) -> bool:
        """Return whether `with_reference` also changes the rows of an evaluation."""
        return self.compares_with_reference

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the model's inputs and targets for a row, as texts by name."""
        facts = self.show_inputs(row, setting)
        labels = row.get("labels")
        if isinstance(labels, list):
            return facts | {"learned": learned_line(labels, setting.tokenizer)}
        if isinstance(labels, int) and setting.labels:
            return facts | {"label": f"{setting.labels[labels]} (class {labels})"}
        return facts | ({} if labels is None else {"label": str(labels)})

    def show_inputs(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the model's input for a row: its tokens."""
        return {"tokens": tokens_line(row["input_ids"], setting.tokenizer)}

    def label_counts(self, encoded: Encoded) -> dict[str, int]:
        """Count the labels in the rows, by name; {} if the task has no classes."""
        names = encoded.setting.labels
        counts: Counter[int] = Counter()
        for row in encoded.rows if names else ():
            labels = row.get("labels", ())
            counts.update([labels] if isinstance(labels, int) else labels)
        return {name: counts[index] for index, name in enumerate(names)}

    def loss(self, train: Encoded) -> Loss | None:
        """Return a function from output and batch to loss; None uses the model's own loss.

        `train` are the training rows.
        """
        return None

    @property
    def predicts_next(self) -> bool:
        """Return whether each label is predicted from the position before it."""
        return self.head in ("causal-lm", "image-text-to-text")

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that counts the items over which the loss of a batch is averaged.

        `train` are the training rows.
        """
        return partial(batch_labels, shifted=self.predicts_next)

    def stops(self, setting: Setting) -> list[int]:
        """Return the tokens that end a learned text and stop generation; [] by default."""
        return []

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return one prediction per example, in order."""
        return each_row(model, data, batch_size, partial(self.read_output, data))

    def read_output(self, data: Encoded, passed: Passed) -> Iterable[Prediction]:
        """Return a prediction for each row of a batch; implement either this or `predict`."""
        raise NotImplementedError(f"{self.name} has neither predict nor read_output")

    # Metrics

    def metric_names(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of the metrics that `evaluate` computes on these labelled examples."""
        return self.measures

    @abstractmethod
    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compare predictions with the labels of the examples."""

    def evaluate(
        self,
        model: PreTrainedModel,
        data: Encoded,
        batch_size: int,
        record: list[Prediction] | None = None,
    ) -> dict[str, float]:
        """Predict on labelled examples and return the metrics.

        `record` gets one prediction per example, for `outcome`.
        """
        if not self.evaluates_predictions:
            return self.token_metrics(model, data, batch_size, record)
        predictions = self.compared(model, data, batch_size)
        if record is not None:
            record += predictions
        metrics = self.metrics(data.examples, predictions)
        return metrics | self.token_metrics(model, data, batch_size)

    @property
    def evaluates_predictions(self) -> bool:
        """Return whether `evaluate` compares predictions with labels, not only token losses."""
        return True

    def compared(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the outputs that `metrics` compares with the labels: the predictions."""
        return self.predict(model, data, batch_size)

    def token_metrics(
        self,
        model: PreTrainedModel,
        data: Encoded,
        batch_size: int,
        record: list[Prediction] | None = None,
    ) -> dict[str, float]:
        """Return the metrics computed from the loss of labelled tokens: none by default.

        `record` gets the loss of each example.
        """
        return {}

    def outcome(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return the texts, the label, the prediction and the score of an evaluated example."""
        return {}


def _cpu() -> torch.device:
    import torch  # slow to import

    return torch.device("cpu")


@dataclass
class RowOutputs:
    """The outputs for the rows of one request, which a task calls instead of a model.

    Attributes:
        fields: the outputs of a batch by name, (rows, ...).
        rows: for each row of the task, its rows in the batch.
        by_token: the names of outputs whose second dimension is tokens.
        left: whether rows are padded on the left.
        asked: the rows that the task collated last.
    """

    fields: Mapping[str, Tensor]
    rows: Sequence[Sequence[int]]
    by_token: frozenset[str]
    left: bool
    asked: list[int] = field(default_factory=list)
    device: torch.device = field(default_factory=_cpu)

    def eval(self) -> None:
        """Do nothing: the outputs are already computed."""

    def __call__(self, **inputs: Tensor) -> OutputFields:
        """Return the outputs for the rows collated last, cut to the width of these inputs."""
        own = [row for number in self.asked for row in self.rows[number]]
        width = inputs["attention_mask"].shape[1]
        return OutputFields({name: self._cut(name, own, width) for name in self.fields})

    def _cut(self, name: str, rows: list[int], width: int) -> Tensor:
        whole = self.fields[name]
        first = rows[0]
        consecutive = rows == list(range(first, first + len(rows)))
        own = whole[first : first + len(rows)] if consecutive else whole[rows]
        if name not in self.by_token:
            return own
        return own[:, -width:] if self.left else own[:, :width]


class OutputFields(dict[str, Any]):
    """The outputs of a model, by name or as attributes."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class _ComputedRows(Encoded):
    """Encoded rows that are already collated and record which rows were requested last."""

    batches: tuple[dict[str, Tensor], ...] = ()
    outputs: RowOutputs | None = None

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        assert self.outputs is not None
        self.outputs.asked = list(indices)
        return self.batches[indices[0]] if len(indices) == 1 else super().batch(indices, epoch)


def predict_computed(
    task: Task, outputs: RowOutputs, encoded: Encoded, batches: Sequence[dict[str, Tensor]]
) -> Any:
    """Return the prediction for an example whose outputs were computed with other rows.

    Args:
        task: the task.
        outputs: the outputs.
        encoded: the rows of the example.
        batches: the inputs of each row.
    """
    parts = (encoded.task, encoded.setting, encoded.examples, encoded.rows, encoded.owners)
    computed = _ComputedRows(*parts, batches=tuple(batches), outputs=outputs)
    model: Any = outputs
    return task.predict(model, computed, len(encoded.rows))[0]


def one_row_each(task: Task, examples: Sequence[Any], setting: Setting, rows: list[Row]) -> Encoded:
    """Build the encoding of examples that have one row each."""
    return Encoded(task, setting, tuple(examples), rows, tuple(range(len(rows))))


SPEC_EXAMPLES = "classification, seq2seq(metric=rouge) or {seq2seq: {metric: rouge}}"

TASKS: dict[str, type[Task]] = {}
TaskClass = TypeVar("TaskClass", bound=type[Task])


def register_task(cls: TaskClass) -> TaskClass:
    """Register a task under its name."""
    TASKS[cls.name] = cls
    return cls


def task_class(name: str) -> type[Task]:
    """Return the task registered under a name or an alias.

    Raises:
        ConfigError: no such task is registered.
    """
    registered, _ = resolve_alias(name)
    if registered not in TASKS:
        raise unknown(
            "task",
            name,
            [*TASKS, *ALIASES],
            expected=f"one of {', '.join(sorted(TASKS))}",
            hint="adapterhub tasks",
        )
    return TASKS[registered]


def parse_task(spec: object) -> Task:
    """Build a task from its spec: a name or alias, one with options, or {name: options}.

    Raises:
        ConfigError: the task or an option is unknown, or the spec does not name exactly one task.
    """
    if isinstance(spec, Task):
        return spec
    parsed = parse_calls(spec, "task", SPEC_EXAMPLES) if isinstance(spec, str) else spec
    pairs = list(parsed.items()) if isinstance(parsed, Mapping) else parsed
    if not isinstance(pairs, list) or len(pairs) != 1 or not _is_named_options(pairs[0]):
        raise spec_error(spec, "task", SPEC_EXAMPLES)
    ((name, options),) = pairs
    cls, (_, implied) = task_class(name), resolve_alias(name)
    own = OptionNames(cls, {}, {}).normal_form(options or {})
    return from_dict(cls, {**implied, **own}, where=cls.name)


def _is_named_options(pair: object) -> bool:
    if not isinstance(pair, tuple) or not isinstance(pair[0], str):
        return False
    return pair[1] is None or isinstance(pair[1], Mapping)


def dump_task(task: Task) -> str | dict[str, Any]:
    """Return the normal form of a task: {name: all options}, or its name if none has an effect."""
    options = to_dict(task)
    neutral = all(is_neutral(value) for value in options.values()) and task == type(task)()
    return task.name if neutral else {task.name: options}


ALIASES = {
    alias: (task, implied) for names, task, implied in OTHER_NAMES for alias in names.split()
}


def resolve_alias(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the task that a name means, and the options that the name implies."""
    spelled = name.strip().lower().replace("_", "-")
    return ALIASES.get(spelled, (spelled, {}))


def aliases_of(task: str) -> tuple[str, ...]:
    """List the other names of a task."""
    return tuple(alias for alias, (name, _) in ALIASES.items() if name == task)


CHUNK = 1000  # examples encoded between two progress reports


@dataclass(frozen=True)
class LostTokens:
    """The tokens that truncation removes from one part of the examples, texts or targets.

    Attributes:
        part: "texts" or "targets".
        option: the option that limits the part.
        limit: the limit, in tokens.
        examples: the number of examples.
        cut: the number of examples that lose tokens.
        tokens: the tokens of these examples, before truncation.
        lost: the number of these tokens that are removed.
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
        """Describe the loss; `name` is the name of the data, such as "training"."""
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
    """Encode labelled examples as `task.encode` does, and report progress.

    Packed rows and errors depend on all examples at once.
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
        return replace(whole, task=task, setting=setting)
    long = sorted(cut)
    again = encode_in_chunks(task, [whole.examples[i] for i in long], setting)
    kept = [(owner, row) for owner, row in pairs if owner not in cut]
    kept += [(long[owner], row) for owner, row in zip(again.owners, again.rows, strict=True)]
    kept.sort(key=lambda pair: pair[0])  # stable: the windows of an example stay in order
    owners, rows = tuple(owner for owner, _ in kept), [row for _, row in kept]
    return replace(whole, task=task, setting=setting, rows=rows, owners=owners)


def lost_tokens(whole: Encoded, encoded: Encoded) -> list[LostTokens]:
    """Count what truncation removes; examples that are split into windows lose nothing."""
    task, setting = encoded.task, encoded.setting
    if not task.limits(setting):
        return []
    if not encoded.owners:  # packed: encoded once more, in rows of their own
        unpacked = task.unlimited()
        encoded = truncate(whole, unpacked, setting)
    before = whole.counts()
    after = before if encoded.rows is whole.rows else encoded.counts()
    losses = []
    for (name, option, limit), b, a in zip(task.limits(setting), before, after, strict=True):
        cut = a < b
        losses.append(
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
    return losses
