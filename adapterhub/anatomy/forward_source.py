"""Read from the source of a module's forward what it calls, in which order, and what it returns.

Also how it attends, through transformers' attention interface or with torch's functions, whether
it turns queries and keys by their positions, and whether an autograd function of its own computes its layers (Reformer). Nothing is run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

Attends = Literal["interface", "torch"]
_WEIGHTS = frozenset({"softmax", "scaled_dot_product_attention"})
_FACTS = frozenset({"dtype", "device", "shape", "size", "ndim", "is_meta"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "@", "scaled_dot_product_attention"})


def call_order(module: nn.Module) -> tuple[str, ...]:
    """List the paths of the submodules that a module's forward uses, in the order of first use.

    Its own methods are followed; branches count as if all were taken. Empty without a source.
    """
    return tuple(dict.fromkeys(_used(module)))


def returns_tuple(module: nn.Module) -> bool:
    """Return whether a module's forward returns a tuple rather than a tensor.

    By its annotation or, without one, by its `return` statements; false without a source.
    """
    function = definition_of(module, "forward")
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
    function = definition_of(module, "forward")
    if function is None or type(module).forward is nn.Linear.forward:
        return False
    called = {ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
    return any(f"self.weight.{name}" in called for name in ("view", "reshape", "chunk", "split"))


def weights_read(module: nn.Module) -> set[str]:
    """Return the paths of the submodules whose weights a module's forward reads itself.

    What such a submodule would compute is not always what is used: `F.conv1d(x, self.conv.weight)`.
    Its own methods are followed; a weight of which only the dtype or the like is asked is not read.
    """
    found = (f"{path}.".partition(".weight.") for path in _read(module, "forward", frozenset()))
    return {owner for owner, at, rest in found if at and rest.partition(".")[0] not in _FACTS}


def multiplies_weight(module: nn.Module, child: str) -> bool:
    """Return whether a module multiplies by the weight of a child: `self.dt_proj.weight @ x`."""
    weight = f"self.{child}.weight"
    return any(weight in _operands(method) for method in _own_methods(module))


@cache
def _operands(method: Callable[..., Any] | None) -> frozenset[str]:
    """Return the operands of the products `a @ b` in a method, as they are written."""
    nodes = ast.walk(_definition(method) or ast.Pass())
    products = (n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult))
    return frozenset(ast.unparse(side) for n in products for side in (n.left, n.right))


def reads_token_ids(stack: nn.Module, layer: nn.Module) -> bool:
    """Return whether a stack needs token ids beside embeddings, which virtual tokens do not have.

    It passes them to its layers, as where ids select experts, or to a module of its own that does
    not get the embeddings too, as one that finds padding by id.

    `stack` is the module whose forward takes `input_ids`.
    """
    if "input_ids" in inspect.signature(layer.forward).parameters:
        return True
    function = definition_of(stack, "forward")
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
    found = map(_definition, _own_methods(module))
    return [definition for definition in found if definition is not None]


def _own_methods(module: nn.Module) -> Iterator[Callable[..., Any] | None]:
    classes = type(module).__mro__
    own = classes[: classes.index(nn.Module)]
    return (_method(module, name) for name in {n: None for c in own for n in vars(c)})


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


def _used(module: nn.Module) -> Iterator[str]:
    submodules = {path for path, _ in module.named_modules()}
    return (path for path in _read(module, "forward", frozenset()) if path in submodules)


def _read(module: nn.Module, method: str, followed: frozenset[str]) -> Iterator[str]:
    """Yield what a method reads from `self`, as dotted paths; methods of its own are followed."""
    function = definition_of(module, method)
    if function is None or method in followed:
        return
    for statement in function.body:
        for path in _attributes(statement):
            if _method(module, path) is not None:
                yield from _read(module, path, followed | {method})
            else:
                yield path


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


def rotates(module: nn.Module) -> bool:
    """Return whether an attention turns queries and keys by their positions (RoPE)."""
    return any(
        "rotary" in name or "rope" in name.split("_")
        for function in own_methods(module)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for name in [getattr(node.func, "attr", getattr(node.func, "id", "")).lower()]
    )


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


def reversible_stack(model: nn.Module, layer: str) -> nn.Module | None:
    """Return the module around a layer that computes its layers in an autograd function.

    Returns:
        None if autograd sees each operation of the layers, as in nearly all models.
    """
    names = layer.split(".")
    around = (model.get_submodule(".".join(names[:n])) for n in range(len(names)))
    return next((module for module in around if _names_function(module)), None)


def _names_function(module: nn.Module) -> bool:
    """Return whether the forward of a module's class names an autograd function."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    named = [forward.__globals__.get(name) for name in code.co_names] if code else []
    return any(isinstance(n, type) and issubclass(n, torch.autograd.Function) for n in named)
