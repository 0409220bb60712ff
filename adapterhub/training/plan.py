"""What a run will train and cost, before its first step."""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.quantized_weights import bytes_of, size_of
from adapterhub.training.activation_memory import activation_bytes
from adapterhub.training.optimizers import OPTIMIZERS
from adapterhub.training.run import Prepared


@dataclass(frozen=True)
class TrainingPlan:
    """`sites` lists (site or parameter group, method, parameters); `memory` is in bytes."""

    sites: tuple[tuple[str, str, int], ...]
    backbone: int
    trainable: int
    head: int
    steps: int
    tokens: int
    longest: int
    memory: dict[str, int]


def plan_of(ready: Prepared) -> TrainingPlan:
    """The plan of a prepared run."""
    adapter, options = ready.adapter, ready.recipe.train
    trainable = sum(p.numel() for p in adapter.parameters())
    parameters = adapter.anatomy.parameters().values()
    batches = -(-len(ready.train.rows) // options.batch_size)
    steps = options.max_steps or -(-batches // options.gradient_accumulation) * options.epochs
    longest = max(ready.train.lengths)
    return TrainingPlan(
        sites=_sites(ready),
        backbone=sum(map(size_of, parameters)),
        trainable=trainable,
        head=trainable - adapter.count(),
        steps=steps,
        tokens=sum(ready.train.lengths),
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
    """What the frozen backbone takes, with its own head and with parameters that the adapter has
    a copy of; tied ones once."""
    own = {id(t) for t in adapter.tensors().values()}
    model = [p for p in adapter.model.parameters() if id(p) not in own]
    aside = [changed.original for changed in adapter.changed]
    heads = adapter.head.original.values() if adapter.head else ()
    aside += [p for module in heads for p in module.parameters()]
    buffers = sum(b.numel() * b.element_size() for b in adapter.model.buffers() if id(b) not in own)
    return sum(map(bytes_of, {id(p): p for p in (*model, *aside)}.values())) + buffers


def _sites(ready: Prepared) -> tuple[tuple[str, str, int], ...]:
    adapter = ready.adapter
    placed = [
        (p.site.id, p.method.name, sum(t.numel() for t in p.module.parameters()))
        for p in adapter.placed
    ]
    groups: dict[tuple[str, str], int] = {}
    for changed in adapter.changed:
        part = ".".join(changed.name.split(".")[:2])
        key = (f"{part}.*", changed.method.name if changed.method else "new in the checkpoint")
        groups[key] = groups.get(key, 0) + changed.own.numel()
    heads = adapter.head.own.items() if adapter.head else ()
    return (
        *placed,
        *((site, method, count) for (site, method), count in groups.items()),
        *((f"head.{name}", "head", sum(p.numel() for p in m.parameters())) for name, m in heads),
    )
