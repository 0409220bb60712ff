"""The projections of a layer and their roles: attention, fused and other projections.

The layout of a fused query-key-value projection is read from the source of its attention. The
first operation that splits its output or adds dimensions decides:

    .view(..., 3, heads, head_dim)          blocks: all of q, then all of k, then all of v
    .chunk(3, dim), .split(sizes, dim)      blocks
    .view(..., heads, 3, head_dim)          heads: q, k and v of each head in turn
    .view(..., heads, 3 * head_dim)         heads

The parts must be unpacked into names for query, key and value, in this order. Any other code gives
an unknown layout, and the projection has no parts.

Projections outside known sublayers get a role from the name of their module:

    mixer.NAME    linear attention, state spaces, recurrences and convolutions over tokens
    attn.NAME     attention whose projections are not a query, a key and a value
    ffn.NAME      a network of another form; `moe.NAME` next to its experts
    other.NAME    projections that match none of these words

NAME is the shortest unique end of the path: `mixer.in_proj`, `mixer.conv_in_proj`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from adapterhub.anatomy.backbone import join, own_modules
from adapterhub.anatomy.family import WHOLE, Layout
from adapterhub.anatomy.projections import (
    attends,
    in_features,
    is_projection,
    latent_sizes,
    out_features,
    own_methods,
    plain_projections,
    returns_tuple,
)

_PREFIX = re.compile(r"^(project|projection|linear)_(?=.)")
_SUFFIX = re.compile(r"_(proj|projection|lin|linear|layer)$")
_NAMES = {
    "q": ("q", "query", "wq"),
    "k": ("k", "key", "wk"),
    "v": ("v", "value", "wv"),
    "o": ("o", "out", "output", "dense", "c", "wo", "proj", "projection", "attention_out"),
    "qkv": ("qkv", "query_key_value", "wqkv", "c_attn", "in"),
    # Latent attention: keys and values, and often queries, pass through a small bottleneck.
    "q_a": ("q_a",),
    "q_b": ("q_b",),
    "kv_a": ("kv_a", "kv_a_proj_with_mqa"),
    "kv_b": ("kv_b",),
}
# Attention without a softmax: it has states instead of keys and values.
_RECURRENT = re.compile(r"linear_?att|delta|lightning|mamba|rwkv|gla", re.IGNORECASE)
_CROSS = re.compile(r"cross|enc_?dec|encoder_att", re.IGNORECASE)
_SEPARATE = ("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b")
_RESHAPES = ("view", "reshape")
_SPLITS = ("chunk", "split")
# Operations that do not move features.
_ELEMENTWISE = ("clamp", "contiguous", "to", "unsqueeze", "float")
MIXER = re.compile(
    r"mamba|mixer|ssm|linear_?att|delta|(?<!pw)(?<!pointwise_)conv|recurrent|rwkv|time_mix|lightning|short_?conv"
    r"|temporal_block|fourier",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|_")
_WORDS = {
    "mixer": MIXER,
    "attn": re.compile(r"att(n|ention)|mha\b", re.IGNORECASE),
    "moe": re.compile(r"moe|expert|router", re.IGNORECASE),
    "ffn": re.compile(r"mlp|ffn|feed_?forward|dense|intermediate|channel_mix", re.IGNORECASE),
}


def attention_modules(layer: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the attention modules inside a layer, with the names of their projections by role."""
    for path, module in own_modules(layer):
        children = dict(_children(module))
        projections = {role: name for name in children if (role := _role(name)) is not None}
        by_role = {role: children[name] for role, name in projections.items()}
        if any(map(returns_tuple, by_role.values())):
            continue
        # A layer may use the keys and values of an earlier layer.
        shares = {"q", "o"} == projections.keys() == set(map(_role, children))
        whole = shares or {"q", "k", "v"} <= projections.keys()
        latent = {"kv_a", "kv_b"} <= projections.keys()
        if not latent and _RECURRENT.search(own_name(module, layer)):
            continue
        mixes = MIXER.search(f"{path.rpartition('.')[2]} {own_name(module, layer)}")
        if whole or latent or (not mixes and _is_fused(by_role)):
            yield path, projections


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the projections of a module, also wrapped ones such as `q_proj.linear`."""
    for name, child in module.named_children():
        if is_projection(child):
            yield name, child
        elif list(plain_projections(child)) == ["linear"]:
            yield f"{name}.linear", child.get_submodule("linear")


def _role(name: str) -> str | None:
    stem = _PREFIX.sub("", _SUFFIX.sub("", name.lower().removesuffix(".linear")))
    return next((role for role, names in _NAMES.items() if stem in names), None)


def _is_fused(projections: Mapping[str, nn.Module]) -> bool:
    """Return whether a projection has the combined size of q, k and v, as far as known."""
    if "qkv" not in projections:
        return False
    if "o" not in projections:
        return True
    queries = in_features(projections["o"])
    keys, odd = divmod(out_features(projections["qkv"]) - queries, 2)
    return not odd and keys > 0 and queries % keys == 0


def attention_sublayers(layer: nn.Module) -> dict[str, dict[str, dict[str, str]]]:
    """Map attn and cross to their attention modules, and each module to its projections by role."""
    sublayers: dict[str, dict[str, dict[str, str]]] = {}
    for path, projections in attention_modules(layer):
        sublayer = "cross" if _CROSS.search(path) else "attn"
        sublayers.setdefault(sublayer, {})[path] = projections
    return sublayers


def attention_group(attention: str) -> str:
    """Return the path of the module around an attention's projections, including its output."""
    # q, k and v may be one level deeper than the output, as in BERT.
    return attention.rpartition(".")[0] or attention


def attention_sites(
    layer: nn.Module, sublayer: str, path: str, projections: dict[str, str], width: int
) -> dict[str, str]:
    """Map the roles of an attention's projections and of its keys and values to their paths.

    `path` is the path of the attention module in the layer; `projections` maps roles to names.
    """
    separate = [name for name in _SEPARATE if name in projections]
    names = separate if {"q", "kv_a"} & projections.keys() else [*separate, "qkv"]
    sites = {f"{sublayer}.{name}": join(path, projections[name]) for name in names}
    if output := _attention_output(layer, path, projections.get("o"), width):
        sites[f"{sublayer}.o"] = output
    attention = layer.get_submodule(path)
    latent = "k" not in projections and {"kv_a", "kv_b"} & projections.keys()
    if attends(attention) and (not latent or latent_sizes(attention)):
        sites[f"{sublayer}.kv"] = path
    return sites


def _attention_output(layer: nn.Module, path: str, name: str | None, width: int) -> str | None:
    """Return the output projection: the child `name`, or one next to the attention at `path`."""
    candidates = [join(path, name)] if name else []
    group = attention_group(path)
    around = (join(group, p) for p in plain_projections(layer.get_submodule(group)))
    candidates += [p for p in around if not p.startswith(f"{path}.")]
    return next((c for c in candidates if out_features(layer.get_submodule(c)) == width), None)


def fused_layout(attention: nn.Module, name: str) -> Layout:
    """Return the layout of a fused projection's output; `whole` if the source does not show it."""
    layouts: set[Layout] = set()
    for method in own_methods(attention):
        uses = list(_uses(method, name))
        if uses and _in_order(method):
            layouts |= set(uses)
    return layouts.pop() if len(layouts) == 1 else WHOLE


def _uses(method: ast.FunctionDef, name: str) -> Iterator[Layout]:
    """Yield the layout that each splitting operation on a projection's output implies."""
    carriers: set[str] = set()
    for statement in ast.walk(method):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.expr):
            target = statement.targets[0]
            splits = [
                c for c in _calls(statement.value) if _is_output(c.func.value, name, carriers)
            ]
            for call in splits:
                if layout := _implied_layout(call, target):
                    yield layout
            if isinstance(target, ast.Name) and _is_output(statement.value, name, carriers):
                carriers.add(target.id)


class _Operation(ast.Call):
    """A call of a method."""

    func: ast.Attribute


def _calls(expression: ast.expr) -> Iterator[_Operation]:
    for node in ast.walk(expression):
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_method and node.func.attr in (*_RESHAPES, *_SPLITS):  # type: ignore[attr-defined]
            yield node  # type: ignore[misc]


def _is_output(node: ast.expr, name: str, carriers: set[str]) -> bool:
    """Return whether an expression is the projection's output, with its features in order."""
    if isinstance(node, ast.Name):
        return node.id in carriers
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in _ELEMENTWISE:
        return _is_output(node.func.value, name, carriers)
    return ast.unparse(node.func) == f"self.{name}"


def _implied_layout(call: _Operation, target: ast.expr) -> Layout | None:
    if call.func.attr in _SPLITS:
        parts = target.elts if isinstance(target, ast.Tuple) else []
        return "blocks" if len(parts) == 3 else None
    last = call.args[-1] if call.args else None
    if isinstance(last, ast.BinOp) and isinstance(last.op, ast.Mult):
        return "heads" if 3 in (_number(last.left), _number(last.right)) else WHOLE
    # Heads and head_dim follow the 3 in blocks, head_dim alone in heads.
    places = [n for n, argument in enumerate(call.args) if _number(argument) == 3]
    after = len(call.args) - places[0] if len(places) == 1 else 0
    known: dict[int, Layout] = {3: "blocks", 2: "heads"}
    return known.get(after, WHOLE)


def _number(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None


def _in_order(method: ast.FunctionDef) -> bool:
    """Return whether query, key and value are unpacked in this order only."""
    orders = {
        "".join(part.id[0] for part in node.elts if isinstance(part, ast.Name))
        for node in ast.walk(method)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store) and len(node.elts) == 3
    }
    return {order for order in orders if set(order) == set("qkv")} == {"qkv"}


def further_sites(
    layer: nn.Module, projections: Iterable[str], taken: Mapping[str, str]
) -> dict[str, str]:
    """Assign a unique role to each projection without a role.

    `taken` maps assigned roles to paths.

    Returns:
        The further paths by role.
    """
    used = set(taken.values())
    left = [path for path in projections if path not in used and not _of_an_expert(path)]
    kinds = {path: kind_of(layer, path) for path in left}
    further: dict[str, str] = {}
    for path, kind in kinds.items():
        same = [p for p, other in kinds.items() if other == kind and p != path]
        further[f"{kind}.{_distinct_end(path, same, kind, taken)}"] = path
    return further


def mixer_of(layer: nn.Module, sites: Mapping[str, str]) -> str | None:
    """Return the path of the module that has all projections of a layer's mixer, or None."""
    paths = [path for role, path in sites.items() if role.startswith("mixer.")]
    parts = [path.split(".")[:-1] for path in paths]
    common = [a[0] for a in zip(*parts, strict=False) if len(set(a)) == 1] if parts else []
    module = layer.get_submodule(".".join(common)) if common else None
    if module is None or returns_tuple(module) or isinstance(module, nn.ModuleList):
        return None
    return ".".join(common)


def _of_an_expert(path: str) -> bool:
    return re.search(r"experts\.\d+\.", path) is not None


def kind_of(layer: nn.Module, path: str) -> str:
    """Return the kind of a projection, from the words of the enclosing modules, innermost first.

    Returns:
        `mixer`, `attn`, `moe`, `ffn` or `other`.
    """
    parts = path.split(".")[:-1]
    for end in range(len(parts), 0, -1):
        around = ".".join(parts[:end])
        names = f"{parts[end - 1]} {own_name(layer.get_submodule(around), layer)}"
        for kind, words in _WORDS.items():
            if words.search(names):
                return kind
    own = next((kind for kind, words in _WORDS.items() if words.search(path)), None)
    return own or "other"


def own_name(module: nn.Module, layer: nn.Module) -> str:
    """Return a module's class name without the words it shares with the class of its layer.

    For a RecurrentGemmaMLP in a RecurrentGemmaDecoderLayer, this is `MLP`.
    """
    words, whole = (_WORD.findall(type(each).__name__) for each in (module, layer))
    equal = [a == b for a, b in zip(words, whole, strict=False)]
    shared = equal.index(False) if False in equal else len(equal)
    return "".join(words[shared:] or words)


def _distinct_end(path: str, others: Collection[str], kind: str, taken: Mapping[str, str]) -> str:
    """Return the shortest end of a path that no other path has, as one word."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        end = parts[-count:]
        role = f"{kind}.{'_'.join(end)}"
        if role not in taken and not any(other.split(".")[-count:] == end for other in others):
            break
    return "_".join(end)
