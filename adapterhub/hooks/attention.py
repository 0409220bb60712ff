"""Prefix keys and values at an attention module, for each way of computing attention.

A module that calls transformers' attention interface reads the name of its function from
`module.config`. Where a prefix is attached, `module.config` is a view of the backbone's config
(`RoutedConfig`). While a prefix is active, it returns the name `adapterhub_<name>`, a function
registered next to the backbone's own. This function puts the prefix in front of keys and values,
widens the mask (and the bias of relative positions), and calls the backbone's function. The
backbone's config itself is not changed, so a later `set_attn_implementation` takes effect on the
next forward pass, and models may share one config. For a name without a mask function, transformers
does not build a mask and would attend to padding, so the backbone's mask function is registered
under the same name. Nothing enters the KV cache.

A prefix with a gate g_i for each query i, K' = [g_i P_k; K] and V' = [g_i P_v; V], does not need
separate keys for each query: heads are made twice as wide, [q_i, g_i q_i] against [0, P_k; K, 0],
and the output [o, o'] becomes o + g_i o'.

A module that computes attention with torch's functions, in its own forward:

    o = softmax([s q P_kᵀ, S]) [P_v; V]    S: the scores of the tokens, as the module computes them

While a prefix is active, the calls of the module's forward are intercepted. At the first product,
of queries and keys, the scores of the prefix are computed too. They follow the scores of the tokens
through scales, shapes and dtypes, and are unchanged where a mask or a bias is added. The softmax is
taken over both, and the last product adds W_p P_v, the weights of the prefix times its values.
Separate keys have a softmax each. A gate g_i of a prefix scales its keys and values for query i: s
g_i q P_kᵀ, g_i W_p P_v. With a bias that grows with the position of the key (ALiBi), a prefix
stands where the first visible key does.

Such a module returns the attention weights of the tokens only: their sum is less than one.
torch.compile breaks its graph in such a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.projections import attends
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import AttachError, SiteError
from adapterhub.hooks.composition import BatchPlan, RowOrder, TokenPlan
from adapterhub.hooks.keyvalue import (
    AttentionCall,
    JoinedPrefixes,
    KeyValueSlot,
    PrefixedKeyValues,
    RelativeBias,
    note_past,
)
from adapterhub.hooks.prompt import as_mask
from adapterhub.hooks.rows import StackedColumn, StackedRows
from adapterhub.hooks.slot import SUBLAYER_INPUT, first_input, put_slot, read_sublayer_input
from adapterhub.methods.common.site_module import (
    ApartKeyValueModule,
    GatedKeyValueModule,
    PrefixModule,
    SiteModule,
)

# Names of torch's functions and methods, without the underscores of operators and in-place
# variants.
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm"})
_SCALES = frozenset({"mul", "rmul", "imul", "multiply", "div", "truediv", "itruediv", "divide"})
_SHIFTS = frozenset({"add", "radd", "iadd", "sub", "isub", "subtract"})
_MASKS = frozenset({"masked_fill", "where", "max", "maximum", "clamp"})
_FORMS = frozenset(
    {"view", "reshape", "to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "clone"}
)
_DROPOUT = "dropout"
_FUSED = "scaled_dot_product_attention"
_WATCH = "products"
_MASKED = -3e4  # scores below are masked, in fp16 too
Arguments = tuple[Any, ...]


class Followed(NamedTuple):
    """Scores or weights of the tokens, with the scores or weights of the prefix.

    Attributes:
        tokens: (..., queries, keys).
        prefix: (..., queries, length), or what broadcasts to it.
        weighed: whether the softmax has been taken.
        bias: the bias that grows with the position of the key and was added to the scores (ALiBi).
    """

    tokens: Tensor
    prefix: Tensor
    weighed: bool = False
    bias: Tensor | None = None


class WatchedProducts(TorchFunctionMode):
    """Add prefixes to the attention that a module computes while this mode is active.

    Args:
        prefixes: computes the prefixes of the rows.
        batch: rows of the module's input.
        where: the id of the site, for messages.
    """

    def __init__(self, prefixes: Callable[[], JoinedPrefixes], batch: int, where: str) -> None:
        super().__init__()
        self.prefixes, self.batch, self.where = prefixes, batch, where
        self.joined: JoinedPrefixes | None = None
        self.followed: list[Followed] = []
        self.scaled: tuple[Any, str, Any] = (None, "", 1.0)  # the last tensor times a number
        self.done = False

    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and apply the corresponding step to the prefix."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if self.done:
            if name == "softmax" and next(chain(args, kwargs.values())).ndim > 2:
                self._refuse("computes more than one softmax")
            return func(*args, **kwargs)
        if not self.followed:
            return self._before(func, name, args, kwargs)
        followed = self._of(chain(args, kwargs.values()))
        if followed is None:
            return func(*args, **kwargs)
        if followed.weighed and name in _PRODUCTS:
            self.done = True
            out = func(*args, **kwargs)
            return out + self._values(followed.prefix, args[1]).to(out.dtype)
        return self._follow(followed, func, name, args, kwargs)

    def check(self) -> None:
        """Refuse an attention of another form, where the prefix had no effect.

        Raises:
            AttachError: the module does not compute two products with a softmax between them.
        """
        if not self.done:
            self._refuse("computes no softmax of queries times keys")

    def _joined(self) -> JoinedPrefixes:
        """Return the prefixes of the rows, computed once."""
        if self.joined is None:
            self.joined = self.prefixes()
        return self.joined

    def _of(self, values: Any) -> Followed | None:
        """Return the entry that follows one of the values."""
        return next((f for v in values for f in self.followed if f.tokens is v), None)

    def _before(self, func: Any, name: str, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        """Call a function before the scores are computed."""
        if name == _FUSED:
            return self._fused(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if name in _PRODUCTS:
            named = (kwargs.get(n) for n in ("batch1", "batch2", "mat2", "other"))
            *added, query, keys = [each for each in (*args, *named) if each is not None]
            if query.ndim > 2 and keys.ndim > 2:
                self._score(out, query, keys, kwargs.get("alpha", 1.0))
                bias = added[0] if added and _is_alibi(added[0], out) else None
                bias = bias if bias is None else bias * kwargs.get("beta", 1.0)
                self.followed[0] = self.followed[0]._replace(bias=bias)
        elif name in _SCALES and len(args) > 1 and _is_number(args[1]):
            self.scaled = out, name, args[1]
        return out

    def _score(self, scores: Tensor, query: Tensor, keys: Tensor, scale: float) -> None:
        """Compute the scores of the prefix in the same way as the tokens' scores, scale x q kᵀ."""
        joined = self._joined()
        heads = self._in_heads(joined.key, keys.shape, keys.shape[-2]).to(query.dtype)
        own = query @ heads.transpose(-1, -2)
        own = own if joined.gate is None else own * self._by_row(joined.gate, own)
        scaled, name, number = self.scaled
        own = _changed(own, name, number) if scaled is keys else own  # q (k / s), not (q / s) k
        self.followed = [Followed(scores, own if scale == 1 else own * scale)]

    def _in_heads(self, prefix: Tensor, like: torch.Size, size: int) -> Tensor:
        """Split a prefix into heads of a size, in the layout of a product's operand.

        `prefix`: (batch or 1, length, d); `like`: (batch, heads, ...) or (batch x heads, ...).

        Returns:
            (batch or 1, heads, length, size), or (batch x heads, length, size).
        """
        rows, odd = divmod(like[0], self.batch)
        heads = like[1] if len(like) == 4 else rows
        own, rest = divmod(prefix.shape[-1], size)
        fits = not odd and own and not rest and heads % own == 0 and len(like) < 5
        if not fits or (len(like) == 4 and rows != 1):
            self._refuse(f"multiplies a tensor of {tuple(like)} for {self.batch} rows")
        parts = prefix.view(*prefix.shape[:-1], own, size).transpose(1, 2)
        parts = parts.repeat_interleave(heads // own, 1)
        if len(like) == 3:
            return parts.expand(self.batch, -1, -1, -1).flatten(0, 1)
        return parts

    def _follow(
        self, followed: Followed, func: Any, name: str, args: Arguments, kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function of scores or weights of the tokens."""
        if name == "softmax" and not followed.weighed:
            return self._softmax(followed, func, args, kwargs)
        tokens, own, _, bias = followed
        before, dtype = tokens.shape, tokens.dtype
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        if out.numel() != before.numel() or out.shape[-2:] != before[-2:]:
            return out
        others = [v for v in chain(args, kwargs.values()) if v is not tokens]
        if name in _SCALES | _SHIFTS:
            if _is_same_for_keys(others[0], before[-1]):  # other terms and factors are masks
                own = _changed(own, name, others[0])
                bias = _changed(bias, name, others[0]) if name in _SCALES else bias
            elif name in _SHIFTS and _is_alibi(others[0], tokens):
                bias = -others[0] if "sub" in name else others[0]
        elif name == _DROPOUT:
            own = func(own, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        elif name in _FORMS:
            own = own.expand(*before[:-1], -1).reshape(*out.shape[:-1], -1)
            bias = bias if bias is None else bias.expand(before).reshape(out.shape)
        elif name not in _MASKS:
            self._refuse(f"changes its scores by {name}")
        own = own if out.dtype == dtype else own.to(out.dtype)
        kept = [f for f in self.followed if f.tokens is not out]  # changed in place
        self.followed = [*kept, Followed(out, own, followed.weighed, bias)]
        return out

    def _softmax(
        self, followed: Followed, func: Any, args: Arguments, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Take the softmax over the prefix and the tokens; return the weights of the tokens."""
        scores, own, _, bias = followed
        *_, shown, gate, apart, _, together = self._joined()
        named = {key: value for key, value in kwargs.items() if key != "input"}
        if (*args[1:2], *(named.get(n) for n in ("dim",)), None)[0] not in (-1, scores.ndim - 1):
            self._refuse("takes its softmax over another dimension than the keys")
        own = own.to(scores.dtype).expand(*scores.shape[:-1], -1)
        if bias is not None:
            own = own + _at_first_visible(bias, scores)
        if shown is not None:
            own = own.masked_fill(~self._by_row(shown[:, None], own), float("-inf"))
        all_scores, length = own, own.shape[-1]
        if not together:  # bit-identical to the tokens alone
            rest: Tensor = func(scores, *args[1:], **named)
            own = torch.zeros_like(own, dtype=rest.dtype)
        else:
            if apart is not None:
                rows = self._by_row(apart[:, None].expand(self.batch, -1, -1), own)
                own = own.masked_fill(rows > 0, -torch.inf)
            weights: Tensor = func(torch.cat([own, scores], dim=-1), *args[1:], **named)
            own, rest = weights[..., :length], weights[..., length:].contiguous()
        if gate is not None:
            own = own * self._by_row(gate, own)
        if apart is not None:
            own = own + self._weights_apart(all_scores, lambda s: func(s, *args[1:], **named))
        self.followed = [Followed(rest, own, weighed=True)]
        return rest

    def _by_row(self, rows: Tensor, like: Tensor) -> Tensor:
        """Repeat (batch, queries or 1, length) for the heads of (..., queries, length)."""
        rows = rows.to(like.dtype) if rows.is_floating_point() else rows
        if like.ndim == 4:
            return rows[:, None]
        return rows.repeat_interleave(len(like) // self.batch, 0)

    def _values(self, own: Tensor, values: Tensor) -> Tensor:
        """Compute W_p P_v."""
        heads = self._in_heads(self._joined().value, values.shape, values.shape[-1])
        return torch.matmul(own.to(values.dtype), heads.to(values.dtype))

    def _fused(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend over prefixes and keys with torch's fused function, unless there are gates."""
        joined = self._joined()
        if not joined.together:
            self.done = True
            options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
            options |= {"enable_gqa": True} if enable_gqa else {}
            out = func(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)
            added: Tensor = out + self._apart(query, scale).to(out.dtype)
            return added
        if is_causal:
            pairs = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
            attn_mask = pairs.tril()
        if joined.gate is not None or joined.apart is not None:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            with self:
                return _written_out(query * scale, key, value, attn_mask, dropout_p)
        self.done = True
        mask = _widened(attn_mask, joined, key)
        parts = [
            torch.cat([heads.expand(*own.shape[:-2], -1, -1).to(own.dtype), own], dim=-2)
            for own, prefix in ((key, joined.key), (value, joined.value))
            for heads in (self._in_heads(prefix, own.shape, own.shape[-1]),)
        ]
        options = {"dropout_p": dropout_p, "scale": scale}
        options |= {"enable_gqa": True} if enable_gqa else {}
        attended: Tensor = func(query, *parts, attn_mask=mask, **options)
        return attended

    def _apart(self, query: Tensor, scale: float | None) -> Tensor:
        """Attend with queries, (batch, heads, queries, d), to the separate keys."""
        joined = self._joined()
        pair = (joined.key, joined.value)
        keys, values = (self._in_heads(p, query.shape, query.shape[-1]).to(query) for p in pair)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query * scale) @ keys.transpose(-1, -2)
        weights = self._weights_apart(scores, partial(torch.softmax, dim=-1))
        return weights @ values

    def _weights_apart(self, scores: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the weights of keys with a separate softmax; 0 for others.

        scores: (..., queries, length).
        """
        *_, apart, softmaxes, _ = self._joined()
        assert apart is not None
        numbers = self._by_row(apart[:, None].expand(self.batch, -1, -1), scores)
        masked = (scores.masked_fill(numbers != n, -torch.inf) for n in range(1, softmaxes + 1))
        return sum(softmax(each).nan_to_num(0.0) for each in masked)  # type: ignore[return-value]

    def _refuse(self, what: str) -> NoReturn:
        raise AttachError(
            f"a prefix does not fit the attention at {self.where}, which {what}",
            expected="attention as softmax(q kᵀ) v, by matmul, bmm or scaled_dot_product_attention",
            hint="adapt other sites: lora, pfeiffer and ia3 need no keys and values",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_same_for_keys(value: Any, keys: int) -> bool:
    """Return whether a factor or a term is the same for all keys of a query."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return True
    return value.shape[-1] == 1 and (keys > 1 or (value.numel() == 1 and value.ndim == 1))


def _changed(value: Any, name: str, other: Any) -> Any:
    """Apply a binary operation by name to a tensor, not in place; None stays None."""
    if value is None:
        return None
    if name in _SHIFTS:
        return value - other if "sub" in name else value + other
    return value / other if "div" in name else value * other


def _is_alibi(value: Any, scores: Tensor) -> bool:
    """Return whether a term differs by head and by key, but not by query."""
    shaped = isinstance(value, Tensor) and value.ndim > 2 and value.shape[-2] == 1
    return shaped and value.shape[-3] > 1 and value.shape[-1] == scores.shape[-1] > 1


def _at_first_visible(bias: Tensor, scores: Tensor) -> Tensor:
    """Return the bias of the first key that each query sees: (..., queries, 1)."""
    first = (scores > _MASKED).to(torch.uint8).argmax(-1, keepdim=True)
    return bias.expand_as(scores).gather(-1, first).to(scores.dtype)


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    groups = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(F.dropout(torch.softmax(scores, dim=-1), dropout), value)


def _widened(mask: Tensor | None, joined: JoinedPrefixes, key: Tensor) -> Tensor | None:
    """Extend a mask to prefixes."""
    length, own = joined.key.shape[1], joined.own
    if own is None:
        visible = True if mask is not None and mask.dtype == torch.bool else 0.0
        return None if mask is None else F.pad(mask, (length, 0), value=visible)
    if mask is None:
        mask = key.new_ones(key.shape[-2], dtype=torch.bool)
    mask = mask[(None,) * (4 - mask.ndim)]
    shown = own[:, None, None]
    shown = shown if mask.dtype == torch.bool else shown.to(mask.dtype).log()
    rows = [max(pair) for pair in zip(shown.shape[:-1], mask.shape[:-1], strict=True)]
    return torch.cat([shown.expand(*rows, -1), mask.expand(*rows, -1)], dim=-1)


def watch_products(host: nn.Module, slot: KeyValueSlot, batch_dim: int) -> None:
    """Make an attention module compute with the prefixes of its slot.

    `batch_dim` is the dimension of the batch in the module's input.
    """
    slot.batch_dim = batch_dim
    slot.hook(host.register_forward_pre_hook, _begin, with_kwargs=True)
    slot.hook(host.register_forward_hook, _end, always_call=True)


def _begin(host: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
    """Intercept the calls of an attention module's forward: its forward pre-hook."""
    slot = host._modules[CHILD]
    if not isinstance(slot, KeyValueSlot) or not slot.keys:
        return
    batch = first_input(args, kwargs).shape[slot.batch_dim]
    watch = WatchedProducts(
        lambda: slot.joined(batch, slot.take(SUBLAYER_INPUT)), batch, slot.where()
    )
    slot.keep(_WATCH, watch)
    watch.__enter__()  # type: ignore[no-untyped-call]


def _end(host: nn.Module, args: Arguments, output: Any) -> None:
    """Stop intercepting, even after an error: the forward hook."""
    slot = host._modules.get(CHILD)
    watch = slot.take(_WATCH) if isinstance(slot, KeyValueSlot) else None
    if watch is not None:
        watch.__exit__(None, None, None)
        if output is not None:
            watch.check()


SUPPORTED = ("eager", "sdpa")
_PREFIX = "adapterhub_"
_CONFIG, _SLOT = "_adapterhub_config", "_adapterhub_slot"


def keyvalue_slot(
    model: nn.Module, site: Site, module: SiteModule, batch_dim: int = 0
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
            read_weight(*each)  # repeated in each forward pass
        slot.projections = read
    if isinstance(module, GatedKeyValueModule):
        read_sublayer_input(model, slot, site.input_host)
    positions = isinstance(module, PrefixModule) and module.positions
    if positions and site.bias and slot.bias is None:
        slot.bias = RelativeBias(model.get_submodule(site.bias))
        slot.hook(host.register_forward_pre_hook, note_past, with_kwargs=True)
    return slot


def check_attention(model: nn.Module, sites: Iterable[Site]) -> None:
    """Refuse an attention implementation that prefixes do not support.

    Raises:
        SiteError: it is neither eager nor sdpa.
    """
    modules: Iterable[Any] = (model.get_submodule(site.host) for site in sites)
    hosts = [module for module in modules if attends(module) == "interface"]
    refuse_unsupported(host.config._attn_implementation for host in hosts)


class RoutedConfig:
    """A view of a config for one attention module that names the function to add the prefix.

    All other attributes are read from and written to the config.
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
        # A copy under construction does not have a config yet.
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
        attention_mask: Tensor | None,  # has this name in some calls
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
    composition, plan = slot.composition, slot.plan
    if isinstance(plan, TokenPlan):
        return slot.with_virtual_tokens(call, plan.spans).run(attend, module)
    if plan is None or composition is not None:
        return _attend(attend, module, slot, composition, call)
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
        options["scaling"] = query.shape[-1] ** -0.5  # not the scale of the wider query
    gates = [gate.to(query.dtype) for gate in joined.gates]
    query = torch.cat([query, *(gate[:, None] * query for gate in gates)], dim=-1)
    output, weights = call._replace(query=query).run(attend, module)
    return _sum_blocks(output, gates), weights


def _with_explicit_mask(module: nn.Module, call: AttentionCall) -> AttentionCall:
    """Make a causal mask explicit where transformers relies on torch's `is_causal`.

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
    """Extend the mask of a call to prefixes; `own`: (batch, length), false at padding."""
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
    # As wide as the longest prefix; shorter ones have zeros in front.
    keys = max(w.shape[-1] for w in weights)
    padded = [F.pad(w, (keys - w.shape[-1], 0)) for w in weights]
    return order.join(outputs, copies), order.join(padded, copies)


for _name in SUPPORTED:
    AttentionInterface.register(_PREFIX + _name, _attention_with_prefix(_name))
    AttentionMaskInterface.register(_PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])
