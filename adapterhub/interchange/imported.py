"""An adapter that another library wrote, in our terms: what every importer gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ImportedAdapter:
    """A foreign checkpoint, translated for one backbone.

    `methods` is a method spec, one `{name: {option: value}}` each; `tensors` go by the names of
    adapter files (`encoder.0.attn.q.lora.A`, `head.classifier.weight`); `head` says whether a task
    head is among them. `labels` are the names of its outputs, () where the checkpoint does not say;
    `task` is the kind of model, where it says. `backbone` and `revision` are what the checkpoint
    names as its backbone. `notes` tell the user what the translation could not carry over as it is.
    """

    format: str
    name: str
    methods: tuple[Mapping[str, Mapping[str, Any]], ...]
    tensors: Mapping[str, Tensor]
    head: bool = False
    labels: tuple[str, ...] = ()
    task: str | None = None
    backbone: str | None = None
    revision: str | None = None
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class CheckpointInfo:
    """What a foreign checkpoint says before a backbone is loaded for it.

    `backbone` and `revision` are those it names, `task` the kind of model that it was trained on,
    and `outputs` the number of outputs of its task head, 0 without one.
    """

    backbone: str | None = None
    revision: str | None = None
    task: str | None = None
    outputs: int = 0
    labels: tuple[str, ...] = ()
