"""The result of every importer: another library's checkpoint, translated for one backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ImportedAdapter:
    """Another library's checkpoint, translated for one backbone.

    `methods` is a method spec, one `{name: {option: value}}` each; `tensors` have the names of
    native files (`encoder.0.attn.q.lora.A`, `head.classifier.weight`); `head` tells whether they
    include a task head. `labels` are the names of its outputs, () if the checkpoint has none;
    `task` is the model's task, if recorded; `activation` is that of a head of own layers, None for
    the head of the model's class. `backbone` and `revision` are recorded in the
    checkpoint. `notes` tell the user what could not be carried over unchanged.
    """

    format: str
    name: str
    methods: tuple[Mapping[str, Mapping[str, Any]], ...]
    tensors: Mapping[str, Tensor]
    head: bool = False
    labels: tuple[str, ...] = ()
    task: str | None = None
    activation: str | None = None
    backbone: str | None = None
    revision: str | None = None
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint records about its backbone, readable before the backbone is loaded.

    `backbone` and `revision` name it, `task` is the task of the model it was trained on, and
    `outputs` the number of outputs of its task head, 0 without one.
    """

    backbone: str | None = None
    revision: str | None = None
    task: str | None = None
    outputs: int = 0
    labels: tuple[str, ...] = ()
