"""The plan of a run, before its first step: what will train, and how much memory that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.quantized_weights import bytes_of, size_of
from adapterhub.training.activation_memory import activation_bytes
from adapterhub.training.optimizers import OPTIMIZERS
from adapterhub.training.prepare import PreparedRun


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a run.

    `sites` lists (site or parameter group, method, parameters); `backbone`, `trainable` and `head`
    count parameters, `tokens` those of an epoch, `longest` those of the longest example; `memory`
    is in bytes.
    """

    sites: tuple[tuple[str, str, int], ...]
    backbone: int
    trainable: int
    head: int
    steps: int
    tokens: int
    longest: int
    memory: dict[str, int]


def plan_of(prepared: PreparedRun) -> TrainingPlan:
    """Compute the plan of a prepared run."""
    adapter, options, encoded = prepared.adapter, prepared.recipe.train, prepared.train
    trainable = sum(p.numel() for p in adapter.parameters())
    batches = -(-len(encoded.rows) // options.batch_size)
    steps = options.max_steps or -(-batches // options.gradient_accumulation) * options.epochs
    longest = max(encoded.lengths)
    return TrainingPlan(
        sites=tuple(_sites(adapter)),
        backbone=sum(map(size_of, adapter.anatomy.parameters().values())),
        trainable=trainable,
        head=trainable - adapter.count(),
        steps=steps,
        tokens=sum(encoded.lengths),
        longest=longest,
        memory={
            "backbone weights": weight_bytes(adapter),
            "adapter weights": sum(map(bytes_of, adapter.tensors().values())),
            "gradients": 4 * trainable,
            "optimizer": sum(map(OPTIMIZERS[options.optimizer].bytes, adapter.parameters())),
            "activations": activation_bytes(
                adapter, options.batch_size, longest, options.gradient_checkpointing
            ),
        },
    )


def weight_bytes(adapter: Adapter) -> int:
    """Count the bytes of the frozen backbone.

    They include the backbone's own head and the original parameters that the adapter has copies of;
    tied parameters count once.
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
    for name, module in (adapter.head.own if adapter.head else {}).items():
        yield f"head.{name}", "head", sum(p.numel() for p in module.parameters())
