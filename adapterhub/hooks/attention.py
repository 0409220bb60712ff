"""Prefix keys and values enter through transformers' attention interface, never through the KV
cache.

While a prefix sits on a backbone, its attention implementation is called `adapterhub_<name>`: a
function registered beside the backbone's own that joins the prefix to the keys and values, widens
the mask (and the bias of relative positions), and calls the backbone's own function. A prefix with
a gate g_i of each query i, K' = [g_i P_k; K] and V' = [g_i P_v; V], needs no keys per query: the
function gets heads of twice the width, [q_i, g_i q_i] against [0, P_k; K, 0], and of its output
[o, o'] the sum o + g_i o' is taken. The mask maker is registered under the same name, since
transformers builds no mask, and so attends to padding, for a name that it does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.errors import SiteError
from adapterhub.hooks.composition import BatchPlan
from adapterhub.hooks.relative_bias import RelativeBias, note_past
from adapterhub.hooks.slot import Slot, tap_sublayer_input

SUPPORTED = ("eager", "sdpa")
_PREFIX = "adapterhub_"


class PrefixedKeyValues(NamedTuple):
    """Keys and values with prefixes in front, the gates (batch, tokens, 1) of those that have one,
    and the length of each."""

    key: Tensor
    value: Tensor
    gates: list[Tensor]
    lengths: dict[str, int]


class KeyValueSlot(Slot):
    """Sits at an attention module: each active module gives prefix keys and values, and may give a
    gate for them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias: RelativeBias | None = None

    def forward(
        self, key: Tensor, value: Tensor, names: tuple[str, ...], x: Tensor | None
    ) -> PrefixedKeyValues:
        """key, value: (batch, heads, tokens, head_dim), x: (batch, tokens, d) of the attention.

        With n gates the keys and values are (1 + n) head_dim wide: those of gate i stand in block i
        alone, all others in block 0.
        """
        read = [_read(self.placed(name), x, key) for name in names]
        gates = [gate for _, gate in read if gate is not None]
        key, value = (_in_block(t, 0, len(gates)) for t in (key, value))
        block = 0
        for prefix, gate in read:
            block += gate is not None
            own = _in_block(prefix, block if gate is not None else 0, len(gates))
            key, value = torch.cat([own[0], key], dim=2), torch.cat([own[1], value], dim=2)
        lengths = {name: p.shape[3] for name, (p, _) in zip(names, read, strict=True)}
        return PrefixedKeyValues(key, value, gates, lengths)


def _read(module: nn.Module, x: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """A prefix (2, batch, heads, length, head_dim) and its gate."""
    batch, heads, _, head_dim = key.shape
    prefix, gate = module(x) if reads_input(module) else (module(), None)  # (2, length, d_kv)
    prefix = prefix.view(2, -1, heads, head_dim).transpose(1, 2).to(key.dtype)
    return prefix[:, None].expand(2, batch, -1, -1, -1), gate


def _in_block(part: Tensor, block: int, gates: int) -> Tensor:
    """part: (..., d) -> (..., (1 + gates) d), zero but in one block."""
    width = part.shape[-1]
    return F.pad(part, (block * width, (gates - block) * width)) if gates else part


def reads_input(module: nn.Module) -> bool:
    """Whether a prefix is gated: by the attention's x."""
    return getattr(module, "reads_input", False)


def keyvalue_slot(model: PreTrainedModel, site: Site, module: nn.Module) -> KeyValueSlot:
    """The slot at an attention module, made if this is its first prefix, with what the module
    needs: the attention's x, or the positions of keys and queries."""
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, KeyValueSlot):
        slot = KeyValueSlot()
        host.add_module(CHILD, slot)
    if reads_input(module):
        tap_sublayer_input(model, slot, site.input_host)
    if getattr(module, "positions", False) and site.bias and slot.bias is None:
        slot.bias = RelativeBias(model.get_submodule(site.bias))
        slot.handles.append(host.register_forward_pre_hook(note_past, with_kwargs=True))
    return slot


def check_attention(model: PreTrainedModel) -> None:
    """Refuse an attention implementation that prefixes cannot enter.

    Raises:
        SiteError: it is neither eager nor sdpa.
    """
    names = {c._attn_implementation.removeprefix(_PREFIX) for c in _attention_configs(model)}
    if wrong := sorted(names.difference(SUPPORTED)):
        raise SiteError(
            f"prefixes cannot enter the attention implementation {', '.join(wrong)}",
            expected=f"one of {', '.join(SUPPORTED)}",
            hint='model.set_attn_implementation("sdpa") before attach',
        )


def route_attention(model: PreTrainedModel, on: bool) -> None:
    """Switch the backbone's attention to the functions that know prefixes, or back to its own."""
    for config in _attention_configs(model):
        own = config._attn_implementation.removeprefix(_PREFIX)
        # The property's setter would walk sub-configs that are visited here already.
        config._attn_implementation_internal = f"{_PREFIX}{own}" if on else own


def _attention_configs(model: PreTrainedModel) -> Iterator[Any]:
    # T5's stacks hold copies of the config, BART's hold the config itself.
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return (c for c in configs.values() if getattr(c, "_attn_implementation", None) is not None)


def _own_attention(name: str, module: nn.Module) -> Callable[..., Any]:
    if name == "eager":  # each modeling file has its own eager function
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[name]
    return function  # type: ignore[no-any-return]


def _attention_with_prefix(name: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        own = _own_attention(name, module)
        slot = module._modules.get(CHILD)
        if not isinstance(slot, KeyValueSlot) or not slot.active:
            return own(module, query, key, value, mask, **kwargs)
        x = slot.take_sublayer_input()
        if slot.plan is None or len(slot.plan.nodes) == 1:
            names = slot.plan.nodes[0] if slot.plan else slot.active
            return _attend(own, slot, names, module, x, query, key, value, mask, **kwargs)
        return _attend_by_rows(own, slot, slot.plan, module, x, query, key, value, mask, **kwargs)

    return attention


def _attend(
    own: Callable[..., Any],
    slot: KeyValueSlot,
    names: tuple[str, ...],
    module: nn.Module,
    x: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """The backbone's own attention over these prefixes and the keys."""
    if not names:
        return own(module, query, key, value, mask, **kwargs)
    causal = kwargs.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    (key, value, gates, lengths), mask = _prefixed(slot, names, x, query, key, value, mask, causal)
    kwargs["is_causal"] = False  # the mask says it all
    if (bias := kwargs.get("position_bias")) is not None:
        padded = F.pad(bias, (sum(lengths.values()), 0))
        kwargs["position_bias"] = slot.bias.widen(bias, lengths, slot) if slot.bias else padded
    if not gates:
        return own(module, query, key, value, mask, **kwargs)
    if kwargs.get("scaling") is None:
        kwargs["scaling"] = query.shape[-1] ** -0.5  # not that of the wider query
    gates = [gate.to(query.dtype) for gate in gates]
    query = torch.cat([query, *(gate[:, None] * query for gate in gates)], dim=-1)
    output, weights = own(module, query, key, value, mask, **kwargs)
    return _gated(output, gates), weights


def _gated(output: Tensor, gates: list[Tensor]) -> Tensor:
    """output: (batch, tokens, heads, (1 + n) head_dim) -> block 0 plus each other block times its
    gate."""
    first, *others = output.chunk(1 + len(gates), dim=-1)
    for gate, part in zip(gates, others, strict=True):
        first = first + gate[:, :, None] * part
    return first


def _attend_by_rows(
    own: Callable[..., Any],
    slot: KeyValueSlot,
    plan: BatchPlan,
    module: nn.Module,
    x: Tensor | None,
    query: Tensor,
    *others: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Rows with different prefixes attend apart, each group as it would alone."""
    copies = plan.copies(len(query), slot.where())
    groups = zip(*(plan.split(t, copies) for t in (x, query, *others)), strict=True)
    options = {k: plan.split(v, copies) for k, v in kwargs.items()}
    done = [
        _attend(own, slot, names, module, *group, **{k: v[n] for k, v in options.items()})
        for n, (names, group) in enumerate(zip(plan.nodes, groups, strict=True))
    ]
    outputs, weights = zip(*done, strict=True)
    if weights[0] is None:
        return plan.join(outputs, copies), None
    # Over the longest prefix: a shorter one has zeros in front.
    keys = max(w.shape[-1] for w in weights)
    padded = [F.pad(w, (keys - w.shape[-1], 0)) for w in weights]
    return plan.join(outputs, copies), plan.join(padded, copies)


def _prefixed(
    slot: KeyValueSlot,
    names: tuple[str, ...],
    x: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> tuple[PrefixedKeyValues, Tensor | None]:
    tokens, seen = query.shape[2], key.shape[2]
    if mask is None and causal and tokens > 1:
        # transformers leaves the mask out where torch's causal flag says the same. That flag aligns
        # the triangle with the first key, which is wrong behind a prefix; a longer, static cache is
        # empty here.
        key, value, seen = key[:, :, :tokens], value[:, :, :tokens], tokens
        mask = torch.ones(tokens, seen, dtype=torch.bool, device=query.device).tril()[None, None]
    joined: PrefixedKeyValues = slot(key, value, names, x)
    if mask is not None:
        visible = True if mask.dtype == torch.bool else 0.0
        mask = F.pad(mask, (joined.key.shape[2] - seen, 0), value=visible)
    return joined, mask


for _name in SUPPORTED:
    AttentionInterface.register(_PREFIX + _name, _attention_with_prefix(_name))
    AttentionMaskInterface.register(_PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])
