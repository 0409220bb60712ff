"""The batches of a run: of all its rows in an order of each epoch, or drawn of a stream."""

from __future__ import annotations

from adapterhub.training.batching import BatchList, LazyBatches, batch_order
from adapterhub.training.defaults import steps_per_epoch
from adapterhub.training.example_stream import BUFFER
from adapterhub.training.mixing import parse_mixing
from adapterhub.training.mixture import mixed_order
from adapterhub.training.prepare import PreparedRun
from adapterhub.training.processes import readers
from adapterhub.training.speedups import Trial, with_and_without_padding
from adapterhub.training.stream_batches import StreamBatches, StreamedRows
from adapterhub.training.task_mixture import MixedRows


def drawn_batches(prepared: PreparedRun) -> StreamBatches | None:
    """Return the batches of a run whose rows are streamed, from the first one on."""
    if not isinstance(prepared.train, StreamedRows):
        return None
    data = prepared.data.options
    rank, world = readers(prepared.options.tensor_parallel)
    return StreamBatches(
        prepared.train,
        prepared.options,
        workers=data.workers or 0,
        rank=rank,
        world=world,
        buffer=data.buffer or BUFFER,
    )


def epoch_batches(prepared: PreparedRun, epoch: int) -> BatchList:
    """Return the batches of an epoch; of a stream, those from its beginning on."""
    if stream := drawn_batches(prepared):
        return stream
    options, encoded, seed = prepared.options, prepared.train, prepared.recipe.seed
    if isinstance(encoded, MixedRows):
        mixing = parse_mixing(prepared.recipe.mixing)
        order = mixed_order(encoded, mixing, options, epoch, seed)
    else:
        size, grouped = options.batch_size, options.length_grouped
        order = batch_order(encoded.lengths, size, epoch, seed, grouped)
    return LazyBatches(order, lambda indices: encoded.batch(indices, epoch))


def begun_epochs(prepared: PreparedRun) -> int:
    """Return how many epochs a run begins."""
    options = prepared.options
    if options.max_steps is None:
        return options.epochs
    rows = len(prepared.train.rows)
    per_epoch = steps_per_epoch(rows, options.batch_size, options.gradient_accumulation)
    return -(-options.max_steps // per_epoch)


def first_batches(prepared: PreparedRun) -> Trial:
    """Return what a speedup is tried on: the first rows, also in a resumed run."""
    evaluation = prepared.evaluation
    few = {} if evaluation is None else evaluation.batch(range(min(8, len(evaluation.rows))))
    training = with_and_without_padding(epoch_batches(prepared, 0)[0])
    return Trial(training, with_and_without_padding(few) if few else ())
