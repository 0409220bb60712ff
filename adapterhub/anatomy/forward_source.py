"""Read from the source of a module's forward what it calls, in which order, and what it returns.

Reads the source only: nothing is run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn


def call_order(module: nn.Module) -> tuple[str, ...]:
    """List the paths of the submodules that a module's forward uses, in the order of first use.

    Its own methods are followed; branches count as if all were taken. Empty without a source.
    """
    return tuple(dict.fromkeys(_used(module, "forward", frozenset())))


def returns_tuple(module: nn.Module) -> bool:
    """Return whether a module's forward returns a tuple rather than a tensor.

    By its annotation or, without one, by its `return` statements; false without a source.
    """
    function = _definition(_method(module, "forward"))
    if function is None:
        return False
    if function.returns is not None:
        return ast.unparse(function.returns).strip("'\"").lower().startswith("tuple")
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return any(isinstance(value, ast.Tuple) for value in values)


def multiplies_otherwise(module: nn.Module) -> bool:
    """Return whether a `Linear` of a transformers model computes another product than `Linear`.

    One that multiplies groups of features by blocks of its weight (DeepSeek-V4), say: its forward
    takes the weight apart.
    """
    of_model = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
    if not (of_model and isinstance(module, nn.Linear)):
        return False
    function = _definition(_method(module, "forward"))
    if function is None or type(module).forward is nn.Linear.forward:
        return False
    called = {ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
    return any(f"self.weight.{name}" in called for name in ("view", "reshape", "chunk", "split"))


def reads_token_ids(stack: nn.Module, layer: nn.Module) -> bool:
    """Return whether a stack needs token ids beside embeddings, which virtual tokens do not have.

    It passes them to its layers, as where ids select experts, or to a module of its own that does
    not get the embeddings too, as one that finds padding by id.

    `stack` is the module whose forward takes `input_ids`.
    """
    if "input_ids" in inspect.signature(layer.forward).parameters:
        return True
    function = _definition(_method(stack, "forward"))
    children = {f"self.{name}" for name, _ in stack.named_children()} - {"self.embed_tokens"}
    calls = _unconditional_calls(function.body) if function else []
    others = {"inputs_embeds", "position_ids"}  # what is computed from these needs no ids
    passed = (_names_in(call) for call in calls if ast.unparse(call.func) in children)
    return any("input_ids" in names and not names & others for names in passed)


def _unconditional_calls(statements: list[ast.stmt]) -> list[ast.Call]:
    """List the calls of a function's body that no condition guards."""
    plain = [s for s in statements if not isinstance(s, ast.If | ast.For | ast.While | ast.Try)]
    return [node for s in plain for node in ast.walk(s) if isinstance(node, ast.Call)]


def _names_in(call: ast.Call) -> set[str]:
    passed = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {n.id for value in passed for n in ast.walk(value) if isinstance(n, ast.Name)}


def definition_of(module: nn.Module, method: str) -> ast.FunctionDef | None:
    """Return the definition of a method of a module's class; None without a source."""
    return _definition(_method(module, method))


def own_methods(module: nn.Module) -> list[ast.FunctionDef]:
    """List the definitions of the methods of a module's class, but those of `nn.Module`."""
    classes = type(module).__mro__
    own = classes[: classes.index(nn.Module)]
    methods = (_method(module, name) for name in {n: None for c in own for n in vars(c)})
    return [definition for m in methods if (definition := _definition(m)) is not None]


def _method(module: nn.Module, name: str) -> Callable[..., Any] | None:
    method = getattr(type(module), name, None)
    return inspect.unwrap(method) if inspect.isfunction(method) else None


@cache
def _definition(method: Callable[..., Any] | None) -> ast.FunctionDef | None:
    if method is None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):  # built at run time, or part of a C extension
        return None
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def _used(module: nn.Module, method: str, followed: frozenset[str]) -> Iterator[str]:
    function = _definition(_method(module, method))
    if function is None or method in followed:
        return
    submodules = {path for path, _ in module.named_modules()}
    for statement in function.body:
        for path in _attributes(statement):
            if path in submodules:
                yield path
            elif _method(module, path) is not None:
                yield from _used(module, path, followed | {method})


def _attributes(node: ast.AST) -> Iterator[str]:
    """Yield what is read from `self`, as dotted paths in the order of evaluation."""
    if isinstance(node, ast.Attribute) and (path := _path(node)):
        yield path
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):  # it is called when its arguments are known
        children = [*node.args, *node.keywords, node.func]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        children = [node.value] if node.value is not None else []
    for child in children:
        yield from _attributes(child)


def _path(node: ast.expr) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    from_self = isinstance(node, ast.Name) and node.id == "self"
    return ".".join(reversed(names)) if from_self and names else None
