"""What a run will train and cost, before its first step."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from adapterhub.adapter import Adapter
from adapterhub.backbones.quantized import bytes_of, size_of
from adapterhub.training.optimizers import OPTIMIZERS
from adapterhub.training.run import Prepared

LOGIT_BYTES = 12.5  # measured: transformers keeps them in fp32, twice, and their gradient


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
    parameters = adapter.anatomy.parameters().values()
    batches = -(-len(ready.train.rows) // options.batch_size)
    steps = options.max_steps or -(-batches // options.gradient_accumulation) * options.epochs
    longest = max(ready.train.lengths)
    return Plan(
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
                adapter.model, options.batch_size, longest, options.gradient_checkpointing
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


def activation_bytes(
    model: PreTrainedModel, batch: int, tokens: int, recomputed: bool = False
) -> int:
    """What the backward pass keeps of one batch, in bytes: an estimate.

    batch tokens hidden (34 + 5 heads tokens / hidden) a layer in 16-bit, twice that in 32-bit;
    `recomputed` layers keep their input alone, but for one at a time. Korthikanti et al. 2022,
    "Reducing Activation Recomputation in Large Transformer Models", equation 2,
    https://arxiv.org/abs/2205.05198. The logits of a language model, with their loss in fp32, are
    LOGIT_BYTES each.
    """
    config = model.config.get_text_config()
    hidden, layers, size = config.hidden_size, config.num_hidden_layers, model.dtype.itemsize
    width = 2 if size == 4 else 1
    layer = width * batch * tokens * (34 * hidden + 5 * config.num_attention_heads * tokens)
    kept = layer + layers * batch * tokens * hidden * size if recomputed else layers * layer
    scores = model.get_output_embeddings() is not None
    return int(kept + scores * LOGIT_BYTES * batch * tokens * config.vocab_size)
