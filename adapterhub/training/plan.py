"""A run before its first step: trained parameters, memory, and first rows.

On a GPU, the memory of the tensors is counted. On a CPU, the memory of the process is counted: its
current memory, with Python, torch and the data, plus the memory added by training.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from adapterhub.adapters.adapter import Adapter
from adapterhub.anatomy.backbone import Backbone, device_of, is_pipeline
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.load import load_processor, meta_model
from adapterhub.backbones.pooling import max_positions, trained_length
from adapterhub.backbones.quantized import bytes_of
from adapterhub.data.parquet import free_memory
from adapterhub.loop import loop
from adapterhub.loop.engine import OPTIMIZERS, LazyBatches, batch_order
from adapterhub.loop.loop import peak_memory, process_memory
from adapterhub.loop.processes import process_count
from adapterhub.loop.report import Reporter
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import Recipe, mixture_shares, parse_mixing, steps_per_epoch
from adapterhub.speed.activation_memory import (
    HEAP,
    activation_bytes,
    batch_bytes,
    evaluation_bytes,
    logit_bytes,
)
from adapterhub.speed.head_loss import frozen_head
from adapterhub.tasks import Encoded, Setting
from adapterhub.tasks.common.base import encode_whole
from adapterhub.tasks.common.batches import Row, rows_at_once
from adapterhub.tasks.common.language_models import logits_at_once, plain_head
from adapterhub.tasks.common.preview import removed_text
from adapterhub.training.loading import fit_rows
from adapterhub.training.run import PreparedRun, epoch_batches, shares_of, training_session
from adapterhub.training.run_data import read_data
from adapterhub.training.sources import SourceRows
from adapterhub.training.stream import StreamedRows
from adapterhub.training.task_mixture import MixedRows, steps_of_tasks


@dataclass(frozen=True)
class PlannedTask:
    """One of several tasks: its rows, its share of the steps, and its number of steps."""

    name: str
    task: str
    rows: int
    share: float
    steps: int
    weight: float


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a run.

    `sites` lists (site or parameter group, method, parameters). `backbone`, `trainable` and `head`
    count parameters. `tokens` counts the tokens of an epoch, `longest` the tokens of the longest
    example. `rates` are the peak learning rates of the parameter groups. `labels` counts the labels
    of the training data, `truncated` its examples that are cut to the maximum length. `memory` is
    in bytes. `tasks` is set for a run with several tasks, `sources` for one with several sources of
    rows: each with its share.
    """

    sites: tuple[tuple[str, str, int], ...]
    backbone: int
    trainable: int
    head: int
    steps: int
    steps_per_epoch: int
    tokens: int
    longest: int
    rates: dict[str, float]
    labels: dict[str, int]
    truncated: int
    memory: dict[str, int]
    tasks: tuple[PlannedTask, ...] = ()
    sources: tuple[tuple[SourceRows, float], ...] = ()


def plan_of(prepared: PreparedRun, process: int | None = None) -> TrainingPlan:
    """Compute the plan of a prepared run.

    `process` is the memory of the process before any step; by default, its current memory.
    """
    adapter, options, encoded = prepared.adapter, prepared.options, prepared.train
    trainable = sum(p.numel() for p in adapter.parameters())
    per_epoch = steps_per_epoch(
        len(encoded.rows), options.batch_size, options.gradient_accumulation
    )
    groups = AdapterTrainee(adapter).param_groups(options)
    lengths = encoded.lengths  # for a stream, of its first rows
    known = not prepared.data.streams
    return TrainingPlan(
        sites=tuple(_sites(adapter)),
        backbone=prepared.backbone_parameters,
        trainable=trainable,
        head=trainable - adapter.count(),
        steps=options.max_steps or per_epoch * options.epochs,
        steps_per_epoch=per_epoch,
        tokens=round(sum(lengths) * len(encoded.rows) / len(lengths)),
        longest=max(lengths),
        rates={group["name"]: group["lr"] for group in groups},
        labels=encoded.task.label_counts(encoded) if known else {},
        truncated=sum(each.cut for each in prepared.rows.lost[:1]),
        memory=_memory(prepared, process),
        tasks=tuple(_tasks(prepared, options.max_steps or per_epoch * options.epochs)),
        sources=tuple((each, shares_of(prepared)[each.name]) for each in prepared.data.sources),
    )


@dataclass(frozen=True)
class Rehearsal:
    """The cost of a few steps of a run: its longest batch, and usual ones.

    Attributes:
        steps: the number of steps made.
        step_seconds: the time of a usual step.
        seconds: the time of the whole run, if all steps and evaluations take as long.
        peak_memory: in bytes, measured as in the run.
    """

    steps: int
    step_seconds: float
    seconds: float
    peak_memory: int


_LONGEST, _USUAL = 2, 3  # steps of a rehearsal: the optimizer has its state from the second one on


class _NoRoom(Exception):
    """A whole batch does not fit into the free memory, judging by a step of one row."""


def rehearse(prepared: PreparedRun) -> Rehearsal | None:
    """Make a few steps and an evaluation as in the run, in a temporary folder.

    The first step has one row. The steps change the adapter, so the run itself must be prepared
    again. Return None if a batch would not fit into the free memory, judging by that row, or if
    several processes share the run.

    Raises:
        AdapterhubError: a step fails, as it would in the run.
    """
    try:
        return None if process_count() > 1 else _rehearsal(prepared)
    except _NoRoom:
        return None


def _rehearsal(prepared: PreparedRun) -> Rehearsal:
    options, streamed = prepared.options, isinstance(prepared.train, StreamedRows)
    encoded = prepared.train.head if isinstance(prepared.train, StreamedRows) else prepared.train
    lengths, size, seed = encoded.lengths, options.batch_size, prepared.recipe.seed
    batches = None if streamed else epoch_batches(prepared, 0)
    if not isinstance(batches, LazyBatches):
        grouped = batch_order(lengths, size, 0, seed, options.length_grouped)
        batches = LazyBatches(grouped, lambda indices: encoded.batch(indices, 0))
    order, collate = batches.order, batches.collate
    per_epoch = steps_per_epoch(len(prepared.train.rows), size, options.gradient_accumulation)
    steps = options.max_steps or per_epoch * options.epochs
    drawn = order[: steps * options.gradient_accumulation]
    whole = [each for each in drawn if len(each) == len(drawn[0])]
    longest = max(whole, key=lambda indices: max(lengths[i] for i in indices))
    usual = [whole[len(whole) * place // (_USUAL + 1)] for place in range(1, _USUAL + 1)]
    alone = [max(longest, key=lambda i: lengths[i])]
    marks: list[float] = []
    device = device_of(prepared.model) or torch.device("cpu")
    before = peak_memory(device)

    def collated(indices: list[int]) -> Any:
        if len(marks) == 1 and (peak_memory(device) - before) * size > _room(device):
            raise _NoRoom
        marks.append(time.perf_counter())
        return collate(indices)

    with tempfile.TemporaryDirectory() as folder:
        few = replace(
            options, max_steps=1 + _LONGEST + _USUAL, gradient_accumulation=1, eval_every="epoch",
            patience=None, tensorboard=False, tracker=(), save_every=None,
        )  # fmt: skip
        recipe = replace(prepared.recipe, train=few, output=str(Path(folder) / "run"))
        session = training_session(replace(prepared, recipe=recipe), Reporter(), False)
        made = LazyBatches([alone, *[longest] * _LONGEST, *usual], collated)
        session.batches = lambda epoch: made
        ended: list[float] = []
        largest = _largest_rows(prepared)

        def evaluate() -> Mapping[str, float]:
            ended.append(time.perf_counter())
            if largest is None:
                return {}
            task, rows = prepared.data.task, options.eval_batch_size
            metrics = task.evaluate(prepared.model, largest, rows)
            ended.append(time.perf_counter())
            return metrics

        session.evaluate = evaluate if largest is not None else None
        Path(recipe.output).mkdir()
        result = loop.train(session)
    stop = ended[0] if ended else time.perf_counter()
    step = (stop - marks[-_USUAL]) / _USUAL * options.gradient_accumulation
    seconds = steps * step
    if largest is not None and prepared.evaluation is not None:
        every = options.eval_every if isinstance(options.eval_every, int) else per_epoch
        share = len(prepared.evaluation.rows) / max(len(largest.rows), 1)
        seconds += math.ceil(steps / every) * share * (ended[1] - ended[0])
    return Rehearsal(1 + _LONGEST + _USUAL, step, seconds, result.peak_memory)


def _room(device: torch.device) -> float:
    """Return the free bytes; infinity if the system does not report them."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def _largest_rows(prepared: PreparedRun) -> Encoded | None:
    """Return one batch of the longest evaluation rows; None without evaluation rows."""
    rows = prepared.evaluation
    if rows is None or prepared.data.parts or not len(rows.examples):
        return None
    if not rows.owners:
        return replace(rows, rows=[*islice(rows.rows, prepared.options.eval_batch_size)])
    lengths = rows.lengths
    first = sorted(range(len(rows.rows)), key=lambda i: -lengths[i])
    chosen = dict.fromkeys(rows.owners[i] for i in first)
    kept = sorted([*chosen][: prepared.options.eval_batch_size])
    numbers = {owner: number for number, owner in enumerate(kept)}
    places = [i for i, owner in enumerate(rows.owners) if owner in numbers]
    return replace(
        rows,
        examples=[rows.examples[owner] for owner in kept],
        rows=[rows.rows[i] for i in places],
        owners=[numbers[rows.owners[i]] for i in places],
    )


def _tasks(prepared: PreparedRun, total: int) -> Iterator[PlannedTask]:
    """Yield the share of each of several tasks in a run of so many steps."""
    rows, recipe = prepared.train, prepared.recipe
    if not isinstance(rows, MixedRows):
        return
    mixing = parse_mixing(recipe.mixing)
    shares = mixture_shares(mixing, rows.sizes)
    steps = steps_of_tasks(rows, mixing, prepared.options, total, recipe.seed)
    for name, own in recipe.tasks.items():
        task = prepared.data.parts[name].task.name
        yield PlannedTask(name, task, rows.sizes[name], shares[name], steps[name], own.weight)


def _memory(prepared: PreparedRun, now: int | None) -> dict[str, int]:
    """Estimate the memory of the run in bytes, by part."""
    adapter, options = prepared.adapter, prepared.options
    rows, tokens = options.batch_size, max(prepared.train.lengths)
    on_cpu = device_of(adapter.model) == torch.device("cpu")
    offloaded = options.offload_activations and not on_cpu
    recomputed = options.gradient_checkpointing
    if adapter.backbone.foreign:  # its batches are not texts, which could be made up
        batch = partial(batch_bytes, adapter, prepared.train.batch, recomputed)
        layers = batch(1) + (rows - 1) * (batch(2) - batch(1))
        extra = round((HEAP - 1) * layers) if on_cpu else 0
        return _parts_of_memory(prepared, layers, extra, now)
    layers = activation_bytes(adapter, rows, tokens, recomputed, offloaded)
    frozen = None if prepared.data.parts else frozen_head(adapter, prepared.data.task, options)
    activations = layers + logit_bytes(adapter, logits_at_once(frozen, rows * tokens))
    evaluated = _largest_evaluation(prepared, on_cpu) or (rows, tokens)
    written = logits_at_once(plain_head(adapter.backbone.pretrained), math.prod(evaluated))
    heap = HEAP if on_cpu else 1.0
    peak = max(
        activations + (heap - 1) * layers,
        logit_bytes(adapter, written) + heap * evaluation_bytes(adapter, *evaluated),
    )
    return _parts_of_memory(prepared, activations, round(peak) - activations, now)


def _parts_of_memory(
    prepared: PreparedRun, activations: int, temporary: int, now: int | None
) -> dict[str, int]:
    adapter, options = prepared.adapter, prepared.options
    on_cpu = device_of(adapter.model) == torch.device("cpu")
    weights = {
        "backbone weights": weight_bytes(adapter),
        "adapter weights": sum(map(bytes_of, adapter.tensors().values())),
    }
    # Measured after the small batches, which load the remaining libraries.
    now = process_memory() if now is None else now
    process = max(now - sum(weights.values()), 0) if on_cpu else 0
    return {
        **({"process": process} if on_cpu else {}),
        **weights,
        "gradients": 4 * sum(p.numel() for p in adapter.parameters()),
        "optimizer": sum(map(OPTIMIZERS[options.optimizer].bytes, adapter.parameters())),
        "activations": activations,
        "temporary": temporary,
    }


def _largest_evaluation(prepared: PreparedRun, on_cpu: bool) -> tuple[int, int] | None:
    """Return the rows and tokens of the largest evaluation batch, or None without evaluation."""
    if prepared.evaluation is None:
        return None
    most, longest = prepared.options.eval_batch_size, max(prepared.evaluation.lengths)
    return (rows_at_once(most, longest) if on_cpu else most), longest


def weight_bytes(adapter: Adapter) -> int:
    """Count the bytes of the frozen backbone.

    They include the backbone's own head and the original parameters that the adapter copied; tied
    parameters count once.
    """
    trained = {id(t) for t in adapter.tensors().values()}
    parameters = [p for p in adapter.model.parameters() if id(p) not in trained]
    parameters += [changed.original for changed in adapter.changed]
    for head in adapter.head.original.values() if adapter.head else ():
        parameters += head.parameters()
    buffers = [b for b in adapter.model.buffers() if id(b) not in trained]
    return sum(map(bytes_of, {id(p): p for p in parameters}.values())) + sum(
        b.numel() * b.element_size() for b in buffers
    )


def _sites(adapter: Adapter) -> Iterator[tuple[str, str, int]]:
    """Yield (site or parameter group, method, parameters)."""
    for placed in adapter.placed:
        count = sum(t.numel() for t in placed.module.parameters())
        yield placed.site.id, placed.method.name, count
    groups: Counter[tuple[str, str]] = Counter()
    for changed in adapter.changed:
        group = ".".join(changed.name.split(".")[:2])
        method = changed.method.name if changed.method else "newly initialized"
        groups[f"{group}.*", method] += changed.own.numel()
    for (group, method), count in groups.items():
        yield group, method, count
    for prefix, head in adapter.all_heads():
        for name, module in head.own.items():
            yield f"{prefix}.{name}", "head", sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class RowPreview:
    """One row: its title, and its content by name."""

    title: str
    facts: dict[str, str]


def preview_rows(recipe: Recipe, count: int) -> tuple[list[RowPreview], tuple[str, ...]]:
    """Return the first training rows of a recipe, and the notes at the start of its run.

    Virtual tokens of a method are not included.

    Raises:
        AdapterhubError: as in a run, up to its first step.
    """
    if recipe.tasks:
        return _preview_tasks(recipe, count)
    data = read_data(recipe)
    recipe = data.completed(recipe)
    names: dict[str, Any] = {"task": data.task.head, "labels": data.labels}
    names |= {"revision": recipe.revision, "family": recipe.family}
    head, tokens = data.task.head, recipe.new_tokens
    processor = load_processor(recipe.backbone, head, recipe.revision, tokens)
    is_model = is_pipeline(processor)  # a diffusers pipeline is its own processor
    model = Backbone.of(processor).module if is_model else meta_model(recipe.backbone, **names)
    positions = max_positions(model)
    setting = Setting(processor, positions, data.labels, recipe.seed, positions)
    folder, _ = find_backbone(recipe.backbone, recipe.revision)
    rows = fit_rows(data, setting, recipe.train.max_length, trained_length(folder))
    train = rows.train.head if isinstance(rows.train, StreamedRows) else rows.train
    return _previews(train, count), (*data.chosen, *data.notes, *rows.notes)


def _preview_tasks(recipe: Recipe, count: int) -> tuple[list[RowPreview], tuple[str, ...]]:
    """Return the first rows of each of several tasks, and the notes on each."""
    previews: list[RowPreview] = []
    notes: list[str] = []
    for name in recipe.tasks:
        rows, own = preview_rows(recipe.of_task(name), count)
        previews += [replace(row, title=f"{name}: {row.title}") for row in rows]
        notes += [f"{name}: {note}" for note in own]
    return previews, tuple(notes)


def _previews(encoded: Encoded, count: int) -> list[RowPreview]:
    task, setting = encoded.task, encoded.setting
    indices = range(min(count, len(encoded.rows)))
    rows = [task.vary(encoded.rows[i], setting, (setting.seed, 0, i)) for i in indices]
    previews = []
    for i, row in zip(indices, rows, strict=True):
        facts = {**_texts(encoded, i), **task.show_row(row, setting)}
        if task.limits(setting):
            facts |= {"length": _length(row, rows, encoded), **_cut(encoded, i)}
        previews.append(RowPreview(f"row {i + 1} of {len(encoded.rows):,}", facts))
    return previews


def _length(row: Row, rows: list[Row], encoded: Encoded) -> str:
    """Describe the length of a row, and its padding in a batch."""
    task, setting = encoded.task, encoded.setting
    length, longest = len(row["input_ids"]), max(task.row_lengths(each)[0] for each in rows)
    side = task.padding_side(setting)
    padding = f"; {longest - length} of padding on the {side} in a batch of these rows"
    return f"{length} tokens{padding * (length < longest)}"


def _texts(encoded: Encoded, index: int) -> dict[str, str]:
    if not encoded.owners:  # packed: a row contains several texts
        return {}
    task = encoded.task
    first, *others = task.shown(encoded.examples[encoded.owners[index]])
    further = enumerate(others, start=2)
    named = {task.pair_name or f"{task.input_name} {i}": text for i, text in further}
    return {task.input_name: first, **named}


def _cut(encoded: Encoded, index: int) -> dict[str, str]:
    """Describe the part of a row's example that truncation removes."""
    if not encoded.owners:
        return {}
    owner, setting = encoded.owners[index], encoded.setting
    whole = encode_whole(encoded.task, [encoded.examples[owner]], setting)
    windows = [r for o, r in zip(encoded.owners, encoded.rows, strict=True) if o == owner]
    facts = {"windows": f"the text has {len(windows)}"} if len(windows) > 1 else {}
    for name, key in (("cut", "input_ids"), ("cut from the target", "labels")):
        before = [i for row in whole.rows for i in _tokens(row.get(key))]
        after = [i for row in windows for i in _tokens(row.get(key))]
        if len(after) < len(before) and not (key == "labels" and "cut" in facts):
            text = removed_text(before, after, setting.tokenizer)
            facts[name] = f"{len(before) - len(after)} of {len(before)} tokens: {text}"
    return facts


def _tokens(values: object) -> list[int]:
    return [v for v in values if isinstance(v, int)] if isinstance(values, list) else []
