"""Prefix keys and values at an attention module, by the way in which it attends.

A module that computes softmax(q kᵀ) v with torch's functions is watched: attention_products.py. One
that calls transformers' attention interface reads the name of its function from `module.config`.
Where a prefix is attached, this is a view of the backbone's config (`RoutedConfig`): while a prefix
is active, the name that it gives is `adapterhub_<name>`, a function registered next to the
backbone's own. It puts the prefix in front of keys and values, widens the mask (and the bias of
relative positions), and calls the backbone's function. The backbone's config itself is not changed,
so a later `set_attn_implementation` takes effect on the next forward pass, and models may share one
config. For a name without a mask function transformers builds no mask, and would attend to padding,
so the backbone's mask function is registered under the same name. Nothing enters the KV cache.

A prefix with a gate g_i for each query i, K' = [g_i P_k; K] and V' = [g_i P_v; V], needs no keys of
its own for each query: heads are made twice as wide, [q_i, g_i q_i] against [0, P_k; K, 0], and the
output [o, o'] becomes o + g_i o'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapterhub.anatomy.forward_source import attends
from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import SiteError
from adapterhub.hooks.attention_products import watch_products
from adapterhub.hooks.composition import BatchPlan, RowOrder
from adapterhub.hooks.keyvalue import (
    AttentionCall,
    KeyValueSlot,
    PrefixedKeyValues,
    RelativeBias,
    note_past,
)
from adapterhub.hooks.packed import TokenPlan
from adapterhub.hooks.row_stacks import StackedColumn, StackedRows
from adapterhub.hooks.slot import SUBLAYER_INPUT, put_slot, read_sublayer_input
from adapterhub.hooks.virtual_tokens import as_mask
from adapterhub.methods._site_module import (
    ApartKeyValueModule,
    GatedKeyValueModule,
    PrefixModule,
    SiteModule,
)

SUPPORTED = ("eager", "sdpa")
_PREFIX = "adapterhub_"
_CONFIG, _SLOT = "_adapterhub_config", "_adapterhub_slot"


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
        put_slot(host, slot)
    if isinstance(module, ApartKeyValueModule) and not slot.projections:
        read = [(model.get_submodule(each.host), each.part) for each in module.projections]
        for each in read:
            read_weight(*each)  # which each forward pass does again
        slot.projections = read
    if isinstance(module, GatedKeyValueModule):
        read_sublayer_input(model, slot, site.input_host)
    positions = isinstance(module, PrefixModule) and module.positions
    if positions and site.bias and slot.bias is None:
        slot.bias = RelativeBias(model.get_submodule(site.bias))
        slot.patch.hook(host.register_forward_pre_hook, note_past, with_kwargs=True)
    return slot


def check_attention(model: PreTrainedModel, sites: Iterable[Site]) -> None:
    """Refuse an attention implementation that prefixes do not support.

    Raises:
        SiteError: it is neither eager nor sdpa.
    """
    modules: Iterable[Any] = (model.get_submodule(site.host) for site in sites)
    hosts = [module for module in modules if attends(module) == "interface"]
    refuse_unsupported(host.config._attn_implementation for host in hosts)


class RoutedConfig:
    """A view of a config for one attention module: it names the function that adds the prefix.

    Everything else is read from the config, and written to it.
    """

    def __init__(self, config: Any, slot: KeyValueSlot) -> None:
        vars(self).update({_CONFIG: config, _SLOT: slot})

    @property
    def _attn_implementation(self) -> str:
        name: str = vars(self)[_CONFIG]._attn_implementation
        if not vars(self)[_SLOT].keys:
            return name
        refuse_unsupported([name])
        return _PREFIX + name

    def __getattr__(self, name: str) -> Any:
        # A copy that is being made has no config yet.
        if name.startswith("__") or _CONFIG not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)[_CONFIG], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)[_CONFIG], name, value)


def refuse_unsupported(names: Iterable[str]) -> None:
    """Refuse attention implementations, by name, that are neither eager nor sdpa."""
    if unsupported := sorted(set(names).difference(SUPPORTED)):
        raise SiteError(
            f"prefixes do not support the attention implementation {', '.join(unsupported)}",
            expected=f"one of {', '.join(SUPPORTED)}",
            hint='model.set_attn_implementation("sdpa")',
        )


def eager_function(host: nn.Module) -> Callable[..., Any]:
    """Return the eager attention function that the forward of an attention module names."""
    forward: Any = inspect.unwrap(type(host).forward)
    name = next(n for n in forward.__code__.co_names if n.endswith("eager_attention_forward"))
    return forward.__globals__[name]  # type: ignore[no-any-return]


def _attention_with_prefix(name: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # by this name in some calls
        **options: Any,
    ) -> Any:
        slot = module._modules[CHILD]
        assert isinstance(slot, KeyValueSlot)
        attend = slot.eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        assert attend is not None
        call = AttentionCall(query, key, value, attention_mask, slot.take(SUBLAYER_INPUT), options)
        output, weights = _attend_together(attend, module, slot, call)
        return (slot.add_apart(call, output) if slot.projections else output), weights

    return attention


def _attend_together(
    attend: Callable[..., Any], module: nn.Module, slot: KeyValueSlot, call: AttentionCall
) -> Any:
    """Call the backbone's attention over the prefixes of each row and keys, in one softmax."""
    keys, plan, _ = slot.applied
    if isinstance(plan, TokenPlan):
        return slot.with_virtual_tokens(call, plan.spans).run(attend, module)
    if plan is None or len(plan.groups) == 1:
        return _attend(attend, module, slot, plan.groups[0] if plan else keys, call)
    biased = call.options.get("position_bias") is not None
    columns = None if biased else slot.stacked(call.query)
    if columns is not None and len(columns) == 1:
        return _attend_stacked(attend, module, slot, columns[0], call)
    return _attend_per_row(attend, module, slot, plan, call)


def _attend(
    attend: Callable[..., Any],
    module: nn.Module,
    slot: KeyValueSlot,
    names: tuple[str, ...],
    call: AttentionCall,
) -> Any:
    """Call the backbone's attention over prefixes and keys."""
    names = slot.together(names)
    if not names:
        return call.run(attend, module)
    call = _with_explicit_mask(module, call)
    joined: PrefixedKeyValues = slot(call, names)
    mask = _widen_mask(call, joined.key.shape[2] - call.key.shape[2], None)
    options = call.options
    if (bias := options.get("position_bias")) is not None:
        options["position_bias"] = _widen_bias(bias, joined.lengths, slot)
    call = call._replace(key=joined.key, value=joined.value, mask=mask)
    if not joined.gates:
        return call.run(attend, module)
    query = call.query
    if options.get("scaling") is None:
        options["scaling"] = query.shape[-1] ** -0.5  # not that of the wider query
    gates = [gate.to(query.dtype) for gate in joined.gates]
    query = torch.cat([query, *(gate[:, None] * query for gate in gates)], dim=-1)
    output, weights = call._replace(query=query).run(attend, module)
    return _sum_blocks(output, gates), weights


def _with_explicit_mask(module: nn.Module, call: AttentionCall) -> AttentionCall:
    """Write a causal mask out where transformers leaves it to torch's `is_causal`.

    torch aligns the triangle with the first key, which is wrong behind a prefix. A longer, static
    cache is empty here.
    """
    options = dict(call.options)
    causal = options.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    call = call._replace(options=options | {"is_causal": False})
    tokens = call.query.shape[2]
    if call.mask is not None or not causal or tokens == 1:
        return call
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=call.query.device).tril()
    key, value = call.key[:, :, :tokens], call.value[:, :, :tokens]
    return call._replace(key=key, value=value, mask=mask[None, None])


def _widen_bias(bias: Tensor, lengths: dict[str, int], slot: KeyValueSlot) -> Tensor:
    if slot.bias is None:
        return F.pad(bias, (sum(lengths.values()), 0))
    return slot.bias.widen(bias, lengths, slot)


def _sum_blocks(output: Tensor, gates: list[Tensor]) -> Tensor:
    """Add block 0 and each other block times its gate.

    output: (batch, tokens, heads, (1 + n) head_dim) -> (batch, tokens, heads, head_dim).
    """
    total, *blocks = output.chunk(1 + len(gates), dim=-1)
    for gate, block in zip(gates, blocks, strict=True):
        total = total + gate[:, :, None] * block
    return total


def _attend_stacked(
    attend: Callable[..., Any],
    module: nn.Module,
    slot: KeyValueSlot,
    rows: StackedRows,
    call: AttentionCall,
) -> Any:
    """Call the backbone's attention once for each part of the rows, over prefixes and keys."""
    if rows.order is None:
        return _attend_part(attend, module, slot, rows.parts[0], call)
    copies = len(call.query) // rows.order.rows
    calls = zip(rows.parts, call.split(rows.order, copies), strict=True)
    results = [_attend_part(attend, module, slot, *each) for each in calls]
    return _joined_results(results, rows.order, copies)


def _attend_part(
    attend: Callable[..., Any],
    module: nn.Module,
    slot: KeyValueSlot,
    part: StackedColumn | None,
    call: AttentionCall,
) -> Any:
    """Call the backbone's attention over a prefix and the keys of each row."""
    if part is None:
        return call.run(attend, module)
    prefixes, own = part.stack()
    copies = len(call.query) // prefixes.shape[1]  # of each row of the route
    if copies > 1:
        prefixes = prefixes.repeat_interleave(copies, 1)
        own = None if own is None else own.repeat_interleave(copies, 0)
    prefixes = slot.in_heads(prefixes, call.key)
    call = _with_explicit_mask(module, call)
    key, value = (torch.cat([p, t], 2) for p, t in zip(prefixes, call[1:3], strict=True))
    mask = _widen_mask(call, prefixes.shape[3], own)
    return call._replace(key=key, value=value, mask=mask).run(attend, module)


def _widen_mask(call: AttentionCall, length: int, own: Tensor | None) -> Tensor | None:
    """Extend the mask of a call to prefixes; `own`: (batch, length), which are not padding."""
    mask, batch = call.mask, len(call.query)
    if own is None:
        visible = True if mask is not None and mask.dtype == torch.bool else 0.0
        return None if mask is None else F.pad(mask, (length, 0), value=visible)
    if mask is None:
        mask = call.query.new_zeros(1, 1, 1, call.key.shape[2])
    shown = own[:, None, None].expand(-1, *mask.shape[1:3], -1)
    return torch.cat([as_mask(shown, mask), mask.expand(batch, -1, -1, -1)], dim=-1)


def _attend_per_row(
    attend: Callable[..., Any],
    module: nn.Module,
    slot: KeyValueSlot,
    plan: BatchPlan,
    call: AttentionCall,
) -> Any:
    """Call the backbone's attention once for each group of rows with equal prefixes."""
    copies = plan.copies(len(call.query), slot.where())
    groups = zip(plan.groups, call.split(plan, copies), strict=True)
    results = [_attend(attend, module, slot, names, part) for names, part in groups]
    return _joined_results(results, plan, copies)


def _joined_results(results: Sequence[Any], order: RowOrder, copies: int) -> Any:
    """Put the outputs and the attention weights of parts of the rows back into their order."""
    outputs, weights = zip(*results, strict=True)
    if weights[0] is None:
        return order.join(outputs, copies), None
    # As wide as the longest prefix: a shorter one has zeros in front.
    keys = max(w.shape[-1] for w in weights)
    padded = [F.pad(w, (keys - w.shape[-1], 0)) for w in weights]
    return order.join(outputs, copies), order.join(padded, copies)


for _name in SUPPORTED:
    AttentionInterface.register(_PREFIX + _name, _attention_with_prefix(_name))
    AttentionMaskInterface.register(_PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])
