"""Anatomy: the canonical map of a backbone, from site ids to the modules that host them.

A **site** is a named place of a backbone: `encoder.3.attn.q` is the query projection of the fourth
encoder layer, whatever its module is called inside transformers. Roles of a layer:

    attn.q attn.k attn.v attn.o    the projections of self-attention (or fused: attn.qkv)
    cross.q cross.k cross.v cross.o    those of cross-attention, in encoder-decoders
    ffn.gate ffn.up ffn.down       the projections of the feed-forward network
    attn.kv cross.kv               where keys and values enter the attention function
    attn cross ffn                 a sublayer as a whole: from its input x to its output y,
                                   before the residual connection is added
    attn.norm cross.norm ffn.norm  the normalization that belongs to a sublayer

and of a stack: `embed`, where token embeddings enter it, and `mix`, the output of its last layer,
for what reads the outputs of all layers. Where an architecture differs from another is data: one
`Family` row in families.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from adapterhub.errors import BackboneError, SiteError, did_you_mean

Kind = Literal["linear", "sublayer", "keyvalue", "norm", "embed", "mix"]

SUBLAYERS = ("attn", "cross", "ffn")
PROJECTIONS = tuple(f"{s}.{p}" for s in ("attn", "cross") for p in ("q", "k", "v", "qkv", "o"))
ROLES = (
    *PROJECTIONS,
    "ffn.gate",
    "ffn.up",
    "ffn.down",
    *(f"{s}.kv" for s in ("attn", "cross")),
    *SUBLAYERS,
    *(f"{s}.norm" for s in SUBLAYERS),
    "embed",
    "mix",
)


@dataclass(frozen=True)
class Stack:
    """One stack of layers: where it is, and where the sites of one of its layers are.

    `root` is the module whose forward takes `input_ids` (from the base model, "" is the base model
    itself), `layers` the module list, `sites` maps a role to a path inside one layer (`a|b`: the
    first of them that is there), `pooler` a module above the layers that reads position 0.
    """

    name: Literal["encoder", "decoder"]
    layers: str
    sites: Mapping[str, str]
    root: str = ""
    pooler: str | None = None


@dataclass(frozen=True)
class Family:
    """One architecture family: the row that tells where T5 differs from BERT.

    `below` names the modules under the first layer (embeddings). `positions_from_padding` is set
    where the backbone counts positions from the padding index, as RoBERTa does.
    """

    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    below: tuple[str, ...]
    positions_from_padding: bool = False


@dataclass(frozen=True)
class Site:
    """A named place of one backbone.

    `host` is the path of the module whose output the site changes; `tap` that of the module whose
    input is the site's x, where it is not the host. `part` bounds the slice of a fused host's
    output features that the site owns. `d_in`, `d_out` are the sizes of x and y in features.
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
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Anatomy:
    """The sites of one model, and the questions that methods ask about it."""

    model: PreTrainedModel
    family: Family
    base_path: str
    sites: Mapping[str, Site] = field(repr=False)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that this model has (a decoder-only BART has no encoder)."""
        present = {site.stack for site in self.sites.values()}
        return {stack.name: stack for stack in self.family.stacks if stack.name in present}

    def path(self, *parts: str) -> str:
        """A module path from the model, for parts that start at the base model."""
        return join(self.base_path, *parts)

    def depth(self, stack: str) -> int:
        """The number of layers of a stack."""
        return 1 + max(
            s.layer for s in self.sites.values() if s.stack == stack and s.layer is not None
        )

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
        """The backbone's own parameters by path: all but the task head's and any adapter's."""
        heads = tuple(f"{name}." for name in self.head())
        named = self.model.named_parameters()
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
        for name, stack in self.stacks.items():
            layers = self.path(stack.layers) + "."
            if path.startswith(layers):
                return f"{name}.{path[len(layers) :]}"
        return join("backbone", path.removeprefix(self.base_path + ".") if self.base_path else path)

    def layer_of(self, path: str) -> tuple[str, int] | Literal["below", "above"]:
        """Which layer a parameter is in; `below` all layers (embeddings) or `above` (final norm,
        pooler)."""
        for name, stack in self.stacks.items():
            if match := re.match(re.escape(self.path(stack.layers)) + r"\.(\d+)\.", path):
                return name, int(match[1])
        below = tuple(self.path(p) + "." for p in self.family.below)
        return "below" if path.startswith(below) else "above"


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
    if match := re.fullmatch(r"(top|first) (\d+)", text):
        count = min(int(match[2]), depth)
        return range(depth - count, depth) if match[1] == "top" else range(count)
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        return layer_numbers(tuple(range(int(match[1]), int(match[2]) + 1)), depth)
    if text.isdecimal():
        return layer_numbers(int(text), depth)
    raise _bad_layers(f"layers {text!r} cannot be read", depth)


def _bad_layers(problem: str, depth: int) -> SiteError:
    return SiteError(
        f"{problem} in a stack of {depth} layers",
        expected="all, 'top 4', 'first 2', '0..3' (ends included), 5, [0, 5, 11]; the first is 0",
    )


def in_features(module: nn.Module) -> int:
    """The size of a projection's input: `Linear`, its quantized kinds, and GPT-2's `Conv1D`."""
    size = getattr(module, "in_features", None) or getattr(module, "nx", None)
    return int(size) if size else module.get_parameter("weight").shape[0]


def out_features(module: nn.Module) -> int:
    """The size of a projection's output."""
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    return int(size) if size else module.get_parameter("weight").shape[-1]


def build(model: PreTrainedModel, family: Family) -> Anatomy:
    """Lay a family's row over a model.

    Raises:
        BackboneError: the row does not fit: it names modules that the model does not have.
    """
    base = model.base_model
    base_path = "" if base is model else next(n for n, m in model.named_modules() if m is base)
    sites: dict[str, Site] = {}
    for stack in family.stacks:
        layers = _get(base, stack.layers)
        if isinstance(layers, nn.ModuleList):
            embed = _embed_site(model, base_path, stack)
            last = join(base_path, stack.layers, str(len(layers) - 1))
            mix = replace(embed, id=f"{stack.name}.mix", role="mix", kind="mix", host=last)
            inner = _stack_sites(model, base_path, stack, layers)
            sites |= {s.id: s for s in (embed, *inner, mix)}
    if not sites:
        raise BackboneError(
            f"the {model.config.model_type} row of families.py does not fit {type(model).__name__}",
            expected=f"a module list at {', '.join(s.layers for s in family.stacks)}",
        )
    return Anatomy(model, family, base_path, sites)


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _present(layer: nn.Module, spec: str) -> str | None:
    """The first of the `|`-separated paths that the layer has."""
    return next((path for path in spec.split("|") if _get(layer, path) is not None), None)


def _embed_site(model: PreTrainedModel, base_path: str, stack: Stack) -> Site:
    root = model.get_submodule(join(base_path, stack.root))
    width = root.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    host = join(base_path, stack.root)
    return Site(f"{stack.name}.embed", stack.name, None, "embed", "embed", host, width, width)


def _stack_sites(
    model: PreTrainedModel, base_path: str, stack: Stack, layers: nn.ModuleList
) -> Iterator[Site]:
    for number, layer in enumerate(layers):
        prefix = join(base_path, stack.layers, str(number))
        found = {
            role: path for role, spec in stack.sites.items() if (path := _present(layer, spec))
        }
        modules = {role: layer.get_submodule(path) for role, path in found.items()}
        paths = {role: join(prefix, path) for role, path in found.items()}
        for role, kind, fields in _layer_sites(model, modules, paths):
            site_id = f"{stack.name}.{number}.{role}"
            yield Site(site_id, stack.name, number, role, kind, **fields)


def _layer_sites(
    model: PreTrainedModel, modules: dict[str, nn.Module], paths: dict[str, str]
) -> Iterator[tuple[str, Kind, dict]]:  # type: ignore[type-arg]
    for role, module in modules.items():
        if role.endswith(".norm"):
            width = module.get_parameter("weight").shape[0]
            yield role, "norm", {"host": paths[role], "d_in": width, "d_out": width}
        elif role.endswith(".kv"):
            yield role, "keyvalue", _keyvalue(model, role, modules, paths)
        elif role not in SUBLAYERS:
            sizes = {"d_in": in_features(module), "d_out": out_features(module)}
            yield role, "linear", {"host": paths[role], **sizes}
        if role.endswith(".qkv"):
            yield from _fused_parts(model, role, module, paths[role])
    for role in SUBLAYERS:
        if fields := _sublayer(role, modules, paths):
            yield role, "sublayer", fields


def _fused_parts(
    model: PreTrainedModel, role: str, module: nn.Module, path: str
) -> Iterator[tuple[str, Kind, dict]]:  # type: ignore[type-arg]
    """q, k and v of a fused projection whose output holds them one block after the other."""
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    head_dim = out_features(module) // (heads + 2 * kv_heads)
    start = 0
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        stop = start + count * head_dim
        size = {"d_in": in_features(module), "d_out": stop - start}
        yield role.replace("qkv", part), "linear", {"host": path, **size, "part": (start, stop)}
        start = stop


def _keyvalue(
    model: PreTrainedModel, role: str, modules: dict[str, nn.Module], paths: dict[str, str]
) -> dict[str, object]:
    sublayer = role.split(".")[0]
    if f"{sublayer}.k" in modules:
        width = out_features(modules[f"{sublayer}.k"])
    else:
        parts = _fused_parts(model, f"{sublayer}.qkv", modules[f"{sublayer}.qkv"], "")
        width = next(fields["d_out"] for r, _, fields in parts if r.endswith(".k"))
    return {"host": paths[role], "d_in": width, "d_out": width}


def _sublayer(
    role: str, modules: dict[str, nn.Module], paths: dict[str, str]
) -> dict[str, object] | None:
    """A sublayer goes from the input of its first projection to the output of its last one."""
    first = next((r for r in (f"{role}.q", f"{role}.qkv", f"{role}.up") if r in modules), None)
    last = next((r for r in (f"{role}.o", f"{role}.down") if r in modules), None)
    if first is None or last is None:
        return None
    sizes = {"d_in": in_features(modules[first]), "d_out": out_features(modules[last])}
    return {"host": paths[last], "tap": paths[first], **sizes}
