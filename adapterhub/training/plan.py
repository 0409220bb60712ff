"""What a run will train and cost, before its first step."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from adapterhub.training.run import Prepared


@dataclass(frozen=True)
class Plan:
    """`sites` lists (site or parameter group, method, parameters); `memory` is in bytes."""

    sites: tuple[tuple[str, str, int], ...]
    backbone: int
    trainable: int
    head: int
    steps: int
    tokens: int
    longest: int
    memory: dict[str, int]


def plan_of(ready: Prepared) -> Plan:
    """The plan of a prepared run."""
    adapter, options = ready.adapter, ready.recipe.train
    trainable = sum(p.numel() for p in adapter.parameters())
    batches = -(-len(ready.train.rows) // options.batch_size)
    steps = options.max_steps or -(-batches // options.gradient_accumulation) * options.epochs
    longest = max(ready.train.lengths)
    weights = sum(p.numel() * p.element_size() for p in adapter.anatomy.parameters().values())
    return Plan(
        sites=_sites(ready),
        backbone=sum(p.numel() for p in adapter.anatomy.parameters().values()),
        trainable=trainable,
        head=trainable - adapter.count(),
        steps=steps,
        tokens=sum(ready.train.lengths),
        longest=longest,
        memory={
            "backbone weights": weights,
            "adapter weights": 4 * trainable,
            "gradients": 4 * trainable,
            "optimizer": 8 * trainable,
            "activations": activation_bytes(adapter.model, options.batch_size, longest),
        },
    )


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


def activation_bytes(model: PreTrainedModel, batch: int, tokens: int) -> int:
    """What the backward pass keeps of one batch, in bytes: an estimate.

    batch tokens hidden (34 + 5 heads tokens / hidden) a layer in 16-bit, twice that in 32-bit.
    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
    equation 2, https://arxiv.org/abs/2205.05198.
    """
    config = model.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = 2 if model.dtype.itemsize == 4 else 1
    return int(
        width * layers * batch * tokens * (34 * hidden + 5 * config.num_attention_heads * tokens)
    )
