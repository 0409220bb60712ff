"""Prefixes at an attention module, by the way in which it attends: two rooms.

attention_interface.py    it calls one of transformers' attention functions
attention_products.py     it computes softmax(q kᵀ) v with torch's functions
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from adapterhub.anatomy.forward_source import attends
from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.hooks.attention_interface import RoutedConfig, eager_function, refuse_unsupported
from adapterhub.hooks.attention_products import watch_products
from adapterhub.hooks.keyvalue import KeyValueSlot
from adapterhub.hooks.relative_bias import RelativeBias, note_past
from adapterhub.hooks.slot import read_sublayer_input
from adapterhub.methods._site_module import GatedKeyValueModule, PrefixModule, SiteModule


def keyvalue_slot(
    model: PreTrainedModel, site: Site, module: SiteModule, batch_dim: int = 0
) -> KeyValueSlot:
    """Return the slot at an attention module; create it, with the hooks that a module needs.

    A gated prefix reads the attention's input, one with `positions` the bias of relative positions.
    `batch_dim` is the dimension of the batch in the attention's input.
    """
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, KeyValueSlot):
        slot = KeyValueSlot()
        slot.parallel = tensor_parallel(model)
        if attends(host) == "interface":
            slot.eager = eager_function(host)
            slot.patch.override(host, "config", RoutedConfig(host.config, slot))
        else:
            watch_products(host, slot, batch_dim)
        host.add_module(CHILD, slot)
    if isinstance(module, GatedKeyValueModule):
        read_sublayer_input(model, slot, site.input_host)
    positions = isinstance(module, PrefixModule) and module.positions
    if positions and site.bias and slot.bias is None:
        slot.bias = RelativeBias(model.get_submodule(site.bias))
        slot.patch.hook(host.register_forward_pre_hook(note_past, with_kwargs=True))
    return slot


def check_attention(model: PreTrainedModel, sites: Iterable[Site]) -> None:
    """Refuse an attention implementation that prefixes do not support.

    Raises:
        SiteError: it is neither eager nor sdpa.
    """
    modules: Iterable[Any] = (model.get_submodule(site.host) for site in sites)
    hosts = [module for module in modules if attends(module) == "interface"]
    refuse_unsupported(host.config._attn_implementation for host in hosts)
