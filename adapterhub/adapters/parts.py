"""The parts of an adapter, and how each replaces or extends a part of the model.

Modules at sites, copies of backbone parameters, and a task head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.own_modules import is_view, own_modules
from adapterhub.anatomy.projections import is_projection
from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.backbones.weights import with_whole_parameters
from adapterhub.hooks.attention import keyvalue_slot
from adapterhub.hooks.held_weight import held_weight_slot
from adapterhub.hooks.keyvalue import follow_padding
from adapterhub.hooks.layer_output import input_slot, layer_slot, mix_slot
from adapterhub.hooks.matrix import matrix_slot
from adapterhub.hooks.new_tokens import row_slot
from adapterhub.hooks.precision import (
    fp32_parameter,
    hold_in_fp32,
    raise_input,
    release_from_fp32,
)
from adapterhub.hooks.prompt import prompt_slot
from adapterhub.hooks.slot import Slot, output_slot
from adapterhub.methods.common.base import Method
from adapterhub.methods.common.site_module import EmbeddingModule, SiteModule
from adapterhub.patch import Patch

HEAD = "head"
HEADS = "heads"  # the first part of the names of tensors of several heads
LABEL_FIELDS = ("id2label", "label2id", "problem_type")


def _forget_computed(module: nn.Module) -> None:
    """Empty what a module keeps of its parameters: `attention_bias_cache` of LeViT."""
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
        """Return the method and the module that files contain: nothing that only training needs."""
        return self.method.inference_form(), with_whole_parameters(self.module).inference_form()


@dataclass
class OwnedParameter:
    """An adapter's own copy of a backbone parameter, and the modules that hold it (ties).

    `name` is its name in adapter files; `stage` and `rate` come from the method's plan; `kept` is
    the copy while it is not in the backbone; `untied` copies leave the original in other modules.
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

        An active one is read from the backbone, where FSDP2 replaces it by a sharded one.
        """
        module, attribute = self.holders[0]
        parameter = fp32_parameter(module, attribute) if self.active else None
        # A swap that did not finish may have left the original there.
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
        """Give a copy without values, on the meta device, those of the original."""
        own = self.own
        if own.is_meta:
            values = self.original.detach().to(own.dtype, copy=True)
            filled = nn.Parameter(values, own.requires_grad)
            torch.utils.swap_tensors(own, filled)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Keep what FSDP2 has put in the place of the copy, and neither the whole nor the original.

        The original cannot come back.
        """
        self.original = nn.Parameter(self.original.to("meta"), requires_grad=False)
        self.swap(on=True)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the one of both parameters that is not in the backbone now."""
        out = self.original if self.active else self.kept
        with torch.no_grad():
            out.data = fn(out.data)
            if out.grad is not None:
                out.grad.data = fn(out.grad.data)


@dataclass(frozen=True)
class NamedHead:
    """The task of one of several heads: its name, the kind of model, and the user's classes."""

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

    def put_into(self, model: PreTrainedModel) -> None:
        """Put the adapter's head and labels into the model."""
        for name, module in self.own.items():
            owner, _, leaf = name.rpartition(".")
            self.patch.put(model.get_submodule(owner)._modules, leaf, module)
        if not is_view(model):
            set_labels(model, self.labels, self.patch)

    def convert(self, model: PreTrainedModel, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the modules that are not in the model now."""
        there = set(map(id, model.modules()))
        for module in (*self.own.values(), *self.original.values()):
            if id(module) not in there:
                module._apply(fn)  # type: ignore[no-untyped-call]

    def lowered(self) -> AdapterHead:
        """Return a copy in the dtype of the model's own head, to become a part of the model."""
        own = {name: copy.deepcopy(module) for name, module in self.own.items()}
        for name, module in own.items():
            module._forward_pre_hooks.clear()
            module.to(_dtype(self.original[name]))
        return replace(self, own=own)


def set_labels(model: PreTrainedModel, labels: Mapping[str, Any], patch: Patch) -> None:
    """Set the label fields of a model's config."""
    for name, value in labels.items():
        patch.set(model.config, name, value)
    if hasattr(model, "num_labels"):
        patch.set(model, "num_labels", model.config.num_labels)


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def slot_at(model: PreTrainedModel, site: Site) -> Slot:
    """Return the slot of a site's host."""
    slot = model.get_submodule(site.host)._modules[CHILD]
    assert isinstance(slot, Slot)
    return slot


def make_slot(anatomy: Anatomy, placed: PlacedModule) -> Slot:
    """Return the slot of a site's host, of the class that the site needs; create it if missing."""
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
    if host is anatomy.model.get_output_embeddings() and is_projection(host):
        row_slot(host)  # new tokens have their rows there too
    if site.matrix is not None:
        return matrix_slot(anatomy.model, site, placed.module)
    if site.kind == "weight":
        return held_weight_slot(anatomy.model, site)
    return output_slot(anatomy.model, site, placed.module, anatomy.family.batch_dim)


def parameter_holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Map the id of each parameter to the modules that hold it, and under which name."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for _, module in own_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    return holders
