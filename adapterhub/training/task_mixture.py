"""Several tasks as one task of a run: a batch has rows of one task, whose head then applies.

rows         the rows of each task, one task after the other
loss         the loss of the batch's task, times its weight
metrics      the metrics of each task, called "rte/accuracy", and the mean of their main metrics

The order of the batches depends on the seed and the epoch alone, so that a resumed run draws the
same batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.loop.processes import readers
from adapterhub.recipe.recipe import Mixing, RunOptions, draw_tasks, mixture_shares
from adapterhub.tasks import Encoded, Prediction, Setting, Task
from adapterhub.tasks.common.batches import Items, Loss

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MEAN = "mean"


@dataclass
class TaskSwitch:
    """The task of the latest batch; `select` applies the head of a task."""

    current: str
    select: Callable[[str], None]

    def enter(self, name: str) -> None:
        """Apply the head of a task."""
        self.current = name
        self.select(name)


@dataclass(frozen=True)
class TaskRows(Encoded):
    """The rows of one of several tasks; building a batch of them enters the task."""

    name: str
    switch: TaskSwitch

    @property
    def score_prefix(self) -> str:
        """The task's name and a slash."""
        return f"{self.name}/"

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        """Return the model inputs for some rows, and apply the task's head."""
        self.switch.enter(self.name)
        return super().batch(indices, epoch)


@dataclass(frozen=True)
class MixedRows(Encoded):
    """The rows of several tasks, one after the other; `starts` is the start of each."""

    of_tasks: Mapping[str, TaskRows]
    switch: TaskSwitch
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [len(rows.rows) for rows in self.of_tasks.values()]
        object.__setattr__(self, "starts", tuple(accumulate(sizes[:-1], initial=0)))

    @property
    def parts(self) -> tuple[Encoded, ...]:
        """The rows of each task."""
        return tuple(self.of_tasks.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The number of rows of each task."""
        return {name: len(rows.rows) for name, rows in self.of_tasks.items()}

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        """Return the model inputs for some rows, all of one task, and apply its head."""
        number = bisect_right(self.starts, indices[0]) - 1
        start = self.starts[number]
        return self.parts[number].batch([index - start for index in indices], epoch)


@dataclass(frozen=True)
class TaskMixture(Task):
    """Several tasks, by name, with the weights of their losses.

    Raises:
        ConfigError: smaller values are better in the main metric of some tasks only.
    """

    tasks: Mapping[str, Task]
    weights: Mapping[str, float]

    name = "mixture"
    summary = "several tasks"

    def __post_init__(self) -> None:
        mains = {name: task.main_metric for name, task in self.tasks.items()}
        if len({metric in LOWER_IS_BETTER for metric in mains.values()}) > 1:
            raise ConfigError(
                "the main metrics of these tasks have no mean: smaller is better for some only",
                offenders=[f"{name}: {metric}" for name, metric in mains.items()],
                expected="tasks whose main metrics have one direction",
            )

    @property
    def head(self) -> str:
        """The kind of model of the first task; the others have the same class."""
        return self._first.head

    @property
    def packs(self) -> bool:
        """Whether the rows of any task may be packed."""
        return any(task.packs for task in self.tasks.values())

    @property
    def varies(self) -> bool:
        """Whether the rows of any task change with each epoch."""
        return any(task.varies for task in self.tasks.values())

    @property
    def main_metric(self) -> str:
        """The mean of the main metrics; "mean/loss" for losses and similar metrics."""
        metric = self._first.main_metric
        return f"{MEAN}/{metric}" if metric in LOWER_IS_BETTER else MEAN

    @property
    def model_note(self) -> str:
        """The note for the user on each task's options that are chosen by the backbone."""
        notes = {name: task.model_note for name, task in self.tasks.items()}
        return "; ".join(f"{name}: {note}" for name, note in notes.items() if note)

    @property
    def _first(self) -> Task:
        return next(iter(self.tasks.values()))

    def fields(self, options: DataOptions) -> int:
        """Return the number of texts of an example of the first task."""
        return self._first.fields(options)

    def for_model(self, model: PreTrainedModel) -> TaskMixture:
        """Return the tasks with the options that depend on the backbone."""
        return replace(self, tasks={n: task.for_model(model) for n, task in self.tasks.items()})

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Raise an error: each task reads its own data."""
        raise _apart()

    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """Raise an error: each task encodes its own examples."""
        raise _apart()

    def label_counts(self, encoded: Encoded) -> dict[str, int]:
        """Count the labels of each task: "rte/entailment"."""
        return {
            f"{name}/{label}": count
            for name, rows in _of_tasks(encoded).items()
            for label, count in rows.task.label_counts(rows).items()
        }

    def loss(self, train: Encoded) -> Loss | None:
        """Return the loss of a batch: the loss of its task, times the weight of the task."""
        from adapterhub.loop.engine import model_loss  # imports torch

        rows = _of_tasks(train)
        losses = {name: each.task.loss(each) or model_loss for name, each in rows.items()}
        switch = next(iter(rows.values())).switch

        def loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor | None:
            own = losses[switch.current](output, batch)
            return None if own is None else own * self.weights[switch.current]

        return loss

    def loss_items(self, train: Encoded) -> Items:
        """Return the counter of the items of a batch, as defined by its task's loss."""
        rows = _of_tasks(train)
        items = {name: each.task.loss_items(each) for name, each in rows.items()}
        switch = next(iter(rows.values())).switch
        return lambda batch: items[switch.current](batch)

    @property
    def compares_with_reference(self) -> bool:
        """Whether the loss of any task uses a reference."""
        return any(task.compares_with_reference for task in self.tasks.values())

    @property
    def evaluates_with_reference(self) -> bool:
        """Whether the evaluation of any task uses a reference."""
        return any(task.evaluates_with_reference for task in self.tasks.values())

    def with_reference(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> Encoded:
        """Return the rows with the reference values for the loss of each task."""
        assert isinstance(data, MixedRows)
        of_tasks = dict[str, TaskRows]()
        for name, rows in data.of_tasks.items():
            compared = rows.task.with_reference(model, rows, batch_size)
            of_tasks[name] = replace(rows, rows=compared.rows)
        every = [row for rows in of_tasks.values() for row in rows.rows]
        return replace(data, rows=every, of_tasks=of_tasks)

    def stops(self, setting: Setting) -> list[int]:
        """Return the tokens that end the learned texts of each task."""
        every = (stop for task in self.tasks.values() for stop in task.stops(setting))
        return [*dict.fromkeys(every)]

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the predictions of each task, one task after the other."""
        return [p for part in data.parts for p in part.task.predict(model, part, batch_size)]

    def metric_names(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return the name of the mean, and each task's metrics prefixed by its name."""
        names = {name: task.metric_names(examples) for name, task in self.tasks.items()}
        return (self.main_metric, *(f"{n}/{metric}" for n in names for metric in names[n]))

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Raise an error: `evaluate` computes the metrics of each task on its own rows."""
        raise _apart()

    def evaluate(
        self,
        model: PreTrainedModel,
        data: Encoded,
        batch_size: int,
        record: list[Prediction] | None = None,
    ) -> dict[str, float]:
        """Evaluate each task that has evaluation rows; add the mean of their main metrics."""
        metrics: dict[str, float] = {}
        for name, rows in _of_tasks(data).items():
            own = rows.task.evaluate(model, rows, batch_size, record)
            metrics |= {f"{name}/{metric}": value for metric, value in own.items()}
        names = [f"{name}/{rows.task.main_metric}" for name, rows in _of_tasks(data).items()]
        return {self.main_metric: fmean(metrics[name] for name in names), **metrics}


def _of_tasks(data: Encoded) -> Mapping[str, TaskRows]:
    assert isinstance(data, MixedRows)
    return data.of_tasks


def _apart() -> ConfigError:
    return ConfigError(
        "several tasks have no rows in common",
        expected="one of the tasks by its name",
        hint="tasks.NAME.data.train=FILE; --head NAME for a trained adapter",
    )


def steps_of_tasks(
    rows: MixedRows, mixing: Mixing, options: RunOptions, total: int, seed: int
) -> dict[str, int]:
    """Return the number of steps per task among the first `total` steps of a run."""
    steps, shares = _steps(rows, options), list(mixture_shares(mixing, rows.sizes).values())
    drawn: Counter[int] = Counter()
    for epoch, start in enumerate(range(0, total, steps)):
        drawn.update(draw_tasks(shares, steps, seed, epoch)[: total - start])
    return {name: drawn[number] for number, name in enumerate(rows.of_tasks)}


def mixed_order(
    rows: MixedRows, mixing: Mixing, options: RunOptions, epoch: int, seed: int
) -> list[list[int]]:
    """Return the index lists of one epoch's batches; each optimizer step has a single task.

    An epoch has as many steps as all rows fill, regardless of the tasks' shares. The result depends
    on the arguments alone.
    """
    per_step, steps = _batches_per_step(options), _steps(rows, options)
    shares = list(mixture_shares(mixing, rows.sizes).values())
    done: Counter[int] = Counter()
    for earlier in range(epoch):
        done.update(draw_tasks(shares, steps, seed, earlier))
    streams = [
        _stream(rows, number, done[number] * per_step, options, seed)
        for number in range(len(shares))
    ]
    drawn = draw_tasks(shares, steps, seed, epoch)
    return [next(streams[number]) for number in drawn for _ in range(per_step)]


def _steps(rows: MixedRows, options: RunOptions) -> int:
    """Return the steps of an epoch, as many as all rows fill."""
    per_step = _batches_per_step(options)
    return -(-len(rows.rows) // (options.batch_size * per_step))


def _batches_per_step(options: RunOptions) -> int:
    _, world = readers(options.tensor_parallel)
    return options.gradient_accumulation * world


def _stream(
    rows: MixedRows, number: int, skip: int, options: RunOptions, seed: int
) -> Iterator[list[int]]:
    """Yield the batches of one task after skipping `skip` of them, pass after pass."""
    from adapterhub.loop.engine import batch_order  # imports torch

    lengths, start = rows.parts[number].lengths, rows.starts[number]
    size = options.batch_size
    turn, position = divmod(skip, -(-len(lengths) // size))
    own = seed * 1000 + number  # tasks of equal length have different orders
    while True:
        order = batch_order(lengths, size, turn, own, options.length_grouped)
        for batch in order[position:]:
            yield [start + index for index in batch]
        turn, position = turn + 1, 0
