"""The layout of a fused query-key-value projection, read from the source of its attention.

What decides is the first operation that splits its output or gives it more dimensions:

    .view(..., 3, heads, head_dim)          blocks: all of q, then all of k, then all of v
    .chunk(3, dim), .split(sizes, dim)      blocks
    .view(..., heads, 3, head_dim)          heads: q, k and v of each head in turn
    .view(..., heads, 3 * head_dim)         heads

The parts must be named as query, key and value, in this order, where they are unpacked. Whatever is
written differently is unknown: the projection has no parts then.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from adapterhub.anatomy.family import WHOLE, Layout
from adapterhub.anatomy.forward_source import own_methods

_RESHAPES = ("view", "reshape")
_SPLITS = ("chunk", "split")
# They leave every feature where it is.
_ELEMENTWISE = ("clamp", "contiguous", "to", "unsqueeze", "float")


def fused_layout(attention: nn.Module, name: str) -> Layout:
    """Return the layout of a fused projection's output; `whole` if its use does not show it."""
    found: set[Layout] = set()
    for method in own_methods(attention):
        uses = list(_uses(method, name))
        if uses and _in_order(method):
            found |= set(uses)
    return found.pop() if len(found) == 1 else WHOLE


def _uses(method: ast.FunctionDef, name: str) -> Iterator[Layout]:
    """Yield the layout that each splitting operation on a projection's output implies."""
    carriers: set[str] = set()
    for statement in ast.walk(method):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.expr):
            target = statement.targets[0]
            splits = [c for c in _calls(statement.value) if _is_fused(c.func.value, name, carriers)]
            for call in splits:
                if layout := _layout(call, target):
                    yield layout
            if isinstance(target, ast.Name) and _is_fused(statement.value, name, carriers):
                carriers.add(target.id)


class _Operation(ast.Call):
    """A call of a method."""

    func: ast.Attribute


def _calls(expression: ast.expr) -> Iterator[_Operation]:
    for node in ast.walk(expression):
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_method and node.func.attr in (*_RESHAPES, *_SPLITS):  # type: ignore[attr-defined]
            yield node  # type: ignore[misc]


def _is_fused(node: ast.expr, name: str, carriers: set[str]) -> bool:
    """Return whether an expression is the projection's output, its features in their places."""
    if isinstance(node, ast.Name):
        return node.id in carriers
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in _ELEMENTWISE:
        return _is_fused(node.func.value, name, carriers)
    return ast.unparse(node.func) == f"self.{name}"


def _layout(call: _Operation, target: ast.expr) -> Layout | None:
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
    """Return whether query, key and value are unpacked in this order, and in no other."""
    orders = {
        "".join(part.id[0] for part in node.elts if isinstance(part, ast.Name))
        for node in ast.walk(method)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store) and len(node.elts) == 3
    }
    return {order for order in orders if set(order) == set("qkv")} == {"qkv"}
