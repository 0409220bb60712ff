"""The slot at an attention module: the prefixes of the active modules, and their gates.

Keys and values that are attended to separately from the tokens (`ApartKeyValueModule`) have their
own softmax; the result is added to the output of the attention.

Where attention adds a bias of relative positions to its scores (T5), prefixes may have positions:

    b_ij = table[bucket(k_j - q_i)]     k_j: the position of key j    q_i: of query i

By default a prefix has no positions, and its keys no bias. With `positions` it has 0 to L - 1, and
the keys of tokens continue from there: k_j = L + j. With `positions=True` queries do too,
q_i = L + i, so that the bias between tokens is unchanged; with `positions="keys"` they do not:
q_i = i.

Where attention turns queries and keys by their positions (RoPE), scores between tokens depend on
the difference of their positions, but scores with a prefix without positions depend on the position
of the query. So positions start behind padding on the left, as `generate` counts them: a text has
the same result with and without padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.projections import rotates
from adapterhub.anatomy.sites import Anatomy, FeatureSlice, Site
from adapterhub.backbones.tensor_parallel import TensorParallel
from adapterhub.backbones.weights import read_bias, reread_weight
from adapterhub.errors import SiteError
from adapterhub.hooks.composition import BatchPlan, PrefixSpan, RowOrder
from adapterhub.hooks.slot import Mark, Slot
from adapterhub.methods.common.site_module import (
    ApartKeyValueModule,
    GatedKeyValueModule,
    KeyValueModule,
    Positions,
    PrefixModule,
)

_PAST = "past"
_BEHIND, _AROUND = "_adapterhub_behind_padding", "_adapterhub_keeps_mask"
_MASK = "mask"


class AttentionCall(NamedTuple):
    """The arguments of one call of an attention function, without its module."""

    query: Tensor  # (batch, heads, queries, head_dim)
    key: Tensor  # (batch, heads, keys, head_dim)
    value: Tensor  # like key
    mask: Tensor | None  # (batch or 1, heads or 1, queries, keys), bool or added to the scores
    x: Tensor | None  # (batch, tokens, d), the input of the attention module, where a gate reads it
    options: dict[str, Any]

    def run(self, attend: Callable[..., Any], module: nn.Module) -> Any:
        """Call an attention function: the output and the attention weights."""
        return attend(module, self.query, self.key, self.value, self.mask, **self.options)

    def split(self, order: RowOrder, copies: int) -> list[AttentionCall]:
        """Return one call for each part of the rows; the batch repeats each row `copies` times."""
        calls = order.split_call(self[:5], self.options, copies)
        return [AttentionCall._make((*tensors, options)) for tensors, options in calls]


class PrefixedKeyValues(NamedTuple):
    """Keys and values behind their prefixes."""

    key: Tensor
    value: Tensor
    gates: list[Tensor]  # (batch, tokens, 1), of the prefixes that have one
    lengths: dict[str, int]  # tokens, by the keys of the modules


class JoinedPrefixes(NamedTuple):
    """The prefixes of the rows of a batch, concatenated; shorter ones are padded in front.

    Attributes:
        key: (batch or 1, length, d_k).
        value: (batch or 1, length, d_v).
        own: (batch, length), false at padding; None: no padding.
        gate: (batch, queries, length), 1 where a prefix has none; None: no prefix has one.
        apart: (batch or 1, length), the number of each key's softmax, 0 for the softmax of the
            tokens; None: all are in the latter.
        softmaxes: the number of softmaxes in addition to that for tokens.
        together: whether some key is in the softmax of the tokens.
    """

    key: Tensor
    value: Tensor
    own: Tensor | None = None
    gate: Tensor | None = None
    apart: Tensor | None = None
    softmaxes: int = 0
    together: bool = True


class KeyValueSlot(Slot):
    """The prefixes and gates of the active modules at an attention module."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_dim = 0
        self.bias: RelativeBias | None = None
        self.eager: Callable[..., Any] | None = None
        self.follows_padding = False
        self.parallel: TensorParallel | None = None
        # Of keys and of values; in a list, so that they are not child modules.
        self.projections: list[tuple[nn.Module, FeatureSlice | None]] = []

    def placed(self, key: str) -> Any:
        """Return the module with a key."""
        module = super().placed(key)
        assert isinstance(module, PrefixModule)
        return module

    def together(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys of modules in the softmax of the tokens."""
        return tuple(n for n in names if not isinstance(self.placed(n), ApartKeyValueModule))

    def apart(self, module: ApartKeyValueModule) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a module with a separate softmax, (length, d) each."""
        read = ((reread_weight(*each), read_bias(*each)) for each in self.projections)
        (key, key_bias), (value, value_bias) = read
        pair: tuple[Tensor, Tensor] = module(key, key_bias, value, value_bias)
        return pair

    def add_apart(self, call: AttentionCall, output: Tensor) -> Tensor:
        """Add the attention over separate keys to the output of a call.

        `output`: (batch, queries, heads, head_dim), the attention over all other keys.
        """
        scale = call.options.get("scaling") or call.query.shape[-1] ** -0.5

        def add(name: str, output: Tensor, query: Tensor) -> Tensor:
            module = self.placed(name)
            if not isinstance(module, ApartKeyValueModule):
                return output
            pair = zip(self.apart(module), (call.key, call.value), strict=True)
            heads = [self.in_heads(own, theirs) for own, theirs in pair]
            groups = query.shape[1] // len(heads[0])
            key, value = (each.repeat_interleave(groups, 0) for each in heads)
            scores = query @ (scale * key).transpose(-1, -2)
            weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
            attended: Tensor = (weights @ value).transpose(1, 2)
            return output + attended.to(output.dtype)

        return self.run(add, output, call.query)

    def forward(self, call: AttentionCall, names: tuple[str, ...]) -> PrefixedKeyValues:
        """Put prefixes in front of the keys and values of a call.

        With n gates the keys and values are (1 + n) head_dim wide: block i holds the keys and
        values of gate i, block 0 all others.
        """
        prefixes = [self._prefix(self.placed(name), call) for name in names]
        gates = [gate for _, gate in prefixes if gate is not None]
        key, value = (_in_block(t, 0, len(gates)) for t in (call.key, call.value))
        block = 0
        for prefix, gate in prefixes:
            block += gate is not None
            wide = [_in_block(p, block if gate is not None else 0, len(gates)) for p in prefix]
            key, value = torch.cat([wide[0], key], dim=2), torch.cat([wide[1], value], dim=2)
        lengths = {name: p[0].shape[2] for name, (p, _) in zip(names, prefixes, strict=True)}
        return PrefixedKeyValues(key, value, gates, lengths)

    def _prefix(
        self, module: KeyValueModule | GatedKeyValueModule, call: AttentionCall
    ) -> tuple[list[Tensor], Tensor | None]:
        """Compute a prefix's keys and values, (batch, heads, length, head_dim), and its gate."""
        gated = isinstance(module, GatedKeyValueModule)
        prefix, gate = module(call.x) if gated else (module(), None)  # each (length, d)
        if gate is not None and self.parallel and self._has_others(prefix[0], call.key):
            gate = self.parallel.read_by_own(gate)
        pairs = zip(prefix, call[1:3], strict=True)
        parts = [self.in_heads(own, theirs) for own, theirs in pairs]
        return [part.expand(len(call.key), -1, -1, -1) for part in parts], gate

    def with_virtual_tokens(
        self, call: AttentionCall, spans: Sequence[PrefixSpan]
    ) -> AttentionCall:
        """Replace the keys and values of virtual tokens by their prefixes' keys and values."""
        key, value = call.key.clone(), call.value.clone()
        for span in spans:
            prefix, _ = self._prefix(self.placed(span.key), call)
            at = slice(span.start, span.start + span.tokens)
            own = slice(span.first, span.first + span.tokens)
            key[:, :, at], value[:, :, at] = prefix[0][:, :, own], prefix[1][:, :, own]
        return call._replace(key=key, value=value)

    def joined(self, batch: int, x: Tensor | None) -> JoinedPrefixes:
        """Return the prefixes of this call by row, with the keys and values of all heads.

        `x` is the input of the attention module, where a gate reads it.
        """
        keys, plan, _ = self.applied
        x = x if x is None else x.transpose(0, self.batch_dim)
        if plan is None or len(plan.groups) == 1:
            return self._of_group(plan.groups[0] if plan else keys, x)
        copies = plan.copies(batch, self.where())
        inputs = plan.split(x, copies)
        groups = [self._of_group(*each) for each in zip(plan.groups, inputs, strict=True)]
        return _joined_rows(groups, plan, copies)

    def _of_group(self, names: tuple[str, ...], x: Tensor | None) -> JoinedPrefixes:
        """Return the prefixes shared by a group of rows, the last module's first."""
        keys, values = ([self._nothing(size)] for size in next(iter(self.sites.values())).d_kv)
        gates: list[Tensor | None] = [None]
        marks = [0]
        for name in names:
            module, gate = self.placed(name), None
            if isinstance(module, ApartKeyValueModule):
                key, value = self.apart(module)
            elif isinstance(module, GatedKeyValueModule):
                (key, value), gate = module(x)
            else:
                key, value = module()
            keys.insert(0, key)
            values.insert(0, value)
            gates.insert(0, gate)
            marks.insert(0, len(marks) if isinstance(module, ApartKeyValueModule) else 0)
        lengths = [len(key) for key in keys]
        gate = _joined_gates(gates, lengths)
        joined = JoinedPrefixes(torch.cat(keys)[None], torch.cat(values)[None], None, gate)
        if not any(marks):
            return joined
        numbers = zip(keys, marks, strict=True)
        apart = torch.cat([key.new_full((len(key),), n, dtype=torch.long) for key, n in numbers])
        together = bool(self.together(names))
        return joined._replace(apart=apart[None], softmaxes=max(marks), together=together)

    def _nothing(self, size: int) -> Tensor:
        return torch.empty(0, size, device=next(self.parameters()).device)

    def _has_others(self, prefix: Tensor, key: Tensor) -> bool:
        """Return whether other processes compute other heads of a prefix."""
        return prefix.shape[-1] > key.shape[1] * key.shape[3]

    def in_heads(self, prefix: Tensor, key: Tensor) -> Tensor:
        """Split a prefix into the heads that this process computes.

        `prefix`: (..., length, d_kv); `key`: (batch, heads, keys, head_dim).

        Returns:
            (..., heads, length, head_dim), in the dtype of the keys.
        """
        if self.parallel and self._has_others(prefix, key):
            prefix = self.parallel.features(prefix.shape[-1]).own(prefix)
        heads = key.shape[1]
        parts = prefix.view(*prefix.shape[:-1], heads, -1)
        return parts.transpose(-3, -2).to(key.dtype)


def _joined_gates(gates: list[Tensor | None], lengths: list[int]) -> Tensor | None:
    """Return the gate of each token of several prefixes: (batch, queries, length)."""
    some = next((gate for gate in gates if gate is not None), None)
    if some is None:
        return None
    ones = torch.ones_like(some)
    columns = zip(gates, lengths, strict=True)
    return torch.cat([(ones if g is None else g).expand(-1, -1, n) for g, n in columns], dim=-1)


def _joined_rows(groups: list[JoinedPrefixes], plan: BatchPlan, copies: int) -> JoinedPrefixes:
    """Join the prefixes of groups of rows for the whole batch."""
    lengths = {group.key.shape[1] for group in groups}
    longest = max(lengths)
    parts: list[list[Tensor]] = [[], [], [], [], []]
    some = next((group.gate for group in groups if group.gate is not None), None)
    for group, size in zip(groups, plan.sizes, strict=True):
        rows, missing = size * copies, longest - group.key.shape[1]
        own = group.key.new_ones(rows, group.key.shape[1], dtype=torch.bool)
        parts[0].append(F.pad(group.key, (0, 0, missing, 0)).expand(rows, -1, -1))
        parts[1].append(F.pad(group.value, (0, 0, missing, 0)).expand(rows, -1, -1))
        parts[2].append(F.pad(own, (missing, 0)))
        if some is not None:
            gate = group.gate
            gate = some.new_ones(rows, some.shape[1], own.shape[1]) if gate is None else gate
            parts[3].append(F.pad(gate, (missing, 0)))
        apart = own.new_zeros(own.shape, dtype=torch.long)
        apart = apart if group.apart is None else group.apart.expand(rows, -1)
        parts[4].append(F.pad(apart, (missing, 0)))
    key, value, own, apart = (plan.join(parts[number], copies) for number in (0, 1, 2, 4))
    gate = plan.join(parts[3], copies) if some is not None else None
    joined = JoinedPrefixes(key, value, own if len(lengths) > 1 else None, gate)
    if (softmaxes := max(group.softmaxes for group in groups)) == 0:
        return joined
    together = any(group.together for group in groups)
    return joined._replace(apart=apart, softmaxes=softmaxes, together=together)


def _in_block(part: Tensor, block: int, gates: int) -> Tensor:
    """Widen the last dimension d to (1 + gates) d, zero outside one block."""
    width = part.shape[-1]
    return F.pad(part, (block * width, (gates - block) * width)) if gates else part


class RelativeBias:
    """The bias of one attention, and the module that computes it."""

    def __init__(self, source: nn.Module) -> None:
        self.source: Any = source

    def widen(self, bias: Tensor, lengths: Mapping[str, int], slot: Slot) -> Tensor:
        """Extend the bias to keys of prefixes.

        `bias`: (1, heads, queries, keys). Each prefix precedes the earlier ones.

        Returns:
            (1, heads, queries, prefix tokens + keys).
        """
        positions = {name: _positions(slot.placed(name)) for name in lengths}
        total = sum(length for name, length in lengths.items() if positions[name])
        shift = sum(length for name, length in lengths.items() if positions[name] is True)
        wide = self.source.compute_bias(
            bias.shape[2],
            total + bias.shape[3],
            device=bias.device,
            past_seen_tokens=slot.kept(_PAST, 0) + shift,
        ).to(bias.dtype)
        columns, end = [wide[..., total:]], total
        for name, length in lengths.items():
            if positions[name]:
                columns.insert(0, wide[..., end - length : end])
                end -= length
            else:
                columns.insert(0, bias.new_zeros(*bias.shape[:3], length))
        return torch.cat(columns, dim=-1)


def _positions(module: nn.Module) -> Positions:
    assert isinstance(module, PrefixModule)
    return module.positions


def note_past(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the number of tokens in the KV cache: the pre-hook of an attention."""
    slot, cache = host._modules[CHILD], kwargs.get("past_key_values")
    assert isinstance(slot, Slot)
    past = 0 if cache is None else cache.get_seq_length(host.layer_idx)
    # A static cache is updated in place while the attention runs.
    slot.keep(_PAST, past.clone() if isinstance(past, Tensor) else past)


def follow_padding(anatomy: Anatomy, site: Site, slot: KeyValueSlot) -> None:
    """Start the positions of a stack behind padding while a slot has a prefix without positions.

    This is done only where attention rotates by positions, not for learned positions.
    """
    family, model = anatomy.family, anatomy.model
    if slot.follows_padding or family.positions_from_padding or family.positions_follow_mask:
        return
    slot.follows_padding = True
    if not site.role.startswith("attn") or not rotates(model.get_submodule(site.host)):
        return
    path = anatomy.path(anatomy.stacks[site.stack].root)
    root = model.get_submodule(path)
    names = path.split(".") if path else []
    for end in range(len(names)):
        around = model.get_submodule(".".join(names[:end]))
        if "attention_mask" in inspect.signature(around.forward).parameters:
            slot.hook(Mark, around, _AROUND, slot)
            slot.hook(around.register_forward_pre_hook, _keep_mask, with_kwargs=True)
            slot.hook(around.register_forward_hook, _forget_mask, always_call=True)
    slot.hook(Mark, root, _BEHIND, slot)
    slot.hook(root.register_forward_pre_hook, _start_behind_padding, with_kwargs=True)


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(module.forward).parameters
    return dict(zip(names, args, strict=False)) | kwargs


def _first_active(module: nn.Module, mark: str) -> KeyValueSlot | None:
    """Return the first slot of a module's hook that has a prefix without positions."""
    slots: list[KeyValueSlot] = getattr(module, mark, [])
    return next((s for s in slots if any(not _positions(s.placed(k)) for k in s.keys)), None)


def _keep_mask(around: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the caller's mask, which a module converts to a mask over pairs: a forward pre-hook."""
    slot = _first_active(around, _AROUND)
    if slot is not None and slot.kept(_MASK) is None:
        mask = _given(around, args, kwargs).get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            slot.keep(_MASK, mask)


def _forget_mask(around: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Discard the mask of a pass, even of a failed one: a forward hook."""
    slot = _first_active(around, _AROUND)
    if slot is not None:
        slot.take(_MASK)


def _start_behind_padding(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count positions from the first token that is not padding: the pre-hook of a stack.

    Raises:
        SiteError: the stack counts positions itself, with padding.
    """
    slot = _first_active(root, _BEHIND)
    values = _given(root, args, kwargs)
    mask = values.get("attention_mask")
    if slot is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        mask = slot.kept(_MASK)
    if slot is None or not isinstance(mask, Tensor) or torch.compiler.is_compiling():
        return None
    if bool(mask[:, 0].all()):
        return None
    if "position_ids" not in inspect.signature(root.forward).parameters:
        raise SiteError(
            f"a {type(root).__name__} counts padding on the left in the positions of its tokens, "
            "and what they read of a prefix would depend on it",
            expected="texts without padding, or with padding on the right",
            hint='tokenizer.padding_side = "right"',
        )
    source = values.get("input_ids")
    source = values["inputs_embeds"] if source is None else source
    tokens, cache = source.shape[1], values.get("past_key_values")
    past = 0 if cache is None else int(cache.get_seq_length())
    lead = mask.long().cumsum(1).eq(0).sum(1, keepdim=True).to(source.device)
    positions = values.get("position_ids")
    if positions is None:
        positions = torch.arange(past, past + tokens, device=source.device)[None]
    positions = positions.expand(*positions.shape[:-2], len(mask), tokens)
    # Positions that the caller or `generate` has counted behind padding are already correct.
    first = (lead - past).clamp(0, tokens - 1).expand(*positions.shape[:-1], 1)
    counted = positions.gather(-1, first) == first + past
    moved = (positions - lead * counted).clamp(min=0)
    return (), values | {"position_ids": moved}
