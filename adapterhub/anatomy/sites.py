"""Sites: canonical names for places in a backbone, mapped to the modules that host them.

A **site** is a named place in a backbone: `encoder.3.attn.q` is the query projection of the fourth
encoder layer, independent of its module's name in transformers. Roles in a layer:

    attn.q attn.k attn.v attn.o    projections of self-attention (or fused: attn.qkv)
    attn.q_a attn.q_b attn.kv_a attn.kv_b    projections of latent attention, into and out of its
                                   bottlenecks
    cross.q cross.k cross.v cross.o    projections of cross-attention, in encoder-decoders
    ffn.gate ffn.up ffn.down       projections of the feed-forward network (or fused: ffn.gate_up)
    ffn.experts.NAME               projections of all its routed experts: gate_up, up, down
    ffn.router                     the module that selects the experts of a token
    attn.kv cross.kv               keys and values, where they enter the attention function
    mixer.NAME                     projections of token mixers without attention: linear
                                   attention, state spaces, recurrences, convolutions
    moe.NAME other.NAME            projections next to experts, and projections without another role
    attn cross ffn mixer           a sublayer as a whole: from its input x to its output y, before
                                   the residual connection is added
    attn.norm cross.norm ffn.norm  the normalization of a sublayer
    attn.postnorm ffn.postnorm     a second normalization, on the sublayer's output before the
                                   residual connection
    layer                          a layer as a whole: its output is the residual stream

Stacks are `encoder` and `decoder`. In a model with several of a kind, they are named after their
input: `vision`, `audio`, `language`. A stack has these roles:

    embed     where token embeddings enter the stack
    input     the states after its embeddings, of the same width
    output    the states that the output layer of a language model reads
    mix       the output of its last layer, for methods that combine the outputs of all layers

Architectures differ only in data: a `Family` row, in families/ or derived from the structure
(discovery/).

Layer selections: `all`, `top 4`, `first 2`, `0..3`, a number or several.

Layer groups list the sites found in each layer. `dropped_modules` lists modules whose outputs are
never read.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD as CHILD
from adapterhub.anatomy.backbone import (
    Backbone,
    PipelineParts,
    base_classes,
    own_modules,
    own_parameters,
)
from adapterhub.anatomy.backbone import join as join
from adapterhub.anatomy.family import Family, Stack
from adapterhub.anatomy.projections import HeldWeight, WeightMatrix
from adapterhub.errors import SiteError, did_you_mean


def layer_numbers(layers: str | int | tuple[int, ...], depth: int) -> range | set[int]:
    """Return the layer numbers of a selection in a stack of `depth` layers.

    Raises:
        SiteError: the selection is malformed, or names a layer that does not exist.
    """
    if isinstance(layers, str):
        return _layer_range(layers.strip(), depth)
    numbers = {layers} if isinstance(layers, int) else set(layers)
    if outside := sorted(n for n in numbers if not 0 <= n < depth):
        raise _bad_layers(f"layers {outside} do not exist", depth)
    return numbers


def number_ranges(numbers: Iterable[int]) -> str:
    """Format layer numbers with runs as inclusive ranges: "0..3, 5, 7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs)


def _layer_range(text: str, depth: int) -> range | set[int]:
    if text == "all":
        return range(depth)
    if match := re.fullmatch(r"(top|first) (\d{1,9})", text):
        count = min(int(match[2]), depth)
        return range(depth - count, depth) if match[1] == "top" else range(count)
    if match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text):
        first, last = int(match[1]), int(match[2])
        if last >= depth:
            raise _bad_layers(f"layers {text!r} do not exist", depth)
        return range(first, last + 1)
    if re.fullmatch(r"\d{1,9}", text):
        return layer_numbers(int(text), depth)
    raise _bad_layers(f"cannot parse layers {text!r}", depth)


def _bad_layers(problem: str, depth: int) -> SiteError:
    return SiteError(
        f"{problem} in a stack of {depth} layers",
        expected="all, 'top 4', 'first 2', '0..3' (ends included), 5, [0, 5, 11]; the first is 0",
    )


Kind = Literal[
    "linear", "weight", "sublayer", "layer", "keyvalue", "norm", "embed", "states", "mix"
]
SUBLAYERS = ("attn", "cross", "ffn", "mixer")
STREAM = ("residual", "block")  # points of the residual stream that a module may read, see Stream
NORMS = ("norm", "postnorm")
EXPERTS, ROUTER = "ffn.experts", "ffn.router"
ALL_LINEAR = "all-linear"  # a pattern: every linear layer of attention and feed-forward
PROJECTIONS = tuple(f"{s}.{p}" for s in ("attn", "cross") for p in ("q", "k", "v", "qkv", "o"))
ROLES = (
    *PROJECTIONS,
    "ffn.gate",
    "ffn.up",
    "ffn.down",
    "ffn.gate_up",
    EXPERTS,  # in a row: the module of the weights; its projections are the sites
    *(f"{EXPERTS}.{name}" for name in ("gate_up", "gate", "up", "down")),
    ROUTER,
    *(f"{s}.kv" for s in ("attn", "cross")),
    *SUBLAYERS,
    *(f"{s}.{norm}" for s in SUBLAYERS for norm in NORMS),
    "layer",
    "embed",
    "input",
    "output",
    "mix",
)


class FeatureSlice(NamedTuple):
    """The output features of a fused projection that one site owns.

    They are `start` to `stop` of every run of `period` features. If the period is the whole output,
    the slice is one block. If it is `3 head_dim`, the slice is the q, k or v of each head in turn.
    """

    start: int
    stop: int
    period: int

    def read(self, y: Tensor) -> Tensor:
        """Select the features of this slice.

        y: (..., d_fused) -> (..., d_out).
        """
        return self._runs(y)[..., self.start : self.stop].flatten(-2)

    def _runs(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:-1], y.shape[-1] // self.period, self.period)

    def write(self, y: Tensor, piece: Tensor) -> Tensor:
        """Return y with the features of this slice replaced.

        y: (..., d_fused), piece: (..., d_out) -> (..., d_fused).
        """
        runs = self._runs(y)
        piece = piece.view(*runs.shape[:-1], self.stop - self.start)
        pieces = (runs[..., : self.start], piece, runs[..., self.stop :])
        return torch.cat([p for p in pieces if p.shape[-1]], dim=-1).flatten(-2)


class Stream(NamedTuple):
    """The connection of a sublayer to the residual stream.

    With r the residual (`residual`) and y the sublayer's output, the layer continues with
    norm(r + postnorm(y)) (`block`). Each field is a module path, or None if the module does not
    exist.

    Attributes:
        input_host: the module whose input is r; None if it is the sublayer's host.
        norm: the normalization of the sum.
        postnorm: the normalization of y.
    """

    input_host: str | None
    norm: str | None
    postnorm: str | None


@dataclass(frozen=True)
class Site:
    """A named place in one backbone.

    Attributes:
        id: the name, such as `encoder.3.attn.q`.
        stack: the name of the stack.
        layer: the layer's number; None for the sites of a stack.
        role: the name without stack and layer.
        kind: the kind of site, which determines the entry points a method can use here.
        host: the path of the module whose output the site changes.
        d_in: the size of the input x in features.
        d_out: the size of the output y in features.
        input_host: the path of the module whose input is x, if it is not the host.
        part: the output features that the site owns, if the host is a fused projection.
        stream: the sublayer's connection to the residual stream; None if unknown.
        bias: the path of the attention that computes the bias of relative positions used here.
        d_values: the size of an attention's values, if it differs from the size of its keys, d_out.
        held: the weight, if the host multiplies by it directly (`weight`); sizes refer to one of
            its matrices.
        matrix: the matrix, if the host is a convolution or the like, not a projection (`linear`).
    """

    id: str
    stack: str
    layer: int | None
    role: str
    kind: Kind
    host: str
    d_in: int
    d_out: int
    input_host: str | None = None
    part: FeatureSlice | None = None
    stream: Stream | None = None
    bias: str | None = None
    held: HeldWeight | None = None
    d_values: int | None = None
    matrix: WeightMatrix | None = None

    @property
    def d_kv(self) -> tuple[int, int]:
        """The sizes of the keys and of the values of an attention."""
        return self.d_out, self.d_out if self.d_values is None else self.d_values

    @property
    def inside(self) -> bool:
        """Whether the weight belongs to a module inside the host, which reads it directly."""
        return self.matrix is not None and "." in self.matrix.weight

    @property
    def module(self) -> str:
        """The path of the module that owns the weight: the host, or a module inside it."""
        inside = self.matrix.weight.rpartition(".")[0] if self.matrix else ""
        return join(self.host, inside)

    @property
    def weight_path(self) -> str:
        """The path of the module that owns the weight; of the parameter if it is stacked."""
        stacked = self.held is not None and self.held.experts is not None
        return join(self.host, self.held.parameter) if stacked and self.held else self.module

    @property
    def reads(self) -> str:
        """The stack whose tokens arrive here; keys of cross-attention come from the encoder."""
        return "encoder" if self.role in ("cross.k", "cross.v") else self.stack


_BYTES_PER_PARAMETER = 16  # by the backbone: all weights twice, in fp64; adapters are far smaller
_LEAST_BYTES = 64 << 20  # for any file: heads and tokens of a tiny backbone


@dataclass(frozen=True)
class Anatomy:
    """The sites of one model.

    Attributes:
        backbone: the model.
        model: its module.
        family: the row that describes it.
        base_path: the path of the base model in the model; "" if it is the model itself.
        sites: the sites by id.
        layers: the paths of each stack's layers in the model.
        named_head: the modules of the head, if the caller named them; None to derive them from the
            model.
        by_path: the modules of a transformers model that have no role, as sites named by their
            paths in the base model.
    """

    backbone: Backbone
    model: nn.Module = field(init=False)
    family: Family
    base_path: str
    sites: Mapping[str, Site] = field(repr=False)
    layers: Mapping[str, tuple[str, ...]] = field(repr=False)
    named_head: tuple[str, ...] | None = None
    by_path: Mapping[str, Site] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.backbone.module)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that this model has (a decoder-only BART lacks the encoder)."""
        return {stack.name: stack for stack in self.family.stacks if stack.name in self.layers}

    def path(self, *parts: str) -> str:
        """Join a path relative to the base model into one relative to the model."""
        return join(self.base_path, *parts)

    def depth(self, stack: str) -> int:
        """Count the layers of a stack."""
        return len(self.layers[stack])

    def most_bytes(self) -> int:
        """Return the largest size of a file of tensors that an adapter may have."""
        parameters = sum(parameter.numel() for parameter in self.parameters().values())
        return parameters * _BYTES_PER_PARAMETER + _LEAST_BYTES

    def select(
        self,
        patterns: Iterable[str],
        layers: str | int | tuple[int, ...] = "all",
        strict: bool = True,
    ) -> tuple[Site, ...]:
        """Select the sites that match any pattern, in the order of the backbone.

        Args:
            patterns: roles (`attn.q`), roles of one stack (`decoder.attn.q`), site ids, any of
                these with wildcards (`encoder.*.ffn.*`), or `all-linear`. Any other pattern is the
                path of a module, or its end (`query`, `pooler.dense`), also with wildcards.
            layers: `all`, `top 4`, `first 2`, `0..3`, a number or several.
            strict: whether each pattern must match a site. Otherwise a pattern with a valid role
                may match no site, and patterns are not matched as paths.

        Raises:
            SiteError: patterns match nothing (all listed in one error), or no site is selected.
        """
        patterns = tuple(patterns)
        matched = {p: self.matching(p, by_path=strict) for p in patterns}
        wrong = [
            pattern
            for pattern, sites in matched.items()
            if not sites and (strict or not names_a_role(pattern))
        ]
        ids = {s.id for sites in matched.values() for s in sites}
        selected = tuple(s for s in self.every() if s.id in ids and self._in_layers(s, layers))
        if wrong or not selected:
            raise self._no_such_site(wrong or patterns, layers)
        return selected

    def every(self) -> Iterator[Site]:
        """Yield all sites: first the sites with roles, then the sites without."""
        yield from self.sites.values()
        yield from self.by_path.values()

    def matching(self, pattern: str, by_path: bool = True) -> list[Site]:
        """Return the sites that match a pattern: by name, or else by the path of the module.

        `all-linear` matches the linear layers, without the router and the stacked weights of
        experts.
        """
        if pattern == ALL_LINEAR:
            linear = (s for s in self.sites.values() if s.kind == "linear" and s.part is None)
            return [site for site in linear if site.role != ROUTER]
        named = [site for site in self.sites.values() if matches(pattern, site)]
        if named or not by_path or self.named_head is not None:
            return named
        paths = self._paths
        return [s for s in self.every() if s.id in paths and is_path(pattern, paths[s.id])]

    @cached_property
    def _paths(self) -> dict[str, str]:
        """The paths of modules in the base model, by the ids of sites that cover a whole module.

        Experts' weights have the paths of their parameters.
        """
        base = f"{self.base_path}." if self.base_path else ""
        return {
            site.id: site.weight_path.removeprefix(base)
            for site in self.sites.values()
            if site.kind in ("linear", "norm", "weight") and site.part is None
        } | {name: name for name in self.by_path}

    def _in_layers(self, site: Site, layers: str | int | tuple[int, ...]) -> bool:
        return site.layer is None or site.layer in layer_numbers(layers, self.depth(site.stack))

    def _no_such_site(self, patterns: Iterable[str], layers: object) -> SiteError:
        roles = sorted({s.role for s in self.sites.values()})
        place = "" if layers == "all" else f" in layers {layers!r}"
        path = f"the path of a module ({next(iter(self.by_path or self.sites), 'layers.0.fc')})"
        if self.named_head is None and roles:
            path = f"a role of one stack (decoder.attn.q), a site id (encoder.0.attn.q), {path}"
        return SiteError(
            f"this {self.backbone.model_type} backbone has no such site{place}",
            offenders=[f"{p!r}{self._meaning(p) or did_you_mean(p, roles)}" for p in patterns],
            expected="; or ".join([*([f"one of {', '.join(roles)}"] if roles else []), path])
            + ", with * as a wildcard",
            hint="adapterhub inspect BACKBONE lists the sites",
        )

    def _meaning(self, name: str) -> str:
        """Return a hint for a name that matches no site, or "".

        For a path in a pipeline's module that is not a part, it shows how to attach an adapter
        there.
        """
        own, first = self.backbone.module, name.partition(".")[0]
        if isinstance(own, PipelineParts) and first in own.others:
            return f"; {first} is not part of a {own.kind.__name__}: ah.attach(pipe.{first}, ...)"
        return ""

    def packed_hosts(self) -> list[str]:
        """List the paths of projections that store packed codes instead of a weight.

        Layers of GPTQ and AWQ are examples: they can be called, but their weights cannot be read.
        """
        linear = (s for s in self.sites.values() if s.kind == "linear" and not s.matrix)
        modules = ((host, self.model.get_submodule(host)) for host in {s.host: 0 for s in linear})
        return [host for host, m in modules if not isinstance(getattr(m, "weight", None), Tensor)]

    def layer_count(self) -> int:
        """Count the layers of all stacks."""
        return sum(map(self.depth, self.layers))

    def layers_above(self) -> dict[str, int]:
        """Map the path of each backbone parameter to the number of layers above it.

        0 is the top layer and everything after it (a final norm, a pooler); embeddings, before the
        first layer, get the total number of layers. Layers of an encoder-decoder are counted
        through both stacks: the decoder is above the encoder.

        Raises:
            SiteError: weights are stored as packed codes, so whole layers cannot be trained.
        """
        if packed := self.packed_hosts():
            more = [f"and {len(packed) - 3} more"] if len(packed) > 3 else []
            raise SiteError(
                "cannot train whole layers: the weights of this backbone are quantized and packed",
                offenders=[*packed[:3], *more],
                expected="weights in fp32, bf16 or fp16",
            )
        layers = [(stack, n) for stack in self.layers for n in range(self.depth(stack))]
        above: dict[object, int] = {layer: n for n, layer in enumerate(reversed(layers))}
        above |= {"above": 0, "below": len(layers)}
        return {path: above[self.layer_of(path)] for path in self.parameters()}

    def parameters(self, every_use: bool = False) -> dict[str, nn.Parameter]:
        """Map paths to the backbone's own parameters.

        Excludes parameters of the task head and of adapters, constants, and empty ones. A tied
        parameter has one path, or with `every_use` one path for each module that uses it.
        """
        heads = tuple(f"{name}." for name in self.head())
        constants = {self.path(path) for path in self.family.constants}
        modules = own_modules(self.model)
        uses = [(join(m, n), p) for m, module in modules for n, p in own_parameters(module)]
        first: dict[int, str] = {}
        if not every_use:
            uses = [(n, p) for n, p in uses if first.setdefault(id(p), n) == n]
        return {
            n: p for n, p in uses if p.numel() and n not in constants and not n.startswith(heads)
        }

    def head(self) -> dict[str, nn.Module]:
        """Return the modules of the task head, which are outside the base model.

        Empty if the model has a language-model head.
        """
        if self.named_head is not None:
            return {name: self.model.get_submodule(name) for name in self.named_head}
        config = self.backbone.pretrained.config
        if self.backbone.output_embedding is not None:
            return {}
        if type(self.model) in base_classes(config):  # a base model
            return {}
        if not self.base_path:
            return self._head_of_encoder()
        children = self.model.named_children()
        head = {
            n: m for n, m in children if n != self.base_path and any(True for _ in m.parameters())
        }
        return {} if self._writes_tokens(head) else head

    def _writes_tokens(self, head: Mapping[str, nn.Module]) -> bool:
        """Return whether a head has an output for each token: CTC's head, which lacks a getter."""
        config = self.backbone.pretrained.config
        tokens = getattr(config, "vocab_size", None)
        outputs = {
            getattr(module, "out_features", getattr(module, "out_channels", None))
            for child in head.values()
            for module in child.modules()
        }
        return tokens is not None and tokens in outputs and config.num_labels not in outputs

    def _head_of_encoder(self) -> dict[str, nn.Module]:
        """Return the head of a class that has an encoder instead of the base model.

        The head is the modules after the encoder, such as the two of Whisper's audio classifier, if
        one of them has as many outputs as there are labels. In other classes, such modules are
        projections.
        """
        encoders = {path.partition(".")[0] for paths in self.layers.values() for path in paths}
        children = list(self.model.named_children())
        last = max((n for n, (name, _) in enumerate(children) if name in encoders), default=-1)
        learned = [(n, m) for n, m in children[last + 1 :] if any(True for _ in m.parameters())]
        behind = dict(learned) if encoders else {}
        modules = [module for child in behind.values() for module in child.modules()]
        outputs = {getattr(module, "out_features", None) for module in modules}
        return behind if self.backbone.pretrained.config.num_labels in outputs else {}

    def key(self, path: str) -> str:
        """Return a parameter's name in adapter files: by site, or else by layer, or else by path.

        `encoder.layer.3.attention.self.query.weight` of BERT is `encoder.3.attn.q.weight`.
        """
        for site in self.sites.values():
            named = site.kind in ("linear", "norm") and site.part is None
            host = site.module if self.named_head is None else site.host
            if named and path.startswith(host + "."):
                return site.id + path[len(host) :]
        if layer := self._layer(path):
            stack, number = layer
            return f"{stack}.{number}.{path[len(self.layers[stack][number]) + 1 :]}"
        return join("backbone", path.removeprefix(self.base_path + ".") if self.base_path else path)

    def layer_of(self, path: str) -> tuple[str, int] | Literal["below", "above"]:
        """Return the (stack, number) of the layer that contains a parameter.

        Return `below` for a parameter before the first layer (embeddings), and `above` for a
        parameter after the last layer (final norm, pooler).
        """
        if layer := self._layer(path):
            return layer
        below = tuple(self.path(p) + "." for p in self.family.below)
        return "below" if path.startswith(below) else "above"

    def _layer(self, path: str) -> tuple[str, int] | None:
        for stack, layers in self.layers.items():
            for number, layer in enumerate(layers):
                if path.startswith(layer + "."):
                    return stack, number
        return None


def matches(pattern: str, site: Site) -> bool:
    """Return whether a pattern matches a site: its role, its stack and role, or its id.

    If the id is the path of a module, its last part also matches: `to_q`.
    """
    names: tuple[str, ...] = (site.role, f"{site.stack}.{site.role}", site.id)
    if site.id == site.module:
        names = (*names, site.id.rpartition(".")[2])
    if not any(wildcard in pattern for wildcard in "*?["):
        return pattern in names
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def is_path(pattern: str, path: str) -> bool:
    """Return whether a pattern is the path of a module, or its end."""
    if not any(wildcard in pattern for wildcard in "*?["):
        return f".{path}".endswith(f".{pattern}")
    return any(fnmatch.fnmatchcase(name, pattern) for name in (path, path.rpartition(".")[2]))


def names_a_role(pattern: str) -> bool:
    """Return whether a pattern uses a valid role, even a role that this backbone lacks."""
    role = pattern
    if pattern.partition(".")[0] not in (*SUBLAYERS, *ROLES):
        role = re.sub(r"^\w+\.(\d+\.|\*\.)?", "", pattern)
    return any(fnmatch.fnmatchcase(name, role) for name in ROLES)


def sites_option(anatomy: Anatomy, sites: Iterable[Site]) -> list[str]:
    """Return patterns that match exactly these sites: roles, stack-qualified roles, or ids."""
    ids = {site.id for site in sites}
    for name in (lambda s: s.role, lambda s: f"{s.stack}.{s.role}"):
        names = sorted({name(s) for s in anatomy.every() if s.id in ids})
        # A name can be the role of one site and the last part of another site's path.
        if {s.id for n in names for s in anatomy.matching(n)} == ids:
            return names
    return [s.id for s in anatomy.every() if s.id in ids]


_OPTION = "vision_feature_layer"


class LayerGroup(NamedTuple):
    """Layers of one stack that have the same sites.

    Attributes:
        stack: the name of the stack.
        layers: the numbers of the layers.
        found: the roles of their sites, by sublayer: `attn.q`, `attn.o`, `attn`.
        missing: descriptions of sites that methods may need and the layers lack.
        other_weights: the paths, relative to the layer, of matrices without a site.
        experts: the number of routed experts in each layer, if their weights are sites.
    """

    stack: str
    layers: tuple[int, ...]
    found: tuple[str, ...]
    missing: tuple[str, ...]
    other_weights: tuple[str, ...]
    experts: int | None = None


def layer_groups(anatomy: Anatomy) -> list[LayerGroup]:
    """Group the layers of each stack by the sites found in them."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for stack, paths in anatomy.layers.items():
        for number, path in enumerate(paths):
            sites = [s for s in anatomy.sites.values() if (s.stack, s.layer) == (stack, number)]
            roles = tuple(sorted((site.role for site in sites), key=_by_sublayer))
            others = tuple(_other_weights(anatomy, path, sites))
            experts = max((s.held.experts or 0 for s in sites if s.held), default=0) or None
            key = stack, roles, tuple(_missing(roles)), others, experts
            groups.setdefault(key, []).append(number)
    return [
        LayerGroup(str(key[0]), tuple(numbers), *key[1:])  # type: ignore[arg-type]
        for key, numbers in groups.items()
    ]


def _by_sublayer(role: str) -> tuple[int, str]:
    sublayer = role.partition(".")[0]
    place = SUBLAYERS.index(sublayer) if sublayer in SUBLAYERS else len(SUBLAYERS)
    return place, role


def _missing(roles: tuple[str, ...]) -> Iterator[str]:
    has = {role.partition(".")[0] for role in roles if not role.endswith("norm")}
    if not {"attn", "mixer"} & has:
        yield "attention or a mixer"
    for sublayer in ("attn", "cross"):
        if f"{sublayer}.qkv" in roles and f"{sublayer}.q" not in roles:
            yield f"q, k and v in {sublayer}.qkv"
        elif sublayer in has and f"{sublayer}.kv" not in roles:
            yield f"keys and values in {sublayer}"
    if "ffn" not in has:
        yield "a feed-forward network"
    elif not {"ffn.down", "ffn"} & set(roles):
        yield "the output of the feed-forward network"
    for sublayer in SUBLAYERS[:-1]:
        if sublayer in has and sublayer not in roles:
            yield f"the output of {sublayer}"


def _other_weights(anatomy: Anatomy, layer: str, sites: list[Site]) -> Iterator[str]:
    """Yield the paths of a layer's matrices that have no site."""
    hosts = {site.host for site in sites if site.kind in ("linear", "norm")}
    held = {join(site.host, site.held.parameter) for site in sites if site.held}
    for path, module in own_modules(anatomy.model.get_submodule(layer)):
        if join(layer, path) in hosts:
            continue
        names = (n for n, p in own_parameters(module) if p.ndim > 1)
        yield from (join(path, n) for n in names if join(layer, path, n) not in held)


def dropped_modules(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of the modules after the last states that are read; () in most models.

    LLaVA and similar models read the states before the last layer of their image encoder,
    hidden_states[-2]. Later outputs are computed and dropped, so nothing there can be trained.
    """
    chosen = getattr(anatomy.backbone.config, _OPTION, None)
    numbers = [chosen] if isinstance(chosen, int) else list(chosen or ())
    if not numbers or "vision" not in anatomy.layers:
        return ()
    layers = anatomy.layers["vision"]
    # States 0 are the embeddings: states n are read after n layers.
    read = max(n if n >= 0 else len(layers) + 1 + n for n in numbers)
    return (*layers[read:], *_behind(anatomy)) if read < len(layers) else ()


def _behind(anatomy: Anatomy) -> Iterator[str]:
    """Yield the modules of the encoder that are registered after its layers, such as a norm."""
    paths = [paths[0].split(".") for paths in anatomy.layers.values()]
    columns = zip(*paths, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, columns))
    parts = anatomy.layers["vision"][0].split(".")[:-1]
    for depth in range(shared + 1, len(parts)):
        holder = ".".join(parts[:depth])
        names = [name for name, _ in anatomy.model.get_submodule(holder).named_children()]
        yield from (f"{holder}.{name}" for name in names[names.index(parts[depth]) + 1 :])
