"""How a module attends: through transformers' attention interface, or with torch's functions.

Reads the source of its forward only: nothing is run.
"""

from __future__ import annotations

import ast
import inspect
from typing import Literal

from torch import nn

from adapterhub.anatomy.forward_source import definition_of

Attends = Literal["interface", "torch"]
_WEIGHTS = frozenset({"softmax", "scaled_dot_product_attention"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "@", "scaled_dot_product_attention"})


def attends(module: nn.Module) -> Attends | None:
    """Return how a module computes its attention.

    Returns:
        "interface": it calls one of transformers' attention functions. "torch": it computes one
        softmax on each path through its forward, and products by `matmul` or a like function.
        None: it has no attention, or of another form (several softmaxes, as over landmarks;
        products by `einsum` alone).
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
        return "interface"
    paths = _Paths(module)
    one = paths.most_of("forward") == 1
    return "torch" if one and _PRODUCTS & paths.names else None


class _Paths:
    """Counts softmaxes on the paths through a module's forward; its own methods are followed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.followed: tuple[str, ...] = ()
        self.names: set[str] = set()  # of the functions that are called

    def most_of(self, method: str) -> int:
        """Return the most softmaxes that one path through a method computes."""
        function = definition_of(self.module, method)
        if function is None or method in self.followed:
            return 0
        self.followed = (*self.followed, method)
        most = self._most(function.body)
        self.followed = self.followed[:-1]
        return most

    def _most(self, statements: list[ast.stmt]) -> int:
        total = 0
        for number, statement in enumerate(statements):
            if isinstance(statement, ast.If):
                behind = statements[number + 1 :]
                ends = isinstance(statement.body[-1], ast.Return | ast.Raise)
                other = statement.orelse + (behind if ends else [])
                total += self._in(statement.test)
                total += max(self._most(statement.body), self._most(other))
                if ends:
                    return total
            elif isinstance(statement, ast.For | ast.While):
                total += 2 * self._most(statement.body)
            elif isinstance(statement, ast.With | ast.Try):
                total += self._most(statement.body)
            elif not isinstance(statement, ast.FunctionDef):
                total += self._in(statement)
        return total

    def _in(self, node: ast.AST) -> int:
        nodes = list(ast.walk(node))
        self.names |= {"@" for n in nodes if isinstance(n, ast.MatMult)}
        return sum(self._called(n) for n in nodes if isinstance(n, ast.Call))

    def _called(self, call: ast.Call) -> int:
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        self.names.add(name)
        if name in _WEIGHTS or name == "Softmax":  # Softmax(dim=-1)(scores)
            return 1
        if not (isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self"):
            return 0
        if isinstance(self.module._modules.get(name), nn.Softmax):
            return 1
        return self.most_of(name)
