"""The adapter handle: a named instance of methods on one backbone, and its task head.

An adapter consists of modules at sites, copies of backbone parameters, and a task head. Each
replaces or extends a part of the model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from adapterhub._version import __version__
from adapterhub.anatomy.backbone import (
    CHILD,
    Backbone,
    EndTokens,
    has_statistics,
    is_sharded,
    own_modules,
    whole,
    with_whole_parameters,
)
from adapterhub.anatomy.family_file import family_data
from adapterhub.anatomy.projections import is_projection
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.end_tokens import template_stops, text_stops, with_stops
from adapterhub.backbones.find import remember_backbone
from adapterhub.backbones.fingerprint import BackboneIdentity
from adapterhub.backbones.processor import TokenizerSnapshot, processor_identity
from adapterhub.backbones.task_models import task_kind
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.errors import AttachError, ConfigError, OutputError, one_line
from adapterhub.files.atomic import write_files
from adapterhub.files.card import export_card
from adapterhub.files.manifest import (
    FAMILY,
    HEAD_MODULES,
    BackboneRef,
    HeadRecord,
    Manifest,
    TaskHead,
    first_id,
)
from adapterhub.files.native import (
    Foundation,
    adapter_files,
    check_writable,
    write_adapter,
    write_copies,
)
from adapterhub.files.schema import shorten
from adapterhub.hooks.attention import check_attention, keyvalue_slot
from adapterhub.hooks.composition import Composition, ModelScope, adapter_names
from adapterhub.hooks.head import HeadPooling, activation_between
from adapterhub.hooks.keyvalue import follow_padding
from adapterhub.hooks.layer_output import input_slot, keep_training, layer_slot, mix_slot
from adapterhub.hooks.new_tokens import NewTokenRows, add_new_tokens, row_slot
from adapterhub.hooks.own_weight import held_weight_slot
from adapterhub.hooks.precision import (
    fp32_parameter,
    hold_in_fp32,
    raise_input,
    release_from_fp32,
)
from adapterhub.hooks.prompt import prompt_slot
from adapterhub.hooks.slot import Slot, drop_slot, output_slot
from adapterhub.hooks.weight_host import matrix_slot
from adapterhub.interchange.diffusers_lora import STYLES, write_diffusers
from adapterhub.interchange.peft.export_types import ExportedModule, ExportSource
from adapterhub.interchange.peft.exporter import to_peft
from adapterhub.interchange.peft.files import peft_bytes, write_peft
from adapterhub.interchange.peft.targets import modules_of
from adapterhub.methods.common.base import Method, dump_methods, method_text, parse_methods
from adapterhub.methods.common.site_module import EmbeddingModule, SiteModule
from adapterhub.patch import Patch

HEAD = "head"
HEADS = "heads"  # the first part of the names of tensors of several heads
_version_of = cache(version)  # the metadata of torch take ten milliseconds to parse


def _forget_computed(module: nn.Module) -> None:
    """Clear caches derived from a module's parameters, such as LeViT's `attention_bias_cache`."""
    for name, kept in vars(module).items():
        if name.endswith("_cache") and type(kept) is dict:
            kept.clear()


@dataclass
class PlacedModule:
    """A module at a site; `key` is its name in the slot of the site's host."""

    method: Method
    site: Site
    module: SiteModule
    key: str

    @property
    def skips_positions(self) -> bool:
        """Whether the module leaves positions free in front of the caller's tokens."""
        return isinstance(self.module, EmbeddingModule) and self.module.skipped_positions > 0

    def inference_form(self) -> tuple[Method, SiteModule]:
        """Return the method and the module to save, without the parts that only training needs."""
        return self.method.inference_form(), with_whole_parameters(self.module).inference_form()


@dataclass
class OwnedParameter:
    """An adapter's own copy of a backbone parameter, and the modules that hold it (ties).

    `name` is its name in adapter files. `stage` and `rate` come from the method's plan. `kept` is
    the copy while it is not in the backbone. `untied` copies leave the original in other modules.
    """

    method: Method | None
    name: str
    kept: nn.Parameter
    original: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    stage: int = 0
    rate: float = 1.0
    untied: bool = False
    active: bool = field(default=False, init=False)

    @property
    def own(self) -> nn.Parameter:
        """The adapter's parameter.

        An active parameter is read from the backbone, where FSDP2 replaces it with a sharded one.
        """
        module, attribute = self.holders[0]
        parameter = fp32_parameter(module, attribute) if self.active else None
        # An interrupted swap may have left the original there.
        return self.kept if parameter is None or parameter is self.original else parameter

    def swap(self, on: bool) -> None:
        """Put the adapter's parameter into the backbone, or the original back."""
        self.kept, self.active = self.own, on
        lower_precision = self.kept.dtype != self.original.dtype
        for module, attribute in self.holders:
            module._parameters[attribute] = self.kept if on else self.original
            if on and lower_precision:
                hold_in_fp32(module, attribute, self.original.dtype)
            else:
                release_from_fp32(module, attribute)
            _forget_computed(module)

    def fill(self) -> None:
        """Fill a copy on the meta device with the values of the original."""
        own = self.own
        if own.is_meta:
            values = self.original.detach().to(own.dtype, copy=True)
            filled = nn.Parameter(values, own.requires_grad)
            torch.utils.swap_tensors(own, filled)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Keep the sharded parameter of FSDP2 instead of the copy, and drop the original.

        The original cannot be restored.
        """
        self.original = nn.Parameter(self.original.to("meta"), requires_grad=False)
        self.swap(on=True)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the copy or the original, whichever is not in the backbone now."""
        out = self.original if self.active else self.kept
        with torch.no_grad():
            out.data = fn(out.data)
            if out.grad is not None:
                out.grad.data = fn(out.grad.data)


@dataclass(frozen=True)
class NamedHead:
    """The task of one of several heads: its name, the kind of model, and the class names."""

    task: str
    kind: str
    labels: tuple[str, ...] = ()


@dataclass
class AdapterHead:
    """The task head of an adapter, in fp32, with its labels, and the model's own head."""

    own: dict[str, nn.Module]
    original: dict[str, nn.Module]
    labels: dict[str, Any]
    original_labels: dict[str, Any]
    patch: Patch = field(default_factory=Patch, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, module in self.own.items():
            if _dtype(module) != _dtype(self.original[name]):
                module.register_forward_pre_hook(raise_input, with_kwargs=True)

    def put_into(self, backbone: Backbone) -> None:
        """Put the adapter's head and labels into the model."""
        for name, module in self.own.items():
            owner, _, leaf = name.rpartition(".")
            self.patch.put(backbone.module.get_submodule(owner)._modules, leaf, module)
        set_labels(backbone, self.labels, self.patch)

    def absent(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules, own and original, that are not in the model now."""
        there = set(map(id, model.modules()))
        return [m for m in (*self.own.values(), *self.original.values()) if id(m) not in there]

    def lowered(self) -> AdapterHead:
        """Return a copy in the dtype of the model's own head, to become a part of the model."""
        own = {name: copy.deepcopy(module) for name, module in self.own.items()}
        for name, module in own.items():
            module._forward_pre_hooks.clear()
            module.to(_dtype(self.original[name]))
        return replace(self, own=own)


def set_labels(backbone: Backbone, labels: Mapping[str, Any], patch: Patch) -> None:
    """Set the label fields of a transformers model's configuration; do nothing without one."""
    if (config := backbone.config) is None:
        return
    for name, value in labels.items():
        patch.set(config, name, value)
    if hasattr(backbone.module, "num_labels"):
        patch.set(backbone.module, "num_labels", config.num_labels)


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def slot_at(model: nn.Module, site: Site) -> Slot:
    """Return the slot of a site's host."""
    slot = model.get_submodule(site.host)._modules[CHILD]
    assert isinstance(slot, Slot)
    return slot


def make_slot(anatomy: Anatomy, placed: PlacedModule) -> Slot:
    """Return the slot of a site's host; create a missing one, of the class that the site needs."""
    site = placed.site
    if site.kind == "keyvalue":
        slot = keyvalue_slot(anatomy.model, site, placed.module, anatomy.family.batch_dim)
        follow_padding(anatomy, site, slot)
        return slot
    if site.kind == "embed":
        return prompt_slot(anatomy, site)
    if site.kind == "mix":
        return mix_slot(anatomy, site)
    if site.kind == "layer":
        return layer_slot(anatomy, site.host)
    if site.role == "input" and site.host in anatomy.layers[site.stack]:
        return input_slot(anatomy, site.host)
    host = anatomy.model.get_submodule(site.host)
    if host is anatomy.backbone.output_embedding and is_projection(host):
        row_slot(host)  # new tokens have rows there too
    if site.matrix is not None:
        return matrix_slot(anatomy.model, site, placed.module)
    if site.kind == "weight":
        return held_weight_slot(anatomy.model, site)
    parallel = tensor_parallel(anatomy.model) if anatomy.backbone.divided else None
    return output_slot(anatomy.model, site, placed.module, anatomy.family.batch_dim, parallel)


def parameter_holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Map the id of each parameter to the modules that hold it, and to its name in each."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for _, module in own_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    return holders


STOPS = "stops"  # in the training record
_MOST_STOPS = 16
EXPORTED = ("peft", "gguf", *STYLES)
PUBLICATION_FIELDS = ("description", "license", "language", "tags")  # of the manifest


class BackboneState(Protocol):
    """The parts of a model's state that an adapter uses."""

    @property
    def scope(self) -> ModelScope:
        """The identifier of the model in the context of a call."""

    @property
    def compositions(self) -> tuple[Composition, ...]:
        """The compositions that apply: one for each row of a batch, or one for all rows."""

    def detach(self, *names: str) -> None:
        """Detach adapters."""

    def fingerprint(self) -> str:
        """Compute the fingerprint of the backbone's weights before any adapter."""

    def identity(self) -> BackboneIdentity:
        """Compute the identity of the backbone before any adapter."""

    def keep_identity(self) -> None:
        """Compute the identity of the backbone now, and keep it while adapters are attached."""

    @property
    def own_ends(self) -> EndTokens:
        """The tokens at which the bare model stops generating."""

    def new_stops(self, stops: Iterable[int]) -> list[int]:
        """Return those `stops` at which the bare model does not stop generating."""

    def originals(self) -> dict[int, nn.Parameter]:
        """Map the ids of adapter parameters to the backbone parameters that they replace."""


class ParameterGroup(NamedTuple):
    """Named parameters that train at `rate` times the learning rate of their method.

    Attributes:
        method: the method of the parameters; None for the task head and for new tokens.
        rate: the factor on the method's learning rate.
        named: the parameters with their names.
    """

    method: Method | None
    rate: float
    named: list[tuple[str, nn.Parameter]]


@dataclass
class AdapterMetadata:
    """Metadata saved with an adapter; `name` is set if the files have another name."""

    task: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    card: str = ""
    publication: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    processor: str | None = None


class HeldModules(NamedTuple):
    """The result of `Adapter.hold`.

    Attributes:
        bytes: the memory that the modules take in addition to their own tensors.
        kinds: roles of sites, with the number of the bank there. Rows of adapters with common
            entries are computed together.
    """

    bytes: int
    kinds: frozenset[tuple[str, int | None]]


@dataclass(eq=False, repr=False)
class Adapter:
    """A named adapter of a model, made by `attach` or `load`.

    While the adapter is attached, `tokenizer` has its new tokens. While it applies, `tokenizer`
    also has its chat template, `template`. `occupied` lists the slots of its modules, with their
    keys there. With several `heads`, `head` is the one that applies. `on` lists the adapters below,
    which are active with it. `foundation` holds the files that a frozen adapter was loaded from. A
    `brought` adapter was loaded because others are on it, and is detached with the last of them.
    """

    name: str
    methods: tuple[Method, ...]
    model: nn.Module
    anatomy: Anatomy
    placed: list[PlacedModule]
    changed: list[OwnedParameter]
    head: AdapterHead | None
    state: BackboneState
    new_tokens: NewTokenRows | None = None
    pooling: HeadPooling | None = None
    tokenizer: TokenizerSnapshot | None = None
    template: str | None = None
    occupied: list[tuple[Slot, str]] = field(default_factory=list, init=False)
    patch: Patch = field(default_factory=Patch, init=False)  # of the replaced parts
    metadata: AdapterMetadata = field(default_factory=AdapterMetadata)
    on: tuple[Adapter, ...] = ()
    foundation: Foundation | None = None
    brought: bool = False
    heads: dict[str, AdapterHead] = field(default_factory=dict, init=False)
    named_heads: dict[str, NamedHead] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        methods = " + ".join(map(method_text, self.methods))
        state = ", active" if self.active else ""
        on = f", on {', '.join(repr(each.name) for each in self.on)}" if self.on else ""
        few = f"labels {', '.join(self.labels)}"
        head = f", {few if len(self.labels) < 5 else f'{len(self.labels)} labels'}"
        return one_line(
            f"<Adapter {self.name!r}: {methods} on {self.backbone.name}, "
            f"{self.count():,} parameters{head if self.labels else ''}{on}{state}>"
        )

    @property
    def backbone(self) -> Backbone:
        """The model and its properties."""
        return self.anatomy.backbone

    @property
    def active(self) -> bool:
        """Whether the adapter applies: in the open route, or else in the active composition."""
        return any(self.name in adapter_names(c) for c in self.state.compositions)

    @property
    def replaces(self) -> bool:
        """Whether the adapter replaces parts of the model that all calls share."""
        return bool(self.changed or self.head or self.new_tokens)

    @property
    def problem_type(self) -> str | None:
        """The problem type of transformers that selects the head's loss; None without a head."""
        recorded: str | None = self.head.labels["problem_type"] if self.head else None
        return recorded

    @property
    def stops(self) -> tuple[int, ...]:
        """The end tokens of training texts; generation stops at them while the adapter applies."""
        recorded = self.metadata.training.get(STOPS)
        known = recorded if isinstance(recorded, list) and len(recorded) <= _MOST_STOPS else ()
        return tuple(i for i in known if type(i) is int and 0 <= i < 1 << 31)

    @property
    def written_stops(self) -> tuple[int, ...]:
        """The end tokens that files record: `stops`, or without a run the tokenizer's own."""
        snapshot = self.backbone.tokenizer
        if self.metadata.training or snapshot is None:
            return self.stops
        return self.stops_of(snapshot.tokenizer)

    def stops_of(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Return the end tokens of a tokenizer at which the bare model does not stop generating."""
        if not self.backbone.generates:
            return ()
        # Only models that continue a text use chat templates.
        chat = tokenizer.chat_template and not self.backbone.is_encoder_decoder
        ends = template_stops(tokenizer) if chat else text_stops(tokenizer)
        return tuple(self.state.new_stops(ends))

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names in the order of the logits; () without a classification head."""
        if self.head is None or self.head.labels["problem_type"] == "regression":
            return ()
        names: Mapping[int, str] = self.head.labels["id2label"] or {}
        return tuple(names[i] for i in sorted(names))

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors (not copies) by name: site, method, parameter."""
        return {name: tensor for _, _, name, tensor in self.owned()}

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, without those that only training needs."""
        return {name: tensor for _, _, name, tensor in self.owned(inference_form=True)}

    def owned(
        self, inference_form: bool = False
    ) -> Iterator[tuple[Method | None, float, str, Tensor]]:
        """Yield (method, factor on its learning rate, name, tensor).

        `inference_form` leaves out the tensors that only training needs.
        """
        for placed in self.placed:
            method, module = placed.method, placed.module
            if inference_form:
                method, module = placed.inference_form()
            for name, tensor in module.state_dict(keep_vars=True).items():
                full = f"{placed.site.id}.{method.name}.{name}"
                yield method, method.rate(full), full, tensor
        for changed in self.changed:
            factor = changed.method.rate(changed.name) if changed.method else 1.0
            yield changed.method, changed.rate * factor, changed.name, changed.own
        for prefix, head in self.all_heads():
            for child, layer in head.own.items():
                for name, tensor in layer.state_dict(keep_vars=True).items():
                    yield None, 1.0, f"{prefix}.{child}.{name}", tensor
        for name, rows in (self.new_tokens.tensors() if self.new_tokens else {}).items():
            yield None, 1.0, name, rows

    def all_heads(self) -> list[tuple[str, AdapterHead]]:
        """List the heads with the prefix of their tensor names."""
        if self.heads:
            return [(f"{HEADS}.{name}", head) for name, head in self.heads.items()]
        return [(HEAD, self.head)] if self.head else []

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters."""
        return [t for t in self.tensors().values() if isinstance(t, nn.Parameter)]

    def groups(self) -> list[ParameterGroup]:
        """Group the trainable parameters by method and learning rate."""
        groups: dict[tuple[int, float], ParameterGroup] = {}
        for method, rate, name, tensor in self.owned():
            if isinstance(tensor, nn.Parameter):
                group = groups.setdefault((id(method), rate), ParameterGroup(method, rate, []))
                group.named.append((name, tensor))
        return list(groups.values())

    def count(self) -> int:
        """Count the trainable parameters, without the task head."""
        return sum(p.numel() for group in self.groups() if group.method for _, p in group.named)

    def slots(self) -> Iterator[tuple[Slot, str]]:
        """Yield each slot that holds modules of the adapter, with their key in it."""
        yield from self.occupied
        if self.new_tokens:
            for slot in self.new_tokens.slots():
                yield slot, self.new_tokens.key
        if self.pooling:
            for pooling_slot in self.pooling.slots():
                yield pooling_slot, self.pooling.key

    def hold(self) -> HeldModules:
        """Declare that the modules and the backbone's weights no longer change.

        Routes then read them from stacks, which are otherwise made in each call, and compute
        modules of different methods together. Call it again after a change.
        """
        held = [
            slot.hold(key, self.model.get_submodule(slot.sites[key].host))
            for slot, key in self.occupied
        ]
        roles = [slot.sites[key].role for slot, key in self.occupied]
        banks = [each.bank for each in held]
        return HeldModules(
            sum(each.bytes for each in held), frozenset(zip(roles, banks, strict=True))
        )

    def check_replaceable(self) -> None:
        """Refuse parameters that cannot be exchanged with the model's.

        Raises:
            AttachError: FSDP2 has sharded the adapter's backbone parameters, and would restore
                them.
        """
        own = {c.name for c in self.changed if is_sharded(c.own) and not is_sharded(c.original)}
        if sharded := sorted(own):
            raise AttachError(
                f"the backbone parameters of {self.name!r} are sharded and cannot be swapped",
                offenders=sharded[:5],
                hint="save the adapter, and load it on a backbone that is not sharded",
            )

    def put_into(self) -> None:
        """Replace parts of the model with the adapter's own, until `patch.undo`."""
        for changed in self.changed:
            self.patch.push(partial(changed.swap, on=False))
            changed.swap(on=True)
        if self.new_tokens:
            self.patch.push(self.new_tokens.narrow)
            self.new_tokens.widen()
        if self.head:
            self.patch.push(self._take_head_out)
            self.head.put_into(self.backbone)

    def _take_head_out(self) -> None:
        if self.head:  # another head may have replaced it
            self.head.patch.undo()

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert or move the parts that are not in the model now, but may be later."""
        for changed in self.changed:
            changed.convert(fn)
        for module in self.absent_heads():
            module._apply(fn)  # type: ignore[no-untyped-call]
        if self.new_tokens:
            self.new_tokens.convert(fn)

    def absent_heads(self) -> Iterator[nn.Module]:
        """Yield the modules of task heads that are not in the model now."""
        for _, head in self.all_heads():
            yield from head.absent(self.model)

    def inject(self) -> None:
        """Add the site modules to the slots of their hosts, inactive."""
        self.occupied = []
        for placed in self.placed:
            slot = make_slot(self.anatomy, placed)
            slot.add(placed.key, placed.site, placed.module)
            self.occupied.append((slot, placed.key))
        if self.new_tokens:
            self.new_tokens.inject()
        if self.pooling:
            self.pooling.inject()
        for slot, _ in self.slots():
            slot.scope = self.state.scope

    def eject(self) -> None:
        """Remove the site modules and empty slots. The adapter must be inactive."""
        for placed in self.placed:
            slot = slot_at(self.model, placed.site)
            slot.remove(placed.key)
            if not slot.sites:
                drop_slot(self.model, placed.site.host)
        if self.new_tokens:
            self.new_tokens.eject()
        if self.pooling:
            self.pooling.eject()

    def lend(self) -> None:
        """Add the new tokens to the tokenizer.

        Raises:
            MismatchError: the tokenizer has other tokens at their ids.
        """
        if self.tokenizer is not None and self.new_tokens:
            add_new_tokens(self.tokenizer, self.new_tokens.tokens)

    def take_back(self, in_use: Collection[str]) -> None:
        """Undo `lend`; tokens in use, and tokens in front of them, stay.

        `in_use` are the new tokens of other adapters with the same tokenizer.
        """
        if self.tokenizer is not None:
            self.tokenizer.remove_unused(in_use)

    def detach(self) -> None:
        """Detach the adapter, and restore bytes, keys, modules and `requires_grad`."""
        self.state.detach(self.name)

    def save(self, folder: str | Path, *, overwrite: bool = False, peft: bool = False) -> Manifest:
        """Write the adapter's folder: tensors, manifest and card. Files are read back and compared.

        With `peft`, the folder also gets peft's two files. Plain peft can then load the folder, and
        a repository that it is pushed to.

        If processes share parameters (FSDP2, tensor parallelism), each must call this. Tensors are
        gathered, and the first process writes them; the other manifests list no files.

        Raises:
            OutputError: the folder exists (unless `overwrite`) or cannot be written. No partial
                files remain.
            MismatchError: peft cannot represent the adapter; every reason is listed.
        """
        sharded = any(map(is_sharded, self.model.parameters()))
        manifest = self.manifest()
        tensors = {name: whole(tensor) for name, tensor in self.saved_tensors().items()}
        try:
            if sharded and dist.get_rank() > 0:
                return manifest
            files = peft_bytes(to_peft(self.export_source())) if peft else {}

            def beside(staged: Path) -> None:
                write_copies(staged, self.foundations())
                if files:
                    write_files(staged, files)

            written = write_adapter(
                Path(folder),
                manifest,
                tensors,
                card=self.metadata.card,
                overwrite=overwrite,
                beside=beside,
            )
            remember_backbone(self.backbone, manifest.backbone.id)
            return written
        finally:
            if sharded:
                dist.barrier()

    def write_into(self, folder: Path) -> None:
        """Write the adapter's files into a new folder inside another one.

        The caller checks the files and moves the outer folder to its destination.

        Raises:
            OutputError: the adapter cannot be represented.
        """
        manifest, tensors = self.manifest(), self.saved_tensors()
        folder.mkdir()
        write_files(folder, adapter_files(manifest, tensors, self.metadata.card))
        write_copies(folder, self.foundations())
        remember_backbone(self.backbone, manifest.backbone.id)

    def check_usable(self) -> None:
        """Refuse an adapter that cannot train or compute.

        Raises:
            AttachError: nothing would train.
            SiteError: the attention implementation does not support the adapter's prefix.
        """
        if not self.parameters():
            raise AttachError(
                f"nothing would train: {', '.join(m.name for m in self.methods)} without a head",
                hint='load_backbone(..., task="classification", labels=[...])',
            )
        sites = [placed.site for placed in self.placed if placed.site.kind == "keyvalue"]
        check_attention(self.model, sites)

    def check_savable(self) -> None:
        """Check before training that `save` can write the adapter and `load` can read it.

        Raises:
            OutputError: the adapter cannot be saved; lists every problem.
        """
        names = Counter(name for _, _, name, _ in self.owned(inference_form=True))
        if twice := [name for name, count in names.items() if count > 1]:
            raise OutputError(
                f"adapter {self.name!r} cannot be saved: parts of two methods have one name",
                offenders=shorten(twice),
                hint="give the methods different sites, or attach them as two adapters",
            )
        read = check_writable(self.manifest(), self.saved_tensors(), self.metadata.card)
        parse_methods(list(read.methods))

    def export(self, folder: str | Path, *, format: str = "peft", overwrite: bool = False) -> None:
        """Write the adapter in the format of another library.

        Args:
            folder: the folder to write; for gguf, the file.
            format: peft, gguf for llama.cpp, or, for a pipeline, diffusers or kohya.
            overwrite: replace an existing folder or file.

        Raises:
            ConfigError: an unknown format.
            MismatchError: the other library cannot represent the adapter; every reason is listed.
            OutputError: the folder or file exists (unless `overwrite`) or cannot be written.
        """
        if format not in EXPORTED:
            raise ConfigError(
                f"adapters cannot be exported to {format!r}", expected=" or ".join(EXPORTED)
            )
        if format == "gguf":
            from adapterhub.interchange.gguf_lora import write_gguf

            write_gguf(Path(folder), self.export_source(), self.name, overwrite=overwrite)
            return
        if format in STYLES:
            write_diffusers(Path(folder), self.export_source(), format, overwrite=overwrite)
            return
        names = [method.name for method in self.methods]
        card = export_card(self.name, names, self.labels, self.problem_type)
        write_peft(Path(folder), to_peft(self.export_source()), card=card, overwrite=overwrite)

    def export_source(self) -> ExportSource:
        """Return the input of an exporter for the adapter."""
        paths = {id(m): n for n, m in modules_of(self.model).items()}
        name, revision = self.backbone.name_and_revision(self.state.fingerprint)
        forms = [(placed.site, *placed.inference_form()) for placed in self.placed]
        hosts = {site.host: self.model.get_submodule(site.host) for site, _, _ in forms}
        return ExportSource(
            self.anatomy,
            [ExportedModule(m, site, module, hosts[site.host]) for site, m, module in forms],
            [
                (tuple(f"{paths[id(m)]}.{attribute}" for m, attribute in c.holders), c.own)
                for c in self.changed
            ],
            self.head.own if self.head else {},
            backbone=None if name.startswith("unnamed-") else name,
            revision=revision,
            tokens=self.new_tokens is not None,
            pooling=self.pooling.how if self.pooling else None,
            below=tuple(each.ref.name for each in self.foundations()),
            ends=with_stops(self.state.own_ends, stops) if (stops := self.written_stops) else (),
        )

    def manifest(self) -> Manifest:
        """Return the manifest of the adapter's files, without the file list and digests."""
        metadata, snapshot = self.metadata, self.backbone.tokenizer
        kind = task_kind(self.model, self.problem_type)
        template = snapshot.chat_template() if snapshot else None
        return Manifest(
            name=self.metadata.name or self.name,
            methods=dump_methods([method.inference_form() for method in self.methods]),
            backbone=self._backbone_ref(),
            tokenizer=self._tokenizer_identity(snapshot),
            processor=processor_identity(self.backbone.processor) or metadata.processor,
            tokens=self.new_tokens.tokens if self.new_tokens else (),
            chat_template=metadata.chat_template or template,
            task=metadata.task or (None if self.named_heads else kind),
            labels=() if self.named_heads else self.labels,
            head=None if self.named_heads else self._task_head(kind),
            heads=self._head_records(),
            on=tuple(each.ref for each in self.foundations()),
            training=metadata.training | self._stop_record() | self._own_family(),
            metrics=metadata.metrics,
            versions={"adapterhub": __version__}
            | {name: _version_of(name) for name in ("torch", "transformers")},
            **metadata.publication,
        )

    def _stop_record(self) -> dict[str, Any]:
        """Return the record of the tokens at which generation stops, if any."""
        stops = self.written_stops
        return {STOPS: [*stops]} if stops else {}

    def _own_family(self) -> dict[str, Any]:
        """Return the model's own family row, which names the sites, if it has one.

        For a module of another library, return the modules that the caller named as its head.
        """
        if self.backbone.foreign:
            head = self.anatomy.named_head
            return {HEAD_MODULES: list(head)} if head and self.head else {}
        row = self.backbone.family
        return {FAMILY: family_data(row)} if row else {}

    def foundations(self) -> tuple[Foundation, ...]:
        """Return the files of the adapters below, in order."""
        return tuple(each.foundation for each in self.on if each.foundation is not None)

    def _task_head(self, kind: str | None) -> TaskHead | None:
        if self.head is None:
            return None
        pooling = self.pooling.how if self.pooling else None
        return TaskHead(kind, self.problem_type, pooling, activation_between(self.head.own))

    def _head_records(self) -> dict[str, HeadRecord]:
        """Return the manifest's records of several heads."""
        pooling = self.pooling.how if self.pooling else None
        return {
            name: HeadRecord(
                task=named.task,
                labels=named.labels,
                head=TaskHead(named.kind, self.heads[name].labels["problem_type"], pooling)
                if name in self.heads
                else None,
            )
            for name, named in sorted(self.named_heads.items())
        }

    def _tokenizer_identity(self, snapshot: TokenizerSnapshot | None) -> str | None:
        if snapshot is None:
            return self.metadata.tokenizer
        return snapshot.identity(first_id(self.new_tokens.tokens if self.new_tokens else ()))

    def _backbone_ref(self) -> BackboneRef:
        identity = self.state.identity()
        name, revision = self.backbone.name_and_revision(lambda: identity.fingerprint)
        dtype, quantization = self.backbone.dtype_and_quantization(self.state.originals())
        return BackboneRef(
            id=name,
            revision=revision,
            fingerprint=identity.fingerprint,
            model_type=self.backbone.model_type,
            dtype=dtype,
            quantization=quantization,
            identity=identity.record(),
        )

    def train_mode(self, dropout: bool = False) -> None:
        """Set the model to training mode, and frozen parts to evaluation mode.

        A frozen backbone then computes the same in training and inference. Call this instead of
        `model.train()`. `dropout` also enables the backbone's dropout.
        """
        self.model.train()
        if not dropout:
            trained = {id(p) for p in self.parameters() if p.requires_grad}
            heads = set(self.head.own) if self.head else set()
            for name, child in self.model.named_children():
                if name not in heads:
                    _still(child, trained, True)
            for module in self.head.original.values() if self.head else ():
                module.eval()  # frozen, and in the model while the adapter is inactive
            keep_training(self.anatomy)
            for below in self.on:
                below.still()

    def still(self) -> None:
        """Set a frozen adapter and the adapters below it to evaluation mode."""
        for placed in self.placed:
            placed.module.eval()
        for below in self.on:
            below.still()


def _still(module: nn.Module, trained: set[int], parent: bool) -> None:
    if isinstance(module, Slot):
        return
    own = [p for n, p in module.named_parameters() if f"{CHILD}." not in n]
    mode = any(id(p) in trained for p in own) if own else parent
    if has_statistics(module):
        module.train(mode)  # records the mode, and stays in evaluation mode
    else:
        module.training = mode
    for child in module.children():
        _still(child, trained, mode)
