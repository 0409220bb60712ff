"""The adapter handle: one trained, named instance of methods on one backbone, and its task head."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub._version import __version__
from adapterhub.attention import KeyValueSlot, keyvalue_slot
from adapterhub.backbones.anatomy import CHILD, Anatomy, Site
from adapterhub.backbones.load import kind_of
from adapterhub.errors import AttachError
from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.files.native import write_adapter
from adapterhub.methods.base import Method
from adapterhub.methods.spec import dump
from adapterhub.prompting import forget_prompt, prompt_slot
from adapterhub.slots import Slot, drop_slot, output_slot

HEAD = "head"
LABEL_FIELDS = ("id2label", "label2id", "problem_type")


@dataclass
class Placed:
    """A site module on its host: it sits in the host's slot under `key`."""

    method: Method
    site: Site
    module: nn.Module
    key: str


@dataclass
class Changed:
    """A backbone parameter that the adapter owns a copy of, and every module that holds it (ties).

    `name` is its name in adapter files.
    """

    method: Method | None
    name: str
    own: nn.Parameter
    original: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]

    def swap(self, on: bool) -> None:
        """Put the adapter's parameter into the backbone, or the backbone's own back."""
        for module, attribute in self.holders:
            module._parameters[attribute] = self.own if on else self.original


@dataclass
class Head:
    """The task head of an adapter, the model's own that it stands in for, and the labels."""

    own: dict[str, nn.Module]
    original: dict[str, nn.Module]
    labels: dict[str, Any]
    original_labels: dict[str, Any]

    def swap(self, model: PreTrainedModel, on: bool) -> None:
        """Put the adapter's head and labels into the model, or the model's own back."""
        for name, module in (self.own if on else self.original).items():
            model._modules[name] = module
        for name, value in (self.labels if on else self.original_labels).items():
            setattr(model.config, name, value)
        if hasattr(model, "num_labels"):
            setattr(model, "num_labels", model.config.num_labels)  # noqa: B010


class Home(Protocol):
    """What an adapter needs of the model's bookkeeping: who the backbone is, and the way off it."""

    def detach(self, name: str) -> None:
        """Take an adapter off."""

    def fingerprint(self) -> str:
        """The identity of the backbone as it was before any adapter."""


@dataclass
class Notes:
    """What travels with an adapter beyond its tensors."""

    task: str | None = None
    tokenizer: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    card: str = ""


@dataclass(eq=False)
class Adapter:
    """A named adapter on a model. Made by `attach` and `load`."""

    name: str
    methods: tuple[Method, ...]
    model: PreTrainedModel = field(repr=False)
    anatomy: Anatomy = field(repr=False)
    placed: list[Placed] = field(repr=False)
    changed: list[Changed] = field(repr=False)
    head: Head | None = field(repr=False)
    home: Home = field(repr=False)
    notes: Notes = field(default_factory=Notes, repr=False)
    active: bool = field(default=False, init=False)

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
        return dict(self._named_tensors())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for placed in self.placed:
            for name, tensor in placed.module.state_dict(keep_vars=True).items():
                yield f"{placed.site.id}.{placed.method.name}.{name}", tensor
        for changed in self.changed:
            yield changed.name, changed.own
        for child, module in (self.head.own if self.head else {}).items():
            for name, tensor in module.state_dict(keep_vars=True).items():
                yield f"{HEAD}.{child}.{name}", tensor

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters: objects, not names."""
        return [t for t in self.tensors().values() if isinstance(t, nn.Parameter)]

    def groups(self) -> list[tuple[Method | None, list[tuple[str, nn.Parameter]]]]:
        """The trainable parameters by the method that owns them; None is the task head."""
        owners = {f"{p.site.id}.{p.method.name}": p.method for p in self.placed}
        owner_of = {c.name: c.method for c in self.changed}
        groups: dict[int, tuple[Method | None, list[tuple[str, nn.Parameter]]]] = {}
        for name, tensor in self.tensors().items():
            placed = next(
                (m for prefix, m in owners.items() if name.startswith(prefix + ".")), None
            )
            method = owner_of.get(name, placed)
            if isinstance(tensor, nn.Parameter):
                groups.setdefault(id(method), (method, []))[1].append((name, tensor))
        return list(groups.values())

    def count(self) -> int:
        """The number of trainable parameters without the task head."""
        return sum(p.numel() for m, named in self.groups() if m is not None for _, p in named)

    def switch(self, on: bool) -> None:
        """Make the adapter take part in the forward pass, or not. Trainability is untouched."""
        if on == self.active:
            return
        for placed in self.placed:
            slot_at(self.model, placed.site).switch(placed.key, on)
        for changed in self.changed:
            changed.swap(on)
        if self.head:
            self.head.swap(self.model, on)
        self.active = on

    def seat(self) -> None:
        """Put the site modules into their hosts' slots, inactive."""
        for placed in self.placed:
            make_slot(self.anatomy, placed.site).add(placed.key, placed.site, placed.module)

    def unseat(self) -> None:
        """Take the site modules away, and the slots that are empty then."""
        self.switch(on=False)
        for placed in self.placed:
            slot = slot_at(self.model, placed.site)
            slot.remove(placed.key)
            if not slot.sites:
                drop_slot(self.model, placed.site.host)
                if placed.site.kind == "embed":
                    forget_prompt(self.model)

    def detach(self) -> None:
        """Take the adapter off: bytes, keys, modules and `requires_grad` are as they were
        before."""
        self.home.detach(self.name)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Manifest:
        """Write the adapter's folder: tensors, manifest and card. The files are read back and
        compared.

        Raises:
            OutputError: the folder exists (unless `overwrite`), or cannot be written; nothing is
                left behind.
        """
        return write_adapter(
            Path(folder), self.manifest(), self.tensors(), card=self.notes.card, overwrite=overwrite
        )

    def manifest(self) -> Manifest:
        """What the adapter's files say of it; `write_adapter` adds what it knows of the files."""
        config = self.model.config
        return Manifest(
            name=self.name,
            methods=dump(self.methods),
            backbone=BackboneRef(
                id=_logical_name(self.model),
                revision=getattr(config, "_commit_hash", None),
                fingerprint=self.home.fingerprint(),
                model_type=config.model_type,
            ),
            tokenizer=self.notes.tokenizer,
            task=self.notes.task or (kind_of(self.model) if self.head else None),
            labels=self.labels,
            head=self.head is not None,
            training=self.notes.training,
            metrics=self.notes.metrics,
            versions={"adapterhub": __version__}
            | {name: version(name) for name in ("torch", "transformers")},
        )

    def train_mode(self, dropout: bool = False) -> None:
        """Set the model to train, with what is frozen in evaluation mode unless `dropout` is asked
        for.

        A frozen backbone computes the same with and without training. Call it in place of
        `model.train()`.
        """
        self.model.train()
        if not dropout:
            trained = {id(p) for p in self.parameters()}
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


def _logical_name(model: PreTrainedModel) -> str:
    """A Hub id as it is; a folder by its last part, for a path means nothing elsewhere."""
    name = model.config._name_or_path or f"unnamed-{model.config.model_type}"
    return Path(name).name if Path(name).is_dir() or Path(name).is_absolute() else name


def slot_at(model: PreTrainedModel, site: Site) -> Slot:
    """The slot at a site's host."""
    slot = model.get_submodule(site.host)._modules[CHILD]
    assert isinstance(slot, Slot)
    return slot


def make_slot(anatomy: Anatomy, site: Site) -> Slot:
    """The slot at a site's host, of the kind that the site needs, made if there is none."""
    if site.kind == "keyvalue":
        return keyvalue_slot(anatomy.model, site)
    if site.kind == "embed":
        return prompt_slot(anatomy, site)
    return output_slot(anatomy.model, site)


def has_prefix(model: PreTrainedModel) -> bool:
    """Whether any prefix sits on a model."""
    return any(isinstance(m, KeyValueSlot) for m in model.modules())


def slug(name: str) -> str:
    """An adapter's name as a part of module names, which take no dots."""
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def duplicate_tensors(adapter: Adapter) -> None:
    """Refuse an adapter that would own two tensors of one name.

    Raises:
        AttachError: two methods of one kind at one site.
    """
    names = [name for name, _ in adapter._named_tensors()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AttachError(
            "two methods of one kind sit at the same sites",
            offenders=twice[:5],
            hint="give them different sites or layers, or attach them as two adapters",
        )
