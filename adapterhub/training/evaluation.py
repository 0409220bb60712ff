"""What a model computes before and between steps: evaluations, and the reference of a loss.

Of an evaluation, each process of a run computes some of the batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from transformers import PreTrainedModel

from adapterhub.adapters.attached import only_foundations
from adapterhub.status import doing
from adapterhub.tasks._division import Division, dividing
from adapterhub.training.lengths import FittedRows
from adapterhub.training.processes import (
    everyone_s,
    join_processes,
    process_count,
    process_index,
)


@contextmanager
def divided_evaluation(*, sharded: bool = False, together: bool = False) -> Iterator[None]:
    """Divide the batches inside over the processes of the run; all get the same results.

    Args:
        sharded: whether each process holds a share of the parameters.
        together: whether the processes compute each batch together (tensor parallelism): then
            nothing is divided.
    """
    if process_count() == 1 or together:
        yield
        return
    join_processes()
    with dividing(Division(process_index(), process_count(), everyone_s, in_step=sharded)):
        yield


def with_reference(
    rows: FittedRows,
    model: PreTrainedModel,
    batch_size: int,
    *,
    started: bool,
    sharded: bool = False,
    together: bool = False,
) -> FittedRows:
    """Return rows with their reference, if their task compares with one.

    It is that of the model with the new adapter off, and those below it on; or, if the adapter was
    started from another one, that of the model with it. A resumed run computes it again, before the
    tensors of its checkpoint are loaded.

    Args:
        rows: the rows of a run.
        model: the model, with the new adapter active.
        batch_size: rows per forward pass.
        started: whether the adapter has the tensors of another one.
        sharded: whether each process holds a share of the model.
        together: whether the processes compute each batch together.
    """
    task = rows.train.task
    if not task.compares_with_reference:
        return rows
    parts = (rows.train, rows.evaluation)
    off = nullcontext() if started else only_foundations(model)
    divided = divided_evaluation(sharded=sharded, together=together)
    with off, doing("computing the reference"), divided:
        train, evaluation = (
            task.with_reference(model, part, batch_size) if part.rows else part for part in parts
        )
    return replace(rows, train=train, evaluation=evaluation)
