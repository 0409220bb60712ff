"""Several task heads of one adapter: they share its other tensors, and one applies at a time.

Each head has its own labels and problem type. All belong to one model class, such as
`BertForSequenceClassification`: its modules are exchanged, and its `forward` stays the same.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter, AdapterHead, NamedHead
from adapterhub.anatomy.backbone import LABEL_FIELDS, Backbone, device_of
from adapterhub.backbones.task_models import label_options
from adapterhub.errors import AttachError, unknown

_DRAWN = "_is_hf_initialized"  # the flag that transformers sets on initialized modules


def add_heads(adapter: Adapter, tasks: Mapping[str, NamedHead], seed: int) -> None:
    """Give a new adapter a head for each of several tasks, and select the first one.

    The first task keeps the adapter's current head if the labels are the same. The other heads are
    initialized as in transformers, each from the seed and its name.

    Raises:
        AttachError: the model has no head, or its head has no output layer.
    """
    if adapter.head is None:
        raise AttachError("the model has no task head", hint="load_backbone(..., task=...)")
    first = next(iter(tasks))
    fits = adapter.head.labels == _labels_of(tasks[first])
    adapter.heads = {
        name: adapter.head
        if fits and name == first
        else _new_head(adapter, task, _seed_of(seed, name))
        for name, task in tasks.items()
    }
    adapter.named_heads = dict(tasks)
    select_head(adapter, first)


def select_head(adapter: Adapter, name: str) -> None:
    """Select one of an adapter's heads, in the mode of the previous one; only it trains.

    Raises:
        ConfigError: the adapter has no such head.
    """
    if name not in adapter.heads:
        raise unknown("head", name, adapter.heads)
    before, head = adapter.head, adapter.heads[name]
    for each in adapter.heads.values():
        for module in each.own.values():
            module.requires_grad_(each is head)
    if before is head:
        return
    if before is not None:
        for child, module in head.own.items():
            module.train(before.own[child].training)
    if before is not None:
        before.patch.undo()
    adapter.head = head
    if adapter.active:
        head.put_into(adapter.backbone)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


def _new_head(adapter: Adapter, task: NamedHead, seed: int) -> AdapterHead:
    """Return a head for a task, newly initialized where the adapter's current head is."""
    model, template = adapter.backbone.pretrained, adapter.head
    assert template is not None
    labels = _labels_of(task)
    own = {name: copy.deepcopy(module) for name, module in template.own.items()}
    for module in own.values():
        module._forward_pre_hooks.clear()  # `AdapterHead` adds its own
        module.to("cpu")
    old, new = len(template.labels["id2label"]), len(labels["id2label"])
    resized = _resize_output(own, old, new)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        _draw(model, own, resized)
    for name, module in own.items():
        module.to(device_of(template.own[name]))
    return AdapterHead(own, template.original, labels, template.original_labels)


def _labels_of(task: NamedHead) -> dict[str, Any]:
    options = label_options(task.kind, task.labels)
    names = options.get("id2label", {0: "LABEL_0"})
    fields = {
        "id2label": dict(names),
        "label2id": {label: i for i, label in names.items()},
        "problem_type": options["problem_type"],
    }
    return {name: fields[name] for name in LABEL_FIELDS}


def _resize_output(own: Mapping[str, nn.Module], old: int, new: int) -> nn.Linear | None:
    """Resize the output layer of a head to `new` rows; return it, or None if there is none.

    The output layer is the last linear layer with as many outputs as the head has labels.
    """
    linear = [m for module in own.values() for m in module.modules() if isinstance(m, nn.Linear)]
    outputs = [layer for layer in linear if layer.out_features == old]
    if not outputs:
        if old == new:
            return None
        raise AttachError(
            "the model's head has no linear output layer, so heads of other sizes cannot be made",
            expected=f"a layer with {old} outputs",
        )
    layer = outputs[-1]
    layer.out_features = new
    layer.weight = nn.Parameter(layer.weight.new_empty(new, layer.in_features))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.new_zeros(new))
    return layer


def _draw(model: PreTrainedModel, own: Mapping[str, nn.Module], resized: nn.Module | None) -> None:
    """Initialize the modules that the checkpoint lacks, as in transformers."""
    fresh = Backbone.of(model).fresh
    for name, head in own.items():
        for path, module in head.named_modules():
            prefix = ".".join(part for part in (name, path) if part)
            parameters = dict(module.named_parameters(recurse=False))
            if module is not resized and not any(f"{prefix}.{p}" in fresh for p in parameters):
                continue
            for marked in (module, *parameters.values()):
                setattr(marked, _DRAWN, False)
            model._init_weights(module)
