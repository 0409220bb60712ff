"""A run with several tasks: the heads of its adapter, its rows, and the order of its batches.

The order is a function of the seed and the epoch alone, so that a resumed run draws the batches
that it would have drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.heads import add_heads, select_head
from adapterhub.adapters.parts import NamedHead
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import ConfigError
from adapterhub.loop.batching import batch_order
from adapterhub.loop.processes import process_count, readers
from adapterhub.recipe.mixing import Mixing, draw_tasks, mixture_shares
from adapterhub.recipe.options import RunOptions
from adapterhub.tasks import Encoded, Task
from adapterhub.training.lengths import FittedRows
from adapterhub.training.run_data import RunData
from adapterhub.training.task_mixture import MixedRows, TaskRows, TaskSwitch


def check_one_model(data: RunData) -> None:
    """Refuse tasks that one model cannot have, and several processes with several heads.

    Raises:
        ConfigError: the tasks need different classes of model, or pool differently, or several
            processes would train several heads.
    """
    tasks = {name: part.task for name, part in data.parts.items()}
    autos = {name: " or ".join(TASK_MODELS[task.head].autos) for name, task in tasks.items()}
    if len(set(autos.values())) > 1:
        raise ConfigError(
            "these tasks need models of different classes",
            offenders=[f"{n}: {tasks[n].name} ({auto})" for n, auto in autos.items()],
            expected="tasks of one class: classification, multi-label and regression go together",
            hint="a text-to-text model, with seq2seq for each task",
        )
    if len({task.pooling for task in tasks.values()}) > 1:
        raise ConfigError(
            "these tasks pool differently",
            offenders=[f"{name}: pooling={task.pooling}" for name, task in tasks.items()],
            expected="the same pooling in all tasks",
        )
    if process_count() > 1 and any(TASK_MODELS[task.head].has_head for task in tasks.values()):
        raise ConfigError(
            "several heads train in one process",
            hint="adapterhub train without accelerate launch or torchrun",
        )


def enter_tasks(adapter: Adapter, data: RunData, seed: int) -> TaskSwitch:
    """Give an adapter the heads of several tasks, and return the switch between them."""
    heads = {
        name: NamedHead(part.task.name, part.task.head, part.labels)
        for name, part in data.parts.items()
    }
    if adapter.head is not None:
        add_heads(adapter, heads, seed)
    adapter.named_heads = heads

    def select(name: str) -> None:
        if adapter.heads:
            select_head(adapter, name)

    return TaskSwitch(next(iter(heads)), select)


def mix_rows(rows: Mapping[str, FittedRows], mixture: Task, switch: TaskSwitch) -> FittedRows:
    """Return the rows of several tasks as those of one run."""
    train = {name: each.train for name, each in rows.items()}
    evaluation = {name: each.evaluation for name, each in rows.items() if each.evaluation.rows}
    first = next(iter(rows.values()))
    return FittedRows(
        max_length=max(each.max_length for each in rows.values()),
        train=_mixed(train, mixture, switch),
        evaluation=_mixed(evaluation, mixture, switch) if evaluation else first.evaluation,
        lost=(replace(first.lost[0], cut=sum(each.lost[0].cut for each in rows.values())),),
        notes=tuple(f"{name}: {note}" for name, each in rows.items() for note in each.notes),
    )


def _mixed(rows: Mapping[str, Encoded], mixture: Task, switch: TaskSwitch) -> MixedRows:
    tagged = {
        name: TaskRows(
            **{each.name: getattr(encoded, each.name) for each in fields(Encoded)},
            name=name,
            switch=switch,
        )
        for name, encoded in rows.items()
    }
    return MixedRows(
        mixture,
        next(iter(rows.values())).setting,
        tuple(example for encoded in rows.values() for example in encoded.examples),
        [row for encoded in rows.values() for row in encoded.rows],
        (),
        tagged,
        switch,
    )


def steps_of_tasks(
    rows: MixedRows, mixing: Mixing, options: RunOptions, total: int, seed: int
) -> dict[str, int]:
    """Return how many of the first `total` steps of a run train on each task."""
    steps, shares = _steps(rows, options), list(mixture_shares(mixing, rows.sizes).values())
    drawn: Counter[int] = Counter()
    for epoch, start in enumerate(range(0, total, steps)):
        drawn.update(draw_tasks(shares, steps, seed, epoch)[: total - start])
    return {name: drawn[number] for number, name in enumerate(rows.of_tasks)}


def _steps(rows: MixedRows, options: RunOptions) -> int:
    """Return the steps of an epoch: as many as all rows fill."""
    per_step = _batches_per_step(options)
    return -(-len(rows.rows) // (options.batch_size * per_step))


def _batches_per_step(options: RunOptions) -> int:
    _, world = readers(options.tensor_parallel)
    return options.gradient_accumulation * world


def mixed_order(
    rows: MixedRows, mixing: Mixing, options: RunOptions, epoch: int, seed: int
) -> list[list[int]]:
    """Return the index lists of the batches of one epoch, all of an optimizer step from one task.

    An epoch has as many steps as all rows fill, whatever the shares of the tasks. The result
    depends on the arguments alone.
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


def _stream(
    rows: MixedRows, number: int, skip: int, options: RunOptions, seed: int
) -> Iterator[list[int]]:
    """Yield the batches of one task from the one behind `skip` on, pass after pass."""
    lengths, start = rows.parts[number].lengths, rows.starts[number]
    size = options.batch_size
    turn, position = divmod(skip, -(-len(lengths) // size))
    own = seed * 1000 + number  # equally long tasks have orders of their own
    while True:
        order = batch_order(lengths, size, turn, own, options.length_grouped)
        for batch in order[position:]:
            yield [start + index for index in batch]
        turn, position = turn + 1, 0
