"""Read from the source of a module's forward what it calls, in which order, and what it returns.

Also how it attends, through transformers' attention interface or with torch's functions, whether
it turns queries and keys by their positions, and whether an autograd function of its own computes
its layers (Reformer). Nothing is run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from adapterhub.anatomy.own_modules import join

Attends = Literal["interface", "torch"]
_WEIGHTS = frozenset({"softmax", "scaled_dot_product_attention"})
_FACTS = frozenset({"dtype", "device", "shape", "size", "ndim", "is_meta"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "@", "scaled_dot_product_attention"})


def call_order(module: nn.Module) -> tuple[str, ...]:
    """List the paths of the submodules that a module's forward uses, in the order of first use.

    Its own methods are followed; branches count as if all were taken. Empty without a source.
    """
    return tuple(dict.fromkeys(_used(module)))


def is_called_whole(model: nn.Module, path: str) -> bool:
    """Return whether the modules around one call it, not its parts alone, as BridgeTower does.

    True without a source, and where a part of the path is handed to something else.
    """
    names = path.split(".")
    for depth in range(len(names) if path else 0):
        around, inner = model.get_submodule(".".join(names[:depth])), ".".join(names[depth:])
        used = call_order(around)
        is_used = any(f"{inner}.".startswith(f"{each}.") for each in used)
        if not is_used and any(each.startswith(f"{inner}.") for each in used):
            return False
    return True


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
    """Yield what a method reads from `self`, as dotted paths; functions that get it are followed.

    So are the names of what is read: `q = self.q_proj`, and those of what is passed on.
    """
    function = _method(module, method)
    yield from _read_in(module, function, [("",)], {}, followed)


# The paths of what a name stands for; "" is the module itself.
_Names = dict[str, tuple[str, ...]]


def _read_in(
    module: nn.Module,
    function: Callable[..., Any] | None,
    places: Sequence[tuple[str, ...]],
    named: _Names,
    followed: frozenset[str],
) -> Iterator[str]:
    """Yield what a function reads of a module, given what its arguments stand for."""
    definition = _definition(function)
    if function is None or definition is None or function.__qualname__ in followed:
        return
    parameters = [each.arg for each in definition.args.args]
    names = {n: paths for n, paths in zip(parameters, places, strict=False) if paths} | named
    reader = _Reader(module, function, names, followed | {function.__qualname__})
    for statement in definition.body:
        yield from reader.attributes(statement)


class _Reader:
    """Reads one function: what it uses of a module, in the order of evaluation."""

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        names: _Names,
        followed: frozenset[str],
    ) -> None:
        self.module, self.names, self.followed = module, names, followed
        self.known = getattr(function, "__globals__", {})

    def attributes(self, node: ast.AST) -> Iterator[str]:
        """Yield what is read, as dotted paths."""
        if isinstance(node, ast.Attribute | ast.Name) and (paths := self.paths(node)):
            for path in paths:
                if path and _method(self.module, path) is not None:
                    yield from self._follow(_method(self.module, path), [("",)], {})
                elif path:
                    yield path
            return
        if isinstance(node, ast.Assign) and self._renames(node):
            return
        if isinstance(node, ast.For | ast.comprehension):
            self._renames_each(node.target, node.iter)
        if isinstance(node, ast.Call) and (followed := self._followed(node)) is not None:
            yield from followed
            return
        for child in _in_order(node):
            yield from self.attributes(child)

    def paths(self, node: ast.AST) -> tuple[str, ...]:
        """Return the paths of what an expression names: `self.q`, a name of it, `getattr`."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        found: tuple[str, ...] = ()
        if isinstance(node, ast.Name):
            found = self.names.get(node.id, ())
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, name = node.args[0], node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found = tuple(join(path, name.value) for path in self.paths(owner))
        return tuple(join(path, *reversed(names)) for path in found)

    def _renames(self, node: ast.Assign) -> bool:
        """Note the names that an assignment gives to what is read, if it does nothing else."""
        (target, *others), value = node.targets, node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        found = {t.id: self.paths(v) for t, v in pairs if isinstance(t, ast.Name)}
        for name in found:
            self.names.pop(name, None)  # whatever it was before
        if others or len(found) < len(pairs) or not all(found.values()):
            return False
        self.names |= found
        return True

    def _renames_each(self, target: ast.expr, values: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(values, ast.Tuple | ast.List):
            self.names[target.id] = tuple(p for v in values.elts for p in self.paths(v))

    def _followed(self, call: ast.Call) -> Iterator[str] | None:
        """Return what a function reads that gets the module, or a part of it; None for others."""
        function, first = call.func, []
        if isinstance(function, ast.Name):
            called = self.known.get(function.id)
            called = called if inspect.isfunction(called) else None
        else:
            paths = self.paths(function)
            called = _method(self.module, paths[0]) if len(paths) == 1 else None
            first = [("",)]
        given = [self.paths(a) for a in call.args]
        named = {k.arg: self.paths(k.value) for k in call.keywords if k.arg}
        if called is None or _definition(called) is None or not any([*given, *named.values()]):
            return None
        return self._read_call(call, called, [*first, *given], named)

    def _read_call(
        self,
        call: ast.Call,
        called: Callable[..., Any],
        places: Sequence[tuple[str, ...]],
        named: _Names,
    ) -> Iterator[str]:
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            if not self.paths(value):
                yield from self.attributes(value)
        yield from self._follow(called, places, {n: p for n, p in named.items() if p})

    def _follow(
        self, called: Callable[..., Any] | None, places: Sequence[tuple[str, ...]], named: _Names
    ) -> Iterator[str]:
        return _read_in(self.module, called, places, named, self.followed)


def _in_order(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node in the order of evaluation."""
    if isinstance(node, ast.Call):  # it is called when its arguments are known
        return [*node.args, *node.keywords, node.func]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return [*node.generators, node.elt]
    return list(ast.iter_child_nodes(node))


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
