"""Anatomy: the canonical map of a backbone, from site ids to the modules that host them.

A **site** is a named place of a backbone: `encoder.3.attn.q` is the query projection of the fourth
encoder layer, whatever its module is called inside transformers. Roles of a layer:

    attn.q attn.k attn.v attn.o    the projections of self-attention (or fused: attn.qkv)
    cross.q cross.k cross.v cross.o    those of cross-attention, in encoder-decoders
    ffn.gate ffn.up ffn.down       those of the feed-forward network (or fused: ffn.gate_up)
    attn.kv cross.kv               where keys and values enter the attention function
    attn cross ffn                 a sublayer as a whole: from its input x to its output y,
                                   before the residual connection is added
    attn.norm cross.norm ffn.norm  the normalization that belongs to a sublayer
    attn.postnorm ffn.postnorm     the one on a sublayer's output, where there is one before the
                                   residual connection

and of a stack: `embed`, where token embeddings enter it, and `mix`, the output of its last layer,
for what reads the outputs of all layers. Where an architecture differs from another is data: one
`Family` row in families/.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.errors import SiteError, did_you_mean

Kind = Literal["linear", "sublayer", "keyvalue", "norm", "embed", "mix"]
Layout = Literal["blocks", "heads"]

SUBLAYERS = ("attn", "cross", "ffn")
STREAM = ("residual", "block")  # what of the residual stream a module may read, see Stream
NORMS = ("norm", "postnorm")
PROJECTIONS = tuple(f"{s}.{p}" for s in ("attn", "cross") for p in ("q", "k", "v", "qkv", "o"))
ROLES = (
    *PROJECTIONS,
    "ffn.gate",
    "ffn.up",
    "ffn.down",
    "ffn.gate_up",
    *(f"{s}.kv" for s in ("attn", "cross")),
    *SUBLAYERS,
    *(f"{s}.{norm}" for s in SUBLAYERS for norm in NORMS),
    "embed",
    "mix",
)


@dataclass(frozen=True)
class Stack:
    """One stack of layers: where it is, and where the sites of one of its layers are.

    `root` is the module whose forward takes `input_ids` (from the base model, "" is the base model
    itself); where it takes something else, there is no `embed`. `layers` is the module list; in
    `a.*.b` each element of `a` has a list `b`, and layers are counted through. `sites` maps a role
    to a path inside one layer (`a|b`: the first of them that is there). A sublayer goes from the
    input of its first projection to the output of its last one; where that does not hold it has a
    path of its own: `a`, or `a>b` from the input of `a` to the output of `b`. `fused` tells how a
    fused projection's output holds its parts: in `blocks` (all of q, then all of k, ...), as when
    it is not named, or per `heads` (q, k and v of the first key-value head, then of the next).
    `body` is the module inside the root whose output the root pools, if it does. `bias` is the path
    inside a layer of its table of relative positions, a child of the attention that computes their
    bias; a layer that has none takes that of the last one before.
    """

    name: Literal["encoder", "decoder"]
    layers: str
    sites: Mapping[str, str]
    root: str = ""
    body: str | None = None
    fused: Mapping[str, Layout] = field(default_factory=dict)
    norms: str | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Family:
    """One architecture family: the row that tells where T5 differs from BERT.

    `below` names the modules under the first layer (embeddings). `positions_from_padding` is set
    where the backbone counts positions from the padding index, as RoBERTa does. `constants` names
    parameters that are tables of a formula (sinusoidal positions): nothing trains them.
    `batch_dim` is the dimension of the batch in hidden states. `positions_follow_mask` is set where
    positions are counted over the tokens that the attention mask shows.
    """

    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    below: tuple[str, ...]
    positions_from_padding: bool = False
    constants: tuple[str, ...] = ()
    batch_dim: int = 0
    positions_follow_mask: bool = False


class FeatureSlice(NamedTuple):
    """The features of a fused projection's output that one site owns: `start` to `stop` of every
    run of `period` features.

    With the whole output as the period that is one block; with `3 head_dim` it is the q, k or v of
    each head in turn.
    """

    start: int
    stop: int
    period: int

    def read(self, y: Tensor) -> Tensor:
        """y: (..., d_fused) -> the part: (..., d_out)."""
        return self._runs(y)[..., self.start : self.stop].flatten(-2)

    def _runs(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:-1], y.shape[-1] // self.period, self.period)

    def write(self, y: Tensor, piece: Tensor) -> Tensor:
        """y with the part replaced. y: (..., d_fused), piece: (..., d_out) -> (..., d_fused)."""
        runs = self._runs(y)
        piece = piece.view(*runs.shape[:-1], self.stop - self.start)
        pieces = (runs[..., : self.start], piece, runs[..., self.stop :])
        return torch.cat([p for p in pieces if p.shape[-1]], dim=-1).flatten(-2)


class Stream(NamedTuple):
    """How a sublayer meets the residual stream r (`residual`): the layer goes on with
    norm(r + postnorm(y)) (`block`).

    `tap` is the path of the module whose input is r; `norm` and `postnorm` those of the
    normalization of the sum and of the sublayer's output y, where there is one.
    """

    tap: str | None
    norm: str | None
    postnorm: str | None


@dataclass(frozen=True)
class Site:
    """A named place of one backbone.

    `host` is the path of the module whose output the site changes; `tap` that of the module whose
    input is the site's x, where it is not the host. `part` names the output features of a fused
    host that the site owns. `stream` is how a sublayer meets the residual stream, where that is
    known. `bias` is the path of the attention that computes the bias of relative positions here,
    where there is one. `d_in`, `d_out` are the sizes of x and y in features.
    """

    id: str
    stack: str
    layer: int | None
    role: str
    kind: Kind
    host: str
    d_in: int
    d_out: int
    tap: str | None = None
    part: FeatureSlice | None = None
    stream: Stream | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Anatomy:
    """The sites of one model, and the questions that methods ask about it.

    `layers` holds the paths of each stack's layers, from the model.
    """

    model: PreTrainedModel
    family: Family
    base_path: str
    sites: Mapping[str, Site] = field(repr=False)
    layers: Mapping[str, tuple[str, ...]] = field(repr=False)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that this model has (a decoder-only BART has no encoder)."""
        return {stack.name: stack for stack in self.family.stacks if stack.name in self.layers}

    def path(self, *parts: str) -> str:
        """A module path from the model, for parts that start at the base model."""
        return join(self.base_path, *parts)

    def depth(self, stack: str) -> int:
        """The number of layers of a stack."""
        return len(self.layers[stack])

    def select(
        self,
        patterns: Iterable[str],
        layers: str | int | tuple[int, ...] = "all",
        strict: bool = True,
    ) -> tuple[Site, ...]:
        """The sites that any pattern names, in the order of the backbone.

        A pattern is a role (`attn.q`), a role of one stack (`decoder.attn.q`), a site id, or any of
        these with wildcards (`encoder.*.ffn.*`). `layers` is `all`, `top 4`, `first 2`, `0..3`, a
        number or several. With `strict`, each pattern must name a site; without, only one of them
        must.

        Raises:
            SiteError: a pattern that names nothing (all of them in one error), or no site at all.
        """
        patterns = tuple(patterns)
        matched = {p: [s for s in self.sites.values() if matches(p, s)] for p in patterns}
        wrong = [p for p, sites in matched.items() if not sites and (strict or not known(p))]
        wanted = {s.id for sites in matched.values() for s in sites}
        chosen = tuple(
            s for s in self.sites.values() if s.id in wanted and self._in_layers(s, layers)
        )
        if wrong or not chosen:
            raise self._no_such_site(wrong or patterns, layers)
        return chosen

    def _in_layers(self, site: Site, layers: str | int | tuple[int, ...]) -> bool:
        return site.layer is None or site.layer in layer_numbers(layers, self.depth(site.stack))

    def _no_such_site(self, patterns: Iterable[str], layers: object) -> SiteError:
        roles = sorted({s.role for s in self.sites.values()})
        kind = self.model.config.model_type
        where = "" if layers == "all" else f" in layers {layers!r}"
        return SiteError(
            f"this {kind} backbone has no such site{where}",
            offenders=[f"{p!r}{did_you_mean(p, roles)}" for p in patterns],
            expected=f"one of {', '.join(roles)}; or one stack's (decoder.attn.q), or a site id "
            "(encoder.0.attn.q), with * as a wildcard",
            hint="adapterhub inspect BACKBONE lists the sites",
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """The backbone's own parameters by path: all but the task head's, any adapter's, and
        constants."""
        heads = tuple(f"{name}." for name in self.head())
        constants = {self.path(path) for path in self.family.constants}
        named = [(n, p) for n, p in self.model.named_parameters() if n not in constants]
        return {n: p for n, p in named if not n.startswith(heads) and f".{CHILD}." not in f".{n}"}

    def head(self) -> dict[str, nn.Module]:
        """The task head: what stands beside the base model, unless it is a language-model head."""
        if not self.base_path or self.model.get_output_embeddings() is not None:
            return {}
        children = self.model.named_children()
        return {
            n: m for n, m in children if n != self.base_path and any(True for _ in m.parameters())
        }

    def key(self, path: str) -> str:
        """The name of a parameter in adapter files: by site, else by layer, else by its path.

        `encoder.layer.3.attention.self.query.weight` of BERT is `encoder.3.attn.q.weight`.
        """
        for site in self.sites.values():
            if (
                site.kind in ("linear", "norm")
                and site.part is None
                and path.startswith(site.host + ".")
            ):
                return site.id + path[len(site.host) :]
        if place := self._place(path):
            return f"{place[0]}.{place[1]}.{path[len(self.layers[place[0]][place[1]]) + 1 :]}"
        return join("backbone", path.removeprefix(self.base_path + ".") if self.base_path else path)

    def layer_of(self, path: str) -> tuple[str, int] | Literal["below", "above"]:
        """Which layer a parameter is in; `below` all layers (embeddings) or `above` (final norm,
        pooler)."""
        if place := self._place(path):
            return place
        below = tuple(self.path(p) + "." for p in self.family.below)
        return "below" if path.startswith(below) else "above"

    def _place(self, path: str) -> tuple[str, int] | None:
        return next(
            (
                (stack, number)
                for stack, layers in self.layers.items()
                for number, layer in enumerate(layers)
                if path.startswith(layer + ".")
            ),
            None,
        )


CHILD = "adapterhub"  # the one child module that a host carries while adapters are on it


def join(*parts: str) -> str:
    """A module path out of parts, some of which may be empty."""
    return ".".join(p for p in parts if p)


def matches(pattern: str, site: Site) -> bool:
    """Whether a pattern names a site: by its role, its stack and role, or its id."""
    names = (site.role, f"{site.stack}.{site.role}", site.id)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def known(pattern: str) -> bool:
    """Whether a pattern uses a role of the vocabulary, be it on this backbone or not."""
    role = re.sub(r"^(encoder|decoder)\.(\d+\.|\*\.)?", "", pattern)
    return any(fnmatch.fnmatchcase(name, role) for name in ROLES)


def layer_numbers(layers: str | int | tuple[int, ...], depth: int) -> range | set[int]:
    """The layer numbers that a selection names in a stack of `depth` layers.

    Raises:
        SiteError: a selection that cannot be read, or a layer that is not there.
    """
    if isinstance(layers, str):
        return _layer_range(layers.strip(), depth)
    numbers = {layers} if isinstance(layers, int) else set(layers)
    if outside := sorted(n for n in numbers if not 0 <= n < depth):
        raise _bad_layers(f"layers {outside} are not there", depth)
    return numbers


def _layer_range(text: str, depth: int) -> range | set[int]:
    if text == "all":
        return range(depth)
    if match := re.fullmatch(r"(top|first) (\d{1,9})", text):
        count = min(int(match[2]), depth)
        return range(depth - count, depth) if match[1] == "top" else range(count)
    if match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text):
        first, last = int(match[1]), int(match[2])
        if last >= depth:  # before the numbers between take memory
            raise _bad_layers(f"layers {text!r} are not there", depth)
        return range(first, last + 1)
    if re.fullmatch(r"\d{1,9}", text):
        return layer_numbers(int(text), depth)
    raise _bad_layers(f"layers {text!r} cannot be read", depth)


def _bad_layers(problem: str, depth: int) -> SiteError:
    return SiteError(
        f"{problem} in a stack of {depth} layers",
        expected="all, 'top 4', 'first 2', '0..3' (ends included), 5, [0, 5, 11]; the first is 0",
    )
