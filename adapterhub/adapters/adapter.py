"""The adapter handle: one trained, named instance of methods on one backbone, and its task head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub._version import __version__
from adapterhub.adapters.parts import (
    HEAD,
    AdapterHead,
    OwnedParameter,
    PlacedModule,
    make_slot,
    slot_at,
)
from adapterhub.anatomy.sites import CHILD, Anatomy
from adapterhub.backbones.identity import name_and_revision
from adapterhub.backbones.task_models import task_kind
from adapterhub.backbones.tokenizer import tokenizer_snapshot
from adapterhub.backbones.weights import dtype_and_quantization, is_sharded, whole
from adapterhub.errors import AttachError
from adapterhub.files.card import export_card
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead
from adapterhub.files.native import write_adapter
from adapterhub.hooks.new_tokens import NewTokenRows
from adapterhub.hooks.prompt import forget_prompt
from adapterhub.hooks.slot import Slot, drop_slot
from adapterhub.interchange.peft.exporter import ExportedModule, ExportSource, check_format, to_peft
from adapterhub.interchange.peft.files import write_peft
from adapterhub.interchange.peft.targets import modules_of
from adapterhub.methods._base import Method
from adapterhub.methods._spec import dump_methods

LISTING = ("description", "license", "language", "tags")  # the manifest's fields for registries


class Home(Protocol):
    """What an adapter needs of the model's bookkeeping: who the backbone is, and the way off it."""

    def detach(self, name: str) -> None:
        """Take an adapter off."""

    def fingerprint(self) -> str:
        """The identity of the backbone as it was before any adapter."""

    def originals(self) -> dict[int, nn.Parameter]:
        """The backbone's own parameters, by the id of that which an adapter has for it."""


class Group(NamedTuple):
    """Parameters by their names in adapter files that train at `rate` times the learning rate of
    their method; None is the task head."""

    method: Method | None
    rate: float
    named: list[tuple[str, nn.Parameter]]


@dataclass
class AdapterMetadata:
    """What travels with an adapter beyond its tensors."""

    task: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    card: str = ""
    listing: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Adapter:
    """A named adapter on a model. Made by `attach` and `load`."""

    name: str
    methods: tuple[Method, ...]
    model: PreTrainedModel = field(repr=False)
    anatomy: Anatomy = field(repr=False)
    placed: list[PlacedModule] = field(repr=False)
    changed: list[OwnedParameter] = field(repr=False)
    head: AdapterHead | None = field(repr=False)
    home: Home = field(repr=False)
    vocabulary: NewTokenRows | None = field(default=None, repr=False)
    notes: AdapterMetadata = field(default_factory=AdapterMetadata, repr=False)
    active: bool = field(default=False, init=False)
    undo: Callable[[], None] | None = field(default=None, init=False, repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits; () without a
        classification head."""
        if self.head is None or self.head.labels["problem_type"] == "regression":
            return ()
        names: Mapping[int, str] = self.head.labels["id2label"]
        return tuple(names[i] for i in sorted(names))

    def tensors(self) -> dict[str, Tensor]:
        """All that the adapter owns, live, by the names of adapter files: site, method,
        parameter."""
        return {name: tensor for _, _, name, tensor in self.owned()}

    def saved_tensors(self) -> dict[str, Tensor]:
        """What adapter files hold: as `tensors`, with what serves training alone folded away."""
        return {name: tensor for _, _, name, tensor in self.owned(fold=True)}

    def owned(self, fold: bool = False) -> Iterator[tuple[Method | None, float, str, Tensor]]:
        """Each tensor, live: the method that owns it, the factor on that one's learning rate, its
        name and itself. `fold` leaves out what serves training alone."""
        for placed in self.placed:
            method, module = placed.inference_form() if fold else (placed.method, placed.module)
            for name, tensor in module.state_dict(keep_vars=True).items():
                full = f"{placed.site.id}.{method.name}.{name}"
                yield method, method.rate(full), full, tensor
        for changed in self.changed:
            factor = changed.method.rate(changed.name) if changed.method else 1.0
            yield changed.method, changed.rate * factor, changed.name, changed.own
        for child, module in (self.head.own if self.head else {}).items():
            for name, tensor in module.state_dict(keep_vars=True).items():
                yield None, 1.0, f"{HEAD}.{child}.{name}", tensor
        for name, rows in (self.vocabulary.tensors() if self.vocabulary else {}).items():
            yield None, 1.0, name, rows

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters: objects, not names."""
        return [t for t in self.tensors().values() if isinstance(t, nn.Parameter)]

    def groups(self) -> list[Group]:
        """The trainable parameters by the method that owns them and their learning rate."""
        groups: dict[tuple[int, float], Group] = {}
        for method, rate, name, tensor in self.owned():
            if isinstance(tensor, nn.Parameter):
                group = groups.setdefault((id(method), rate), Group(method, rate, []))
                group.named.append((name, tensor))
        return list(groups.values())

    def count(self) -> int:
        """The number of trainable parameters without the task head."""
        return sum(p.numel() for group in self.groups() if group.method for _, p in group.named)

    def switch(self, on: bool) -> None:
        """Make the adapter take part in the forward pass, or not. Trainability is untouched.

        Raises:
            AttachError: FSDP2 holds its backbone parameters, and would put them back.
        """
        if on == self.active:
            return
        if stuck := [changed.name for changed in self.changed if is_sharded(changed.own)]:
            raise AttachError(
                f"the backbone parameters of {self.name!r} are sharded, and cannot be taken out",
                offenders=stuck[:5],
                hint="save the adapter, and load it on a backbone that is not sharded",
            )
        self.take_part(on)
        for changed in self.changed:
            changed.swap(on)
        if self.vocabulary:
            self.vocabulary.switch(on)
        if self.head:
            self.head.swap(self.model, on)

    def take_part(self, on: bool) -> None:
        """Switch the site modules alone: head and parameters of the backbone stay the model's."""
        for placed in self.placed:
            slot_at(self.model, placed.site).switch(placed.key, on)
        self.active = on

    def inject(self) -> None:
        """Put the site modules into their hosts' slots, inactive."""
        for placed in self.placed:
            make_slot(self.anatomy, placed).add(placed.key, placed.site, placed.module)
        if self.vocabulary:
            self.vocabulary.inject()

    def eject(self) -> None:
        """Take the site modules away, and the slots that are empty then."""
        self.switch(on=False)
        for placed in self.placed:
            slot = slot_at(self.model, placed.site)
            slot.remove(placed.key)
            if not slot.sites:
                drop_slot(self.model, placed.site.host)
                if placed.site.kind == "embed":
                    forget_prompt(self.model)
        if self.vocabulary:
            self.vocabulary.eject()
        if self.undo:
            self.undo()

    def set_template(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        """Give a tokenizer the chat template that the adapter was trained with, until the adapter
        is taken off."""
        old, tokenizer.chat_template = tokenizer.chat_template, template
        self.undo = partial(setattr, tokenizer, "chat_template", old)

    def detach(self) -> None:
        """Take the adapter off: bytes, keys, modules and `requires_grad` are as they were
        before."""
        self.home.detach(self.name)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Manifest:
        """Write the adapter's folder: tensors, manifest and card. The files are read back and
        compared.

        Under FSDP2 every process must call this: the tensors are gathered, and the first process
        writes them; the manifest that others return does not list the files.

        Raises:
            OutputError: the folder exists (unless `overwrite`), or cannot be written; nothing is
                left behind.
        """
        sharded = any(map(is_sharded, self.model.parameters()))
        manifest = self.manifest()
        tensors = {name: whole(tensor) for name, tensor in self.saved_tensors().items()}
        try:
            if sharded and dist.get_rank() > 0:
                return manifest
            return write_adapter(
                Path(folder), manifest, tensors, card=self.notes.card, overwrite=overwrite
            )
        finally:
            if sharded:
                dist.barrier()

    def export(self, folder: str | Path, *, format: str = "peft", overwrite: bool = False) -> None:
        """Write the adapter in the format of another library; `peft` is the one that is known.

        Raises:
            MismatchError: that library cannot express the adapter; every reason is listed.
            OutputError: the folder exists (unless `overwrite`), or cannot be written.
        """
        check_format(format)
        card = export_card(self.name, [method.name for method in self.methods], self.labels)
        write_peft(Path(folder), to_peft(self.source()), card=card, overwrite=overwrite)

    def source(self) -> ExportSource:
        """What an export reads of the adapter."""
        paths = {id(m): n for n, m in modules_of(self.model).items()}
        name, revision = name_and_revision(self.model)
        return ExportSource(
            self.anatomy,
            [
                ExportedModule(method, p.site, module)
                for p in self.placed
                for method, module in [p.inference_form()]
            ],
            [
                (tuple(f"{paths[id(m)]}.{attribute}" for m, attribute in c.holders), c.own)
                for c in self.changed
            ],
            self.head.own if self.head else {},
            backbone=None if name.startswith("unnamed-") else name,
            revision=revision,
            tokens=self.vocabulary is not None,
        )

    def manifest(self) -> Manifest:
        """What the adapter's files say of it; `write_adapter` adds what it knows of the files."""
        config = self.model.config
        name, revision = name_and_revision(self.model)
        dtype, quantization = dtype_and_quantization(self.model, self.home.originals())
        kind, known = task_kind(self.model), tokenizer_snapshot(self.model)
        return Manifest(
            name=self.name,
            methods=dump_methods([method.inference_form() for method in self.methods]),
            backbone=BackboneRef(
                id=name,
                revision=revision,
                fingerprint=self.home.fingerprint(),
                model_type=config.model_type,
                dtype=dtype,
                quantization=quantization,
            ),
            tokenizer=known.identity() if known else self.notes.tokenizer,
            tokens=self.vocabulary.tokens if self.vocabulary else (),
            chat_template=self.notes.chat_template or (known.chat_template() if known else None),
            task=self.notes.task or (kind if self.head else None),
            labels=self.labels,
            head=TaskHead(kind, self.head.labels["problem_type"]) if self.head else None,
            training=self.notes.training,
            metrics=self.notes.metrics,
            versions={"adapterhub": __version__}
            | {name: version(name) for name in ("torch", "transformers")},
            **self.notes.listing,
        )

    def train_mode(self, dropout: bool = False) -> None:
        """Set the model to train, with what is frozen in evaluation mode unless `dropout` is asked
        for.

        A frozen backbone computes the same with and without training. Call it in place of
        `model.train()`.
        """
        self.model.train()
        if not dropout:
            trained = {id(p) for p in self.parameters() if p.requires_grad}
            heads = set(self.head.own) if self.head else set()
            for name, child in self.model.named_children():
                if name not in heads:
                    _still(child, trained, True)


def _still(module: nn.Module, trained: set[int], parent: bool) -> None:
    if isinstance(module, Slot):
        return
    own = [p for n, p in module.named_parameters() if f"{CHILD}." not in n]
    mode = any(id(p) in trained for p in own) if own else parent
    module.training = mode
    for child in module.children():
        _still(child, trained, mode)
