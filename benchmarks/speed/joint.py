"""Measure steps of several configurations, trained together and one after another.

    python benchmarks/speed/joint.py [--threads 2 --clock wall] [--output joint.json]

K LoRA adapters of different ranks and learning rates train on one backbone of the size of MiniLM
with random weights, on the same rows: in shared passes (`train_together`), and each alone. Both
alternate in one process, so that drift affects both equally. Figures are milliseconds for one step
of all K configurations, with everything that the loop does: the median over runs, the lowest and
the highest, and the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from in_turns import CLOCKS, MINILM, add_options, write_record
from transformers import BertConfig, BertForSequenceClassification

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import AdapterhubError
from adapterhub.tasks._losses import class_loss
from adapterhub.training.batching import LazyBatches
from adapterhub.training.joint import train_together
from adapterhub.training.loop import TrainingSession, train
from adapterhub.training.options import RunOptions
from adapterhub.training.report import Reporter
from adapterhub.training.trainee import AdapterTrainee

SHAPES = ("4x13", "8x13", "16x13", "32x13")


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--configurations", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x tokens of a batch")
    parser.add_argument("--steps", type=int, default=8, help="of each configuration, in a run")
    parser.add_argument("--tokens", type=int, help="most tokens of a shared pass")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measured = {
        f"{count} configurations, {shape}": measure(options, count, shape)
        for count in options.configurations
        for shape in options.shapes
    }
    write_record(options, measured)


def measure(options: argparse.Namespace, count: int, shape: str) -> dict[str, float]:
    """Time the steps of `count` configurations on batches of a shape, in both ways in turn."""
    rows, tokens = map(int, shape.split("x"))
    adapters = attached(options, count)
    batch = batch_of(rows, tokens)

    def together() -> None:
        sessions = [session(options, adapter, batch) for adapter in adapters]
        failed(train_together(sessions, most_tokens=options.tokens))

    def alone() -> None:
        for adapter in adapters:
            ah.activate(adapter.model, adapter.name)
            train(session(options, adapter, batch))

    times: dict[str, list[float]] = {"together": [], "alone": []}
    for number in range(options.runs + 1):
        for name, way in (("together", together), ("alone", alone)):
            seconds = timed(way, CLOCKS[options.clock])
            if number:  # the first ones warm up
                times[name].append(1000 * seconds / options.steps)
    ratios = [a / t for a, t in zip(times["alone"], times["together"], strict=True)]
    return {
        **{name: round(statistics.median(each), 2) for name, each in times.items()},
        **{f"{name}_min": round(min(each), 2) for name, each in times.items()},
        **{f"{name}_max": round(max(each), 2) for name, each in times.items()},
        "alone / together": round(statistics.median(ratios), 3),
    }


def timed(way: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the seconds that a call takes."""
    start = clock()
    way()
    return clock() - start


def failed(outcomes: Sequence[object]) -> None:
    """Raise the first error of several runs."""
    for outcome in outcomes:
        if isinstance(outcome, AdapterhubError):
            raise outcome


def attached(options: argparse.Namespace, count: int) -> list[Adapter]:
    """Attach adapters of different ranks to one model."""
    torch.manual_seed(0)
    config = BertConfig(**MINILM, num_labels=2)
    model = BertForSequenceClassification(config).to(getattr(torch, options.dtype))
    model = model.to(options.device)
    return [
        ah.attach(model, f"lora(rank={2 ** (n % 4 + 1)})", name=f"run{n}") for n in range(count)
    ]


def batch_of(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return a batch with labels, without padding."""
    ids = torch.randint(1000, 30_000, (rows, tokens))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.arange(rows) % 2,
    }


def session(
    options: argparse.Namespace, adapter: Adapter, batch: dict[str, torch.Tensor]
) -> TrainingSession:
    """Return a session of some steps on one batch, without evaluations."""
    number = int(adapter.name.removeprefix("run"))
    run_options = RunOptions(
        max_steps=options.steps, learning_rate=1e-4 * (number + 1), log_every=options.steps
    )
    batches = LazyBatches([[0]] * options.steps, lambda _: batch)
    return TrainingSession(
        AdapterTrainee(adapter),
        lambda epoch: batches,
        None,
        run_options,
        output=Path(tempfile.mkdtemp()),
        seed=0,
        main_metric="loss",
        resume=False,
        run={},
        reporter=Reporter(),
        loss_of_rows=class_loss,
    )


if __name__ == "__main__":
    main()
