"""What an adapter is made of: modules at sites, its own copies of backbone parameters, and its task
head; and how each takes its place in the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.sites import CHILD, Anatomy, Site
from adapterhub.hooks.attention import KeyValueSlot, keyvalue_slot
from adapterhub.hooks.layer_mix import mix_slot
from adapterhub.hooks.precision import hold_in_fp32, raise_input, release_from_fp32
from adapterhub.hooks.projection import output_slot
from adapterhub.hooks.prompt import prompt_slot
from adapterhub.hooks.slot import Slot
from adapterhub.methods._base import Method

HEAD = "head"
LABEL_FIELDS = ("id2label", "label2id", "problem_type")


@dataclass
class PlacedModule:
    """A site module on its host: it sits in the host's slot under `key`."""

    method: Method
    site: Site
    module: nn.Module
    key: str

    def inference_form(self) -> tuple[Method, nn.Module]:
        """The method and the module that files hold: what serves training alone is folded away."""
        fold = getattr(self.module, "inference_form", None)
        return self.method.inference_form(), fold() if fold else self.module


@dataclass
class OwnedParameter:
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
                hold_in_fp32(module, attribute, self.original.dtype)
            else:
                release_from_fp32(module, attribute)


@dataclass
class AdapterHead:
    """The task head of an adapter, in fp32, the model's own that it stands in for, and the
    labels."""

    own: dict[str, nn.Module]
    original: dict[str, nn.Module]
    labels: dict[str, Any]
    original_labels: dict[str, Any]

    def __post_init__(self) -> None:
        for name, module in self.own.items():
            if _dtype(module) != _dtype(self.original[name]):
                module.register_forward_pre_hook(raise_input, with_kwargs=True)

    def swap(self, model: PreTrainedModel, on: bool) -> None:
        """Put the adapter's head and labels into the model, or the model's own back."""
        for name, module in (self.own if on else self.original).items():
            model._modules[name] = module
        set_labels(model, self.labels if on else self.original_labels)

    def lowered(self) -> AdapterHead:
        """The same head in the dtype of the model's own, to stay on the model."""
        own = {name: copy.deepcopy(module) for name, module in self.own.items()}
        for name, module in own.items():
            module._forward_pre_hooks.clear()
            module.to(_dtype(self.original[name]))
        return replace(self, own=own)


def set_labels(model: PreTrainedModel, labels: Mapping[str, Any]) -> None:
    """Give a model the labels of a head: the fields of its config."""
    for name, value in labels.items():
        setattr(model.config, name, value)
    if hasattr(model, "num_labels"):
        setattr(model, "num_labels", model.config.num_labels)  # noqa: B010


def _dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters())


def slot_at(model: PreTrainedModel, site: Site) -> Slot:
    """The slot at a site's host."""
    slot = model.get_submodule(site.host)._modules[CHILD]
    assert isinstance(slot, Slot)
    return slot


def make_slot(anatomy: Anatomy, placed: PlacedModule) -> Slot:
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
