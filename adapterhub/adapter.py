"""The adapter handle: one trained, named instance of methods on one backbone, and its task head."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub._version import __version__
from adapterhub.attention import KeyValueSlot, keyvalue_slot
from adapterhub.backbones.anatomy import CHILD, Anatomy, Site
from adapterhub.backbones.load import kind_of, name_of, storage_of
from adapterhub.backbones.tokenizer import bound
from adapterhub.backbones.weights import is_sharded, whole
from adapterhub.errors import AttachError
from adapterhub.files.card import export_card
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead
from adapterhub.files.native import write_adapter
from adapterhub.files.peft import write_peft
from adapterhub.interchange.peft_out import Part, Source, check_format, to_peft
from adapterhub.interchange.targets import modules_of
from adapterhub.methods.base import Method
from adapterhub.methods.spec import dump
from adapterhub.mixing import mix_slot
from adapterhub.precision import hold, raise_input, release
from adapterhub.prompting import forget_prompt, prompt_slot
from adapterhub.slots import Slot, drop_slot, output_slot
from adapterhub.vocabulary import Vocabulary

HEAD = "head"
LABEL_FIELDS = ("id2label", "label2id", "problem_type")
LISTING = ("description", "license", "language", "tags")  # the manifest's fields for registries


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

    `name` is its name in adapter files, `stage` and `rate` are those of the method's plan. `kept`
    is the adapter's copy while it is not in the backbone.
    """

    method: Method | None
    name: str
    kept: nn.Parameter
    original: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    stage: int = 0
    rate: float = 1.0
    active: bool = field(default=False, init=False)

    @property
    def own(self) -> nn.Parameter:
        """The adapter's parameter. In the backbone it is what stands there, since FSDP2 puts a
        sharded one in its place."""
        module, attribute = self.holders[0]
        live = module._parameters[attribute] if self.active else self.kept
        assert live is not None
        return live

    def swap(self, on: bool) -> None:
        """Put the adapter's parameter into the backbone, or the backbone's own back."""
        self.kept, self.active = self.own, on
        lowered = self.kept.dtype != self.original.dtype
        for module, attribute in self.holders:
            module._parameters[attribute] = self.kept if on else self.original
            if on and lowered:
                hold(module, attribute, self.original.dtype)
            else:
                release(module, attribute)


@dataclass
class Head:
    """The task head of an adapter, in fp32, the model's own that it stands in for, and the
    labels."""

    own: dict[str, nn.Module]
    original: dict[str, nn.Module]
    labels: dict[str, Any]
    original_labels: dict[str, Any]
    handles: list[RemovableHandle] = field(default_factory=list)

    def swap(self, model: PreTrainedModel, on: bool) -> None:
        """Put the adapter's head and labels into the model, or the model's own back."""
        for name, module in (self.own if on else self.original).items():
            model._modules[name] = module
        for handle in self.handles:
            handle.remove()
        short = [
            own for name, own in self.own.items() if _dtype(own) != _dtype(self.original[name])
        ]
        self.handles = [
            own.register_forward_pre_hook(raise_input, with_kwargs=True) for own in short if on
        ]
        set_labels(model, self.labels if on else self.original_labels)

    def lowered(self) -> Head:
        """The same head in the dtype of the model's own, to stay on the model."""
        own = {name: copy.deepcopy(module) for name, module in self.own.items()}
        for name, module in own.items():
            module._forward_pre_hooks.clear()
            module.to(_dtype(self.original[name]))
        return replace(self, own=own, handles=[])


def set_labels(model: PreTrainedModel, labels: Mapping[str, Any]) -> None:
    """Give a model the labels of a head: the fields of its config."""
    for name, value in labels.items():
        setattr(model.config, name, value)
    if hasattr(model, "num_labels"):
        setattr(model, "num_labels", model.config.num_labels)  # noqa: B010


def _dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters())


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
class Notes:
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
    placed: list[Placed] = field(repr=False)
    changed: list[Changed] = field(repr=False)
    head: Head | None = field(repr=False)
    home: Home = field(repr=False)
    vocabulary: Vocabulary | None = field(default=None, repr=False)
    notes: Notes = field(default_factory=Notes, repr=False)
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
        return {name: tensor for _, _, name, tensor in self._owned()}

    def saved_tensors(self) -> dict[str, Tensor]:
        """What adapter files hold: as `tensors`, with what serves training alone folded away."""
        return {name: tensor for _, _, name, tensor in self._owned(fold=True)}

    def _owned(self, fold: bool = False) -> Iterator[tuple[Method | None, float, str, Tensor]]:
        """Each tensor with the method that owns it, and the factor on that one's learning rate."""
        for placed in self.placed:
            method, module = _folded(placed) if fold else (placed.method, placed.module)
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
        for method, rate, name, tensor in self._owned():
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

    def seat(self) -> None:
        """Put the site modules into their hosts' slots, inactive."""
        for placed in self.placed:
            make_slot(self.anatomy, placed).add(placed.key, placed.site, placed.module)
        if self.vocabulary:
            self.vocabulary.seat()

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
        if self.vocabulary:
            self.vocabulary.unseat()
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

    def source(self) -> Source:
        """What an export reads of the adapter."""
        paths = {id(m): n for n, m in modules_of(self.model).items()}
        name, revision = name_of(self.model)
        return Source(
            self.anatomy,
            [Part(method, p.site, module) for p in self.placed for method, module in [_folded(p)]],
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
        name, revision = name_of(self.model)
        dtype, quantization = storage_of(self.model, self.home.originals())
        kind, known = kind_of(self.model), bound(self.model)
        return Manifest(
            name=self.name,
            methods=dump([method.folded() for method in self.methods]),
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


def _folded(placed: Placed) -> tuple[Method, nn.Module]:
    fold = getattr(placed.module, "folded", None)
    return placed.method.folded(), fold() if fold else placed.module


def slot_at(model: PreTrainedModel, site: Site) -> Slot:
    """The slot at a site's host."""
    slot = model.get_submodule(site.host)._modules[CHILD]
    assert isinstance(slot, Slot)
    return slot


def make_slot(anatomy: Anatomy, placed: Placed) -> Slot:
    """The slot at a site's host, of the kind that the site needs, made if there is none."""
    site = placed.site
    if site.kind == "keyvalue":
        return keyvalue_slot(anatomy.model, site, placed.module)
    if site.kind == "embed":
        return prompt_slot(anatomy, site)
    if site.kind == "mix":
        return mix_slot(anatomy, site)
    return output_slot(anatomy.model, site, placed.module, anatomy.family.batch_dim)


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
    names = [name for _, _, name, _ in adapter._owned()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AttachError(
            "two methods of one kind sit at the same sites",
            offenders=twice[:5],
            hint="give them different sites or layers, or attach them as two adapters",
        )
