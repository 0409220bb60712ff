"""Prefix tuning: learned keys and values in front of the keys and values of every attention.

    attention(Q, [P_k; K], [P_v; V])                                             (section 4.1)

    P_k, P_v: (length, d_kv), N(0, 0.02²)    K, V: (tokens, d_kv)
    d_kv: key-value heads times head size; in latent attention, K and V differ in size

The prefix has no positions, is never masked, and is not in the KV cache. With `positions: true`
tokens count their positions from after the prefix, as in implementations that cache it. For
relative positions, `positions: keys` does so only for keys, as in other implementations. With
rotary positions and a prefix without positions, the positions of tokens start behind padding on the
left, as `generate` counts them; a model that counts them itself (RoFormer) refuses that padding.
With `reparametrize` a network computes the prefix during training:

    [P_k; P_v] = W_site tanh(W P' + b) + b_site                                  (section 4.3)

    P': (length, d_kv)    W: (middle, d_kv)    W_site: (2 d_kv, middle)

P', W and b are shared by the layers; each site has its own W_site and b_site. Adapter files contain
a plain prefix, without the network.

With `text`, P_k and P_v are the keys and values of the bare decoder for the first `length` tokens
of a text. If also `positions: true`, the initial outputs of the adapted decoder equal its outputs
behind this text. The first `frozen` tokens do not train.

Parameters: 2 (length - frozen) d_kv per site. With `reparametrize`, during training: length d_kv +
middle (d_kv + 1) for each kind of attention (self, cross) in each stack, and 2 d_kv (middle + 1)
per site.

Li & Liang 2021, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", section 4,
https://arxiv.org/abs/2101.00190.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.backbone import position_module
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods.common.base import Layers, Method, Placement, register_method
from adapterhub.methods.common.ops import RowStack, padded
from adapterhub.methods.common.projections import select_sites
from adapterhub.methods.common.site_module import (
    EmbeddingModule,
    KeyValueModule,
    Positions,
    SharedModule,
    SiteModule,
    init_is_skipped,
)
from adapterhub.methods.common.texts import keys_and_values


def _stack_prefixes(modules: Sequence[SiteModule | None]) -> RowStack:
    """Stack prefixes; a shorter one is padded in front."""
    own = [None if module is None else module() for module in modules]
    empty = next(prefix for prefix in own if prefix is not None)[:, :0]
    prefixes = [empty if prefix is None else prefix for prefix in own]
    if len({prefix.shape[1] for prefix in prefixes}) == 1:
        return RowStack((torch.stack(prefixes).transpose(1, 2),), _prefixes)
    stacked = padded([prefix.transpose(0, 1).flip(0) for prefix in prefixes]).flip(1)
    ones = [prefix.new_ones(prefix.shape[1]) for prefix in prefixes]
    return RowStack((stacked, padded(ones).flip(1)), _prefixes)


def _prefixes(stacked: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return keys and values (2, prefixes, longest, d_kv), and a mask if there is padding."""
    return stacked.permute(2, 0, 1, 3), None if own is None else own > 0


class PrefixKeyValues(KeyValueModule):
    """Returns P_k and P_v, stacked."""

    stack = staticmethod(_stack_prefixes)

    def __init__(self, initial: Tensor, positions: Positions = False) -> None:
        super().__init__()
        self.prefix = nn.Parameter(initial)
        self.positions = positions

    def forward(self) -> Tensor:
        """Return keys and values: (2, length, d_kv)."""
        return self.prefix


class PartlyFrozenKeyValues(KeyValueModule):
    """Returns P_k and P_v, stacked, whose first tokens do not train."""

    stack = staticmethod(_stack_prefixes)

    first: Tensor

    def __init__(self, initial: Tensor, frozen: int, positions: Positions = False) -> None:
        super().__init__()
        self.register_buffer("first", initial[:, :frozen].clone())
        self.prefix = nn.Parameter(initial[:, frozen:].clone())
        self.positions = positions

    def forward(self) -> Tensor:
        """Return keys and values: (2, length, d_kv)."""
        return torch.cat([self.first, self.prefix], dim=1)


class UnequalKeyValues(KeyValueModule):
    """Returns P_k and P_v, of two sizes."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Positions = False) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(keys), nn.Parameter(values)
        self.positions = positions

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return keys (length, d_k) and values (length, d_v)."""
        return self.keys, self.values


class SharedTrunk(SharedModule):
    """The shared part of a reparametrized prefix: tanh(W P' + b)."""

    def __init__(self, length: int, width: int, middle: int) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(length, width))
        self.inner = nn.Linear(width, middle)

    def forward(self) -> Tensor:
        """Compute the hidden states: (length, middle)."""
        return torch.tanh(self.inner(self.prefix))


class ReparametrizedKeyValues(KeyValueModule):
    """Compute P_k and P_v, stacked, with the network."""

    def __init__(
        self,
        trunk: SharedTrunk,
        widths: tuple[int, int],
        owns_trunk: bool,
        positions: Positions = False,
    ) -> None:
        super().__init__()
        self.positions, self.widths = positions, widths
        # A child module only at its first site, so each of its tensors has one name.
        self.trunk = trunk if owns_trunk else None
        self.shared = [trunk]
        self.outer = nn.Linear(trunk.inner.out_features, sum(widths))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute keys (length, d_k) and values (length, d_v)."""
        keys, values = self.outer(self.shared[0]()).split(self.widths, dim=-1)
        return keys, values

    def inference_form(self) -> PrefixKeyValues | UnequalKeyValues:
        """Return the current prefix, without the network."""
        with torch.no_grad():
            keys, values = self()
            return _plain(keys, values, self.positions)


def _plain(
    keys: Tensor, values: Tensor, positions: Positions
) -> PrefixKeyValues | UnequalKeyValues:
    """Return keys and values as a module: in one tensor, if they have one size."""
    if keys.shape == values.shape:
        return PrefixKeyValues(torch.stack([keys, values]), positions)
    return UnequalKeyValues(keys.clone(), values.clone(), positions)


class SkippedPositions(EmbeddingModule):
    """Adds no virtual tokens, but makes the caller's tokens skip positions."""

    empty: Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.skipped_positions = count
        self.register_buffer("empty", torch.zeros(0, width), persistent=False)

    def forward(self) -> Tensor:
        """Return no tokens: (0, d)."""
        return self.empty


@register_method
@dataclass(frozen=True)
class Prefix(Method):
    """Learned keys and values in front of every attention."""

    sized_by = "length"
    name = "prefix"
    paper = "Li & Liang 2021, https://arxiv.org/abs/2101.00190"
    summary = "learned keys and values in front of every attention"
    start = "paper"
    # Trained models have keys and values of sizes around 1; AdamW takes as many steps to get there
    # as fit the rate (docs/results.md, "Learning rates").
    learning_rate = 3e-2
    training_options = ("text", "frozen")

    length: int = option(30, "prefix length in tokens", least=1)
    reparametrize: bool = option(False, "compute the prefix by a network during training")
    middle: int = option(512, "hidden width of that network", least=1)
    positions: Positions = option(
        False, "count positions from after the prefix; keys: only relative positions of keys"
    )
    sites: tuple[str, ...] = option(("attn.kv", "cross.kv"), "attentions to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")
    text: str = option("", "text to start from, in decoders: its keys and values", omitted=True)
    frozen: int = option(
        0, "tokens at the start of the prefix that do not train", least=0, omitted=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reparametrize and (self.text or self.frozen):
            raise ConfigError(
                "a network computes the whole prefix: it starts from no text, and all of it trains",
                expected="either reparametrize, or text and frozen",
            )
        if self.frozen >= self.length:
            raise ConfigError(
                f"frozen={self.frozen} of length={self.length} tokens: none is left to train",
                expected="fewer frozen tokens than the length",
            )

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one prefix per selected attention.

        Raises:
            ConfigError: `text` has fewer tokens than `length`, or the tokenizer is missing.
            SiteError: `positions` is set for a stack that does not support it, or `text` for one
                without a cache.
        """
        trunks: dict[tuple[str, str], SharedTrunk] = {}
        sites = select_sites(self, anatomy, "keyvalue")
        if self.positions:
            yield from self._skipped_positions(anatomy, sites)
        begun = {}
        if self.text and not init_is_skipped():
            begun = keys_and_values(anatomy, sites, self.text, self.length)
        for site in sites:
            positions = self.positions if site.bias else False
            if not self.reparametrize:
                pair = begun.get(site) or _drawn(self.length, site)
                yield Placement(site, self._module(pair, site, positions))
                continue
            owns_trunk = _trunk_key(site) not in trunks
            if owns_trunk:
                trunks[_trunk_key(site)] = SharedTrunk(self.length, site.d_out, self.middle)
            trunk = trunks[_trunk_key(site)]
            module = ReparametrizedKeyValues(trunk, site.d_kv, owns_trunk, positions)
            yield Placement(site, module)

    def _module(
        self, pair: tuple[Tensor, Tensor], site: Site, positions: Positions
    ) -> KeyValueModule:
        """Return keys and values as a module.

        Raises:
            SiteError: some tokens are frozen, and keys and values differ in size.
        """
        if not self.frozen:
            return _plain(*pair, positions)
        if pair[0].shape != pair[1].shape:
            raise SiteError(
                f"frozen={self.frozen}: keys and values at {site.id} differ in size",
                expected="attention modules where they have the same size",
                hint="frozen=0",
            )
        return PartlyFrozenKeyValues(torch.stack(pair), self.frozen, positions)

    def _skipped_positions(self, anatomy: Anatomy, sites: Iterable[Site]) -> Iterator[Placement]:
        """Yield a module for each stack with absolute positions."""
        relative = {site.stack for site in anatomy.sites.values() if site.bias}
        for stack in sorted({site.stack for site in sites} - relative):
            if self.positions == "keys":
                raise SiteError(
                    f"keys have no separate positions in a {anatomy.backbone.model_type} {stack}",
                    expected="attention with a relative position bias, such as T5's",
                    hint="prefix(positions=true)",
                )
            embed = anatomy.sites.get(f"{stack}.embed")
            root = anatomy.model.get_submodule(embed.host) if embed else None
            if embed is None or root is None or position_module(root) is None:
                raise SiteError(
                    f"the positions of a {anatomy.backbone.model_type} {stack} cannot be set",
                    expected="a stack with a position_ids argument, or whose position embedding "
                    "has one",
                    hint="prefix(positions=false)",
                )
            yield Placement(embed, SkippedPositions(self.length, embed.d_out))

    def count(self, anatomy: Anatomy) -> int:
        """Sum (length - frozen) (d_k + d_v) over the sites, or count the network."""
        sites = select_sites(self, anatomy, "keyvalue")
        if not self.reparametrize:
            return sum((self.length - self.frozen) * sum(site.d_kv) for site in sites)
        widths = {_trunk_key(site): site.d_out for site in reversed(sites)}.values()
        shared = sum(self.length * d + self.middle * (d + 1) for d in widths)
        return shared + sum(sum(site.d_kv) * (self.middle + 1) for site in sites)

    def rate(self, name: str) -> float:
        """Return a thirtieth for the network of a reparametrized prefix."""
        return 1 / 30 if self.reparametrize else 1.0

    def inference_form(self) -> Prefix:
        """Return prefix tuning without a network, and without the text that it started from."""
        return dataclasses.replace(self, reparametrize=False, text="")


def _drawn(length: int, site: Site) -> tuple[Tensor, Tensor]:
    """Draw keys and values from N(0, 0.02²)."""
    draw = torch.empty if init_is_skipped() else torch.randn
    if site.d_values is None:
        keys, values = 0.02 * draw(2, length, site.d_out)
    else:
        keys, values = (0.02 * draw(length, width) for width in site.d_kv)
    return keys, values


def _trunk_key(site: Site) -> tuple[str, str]:
    return site.stack, site.role
