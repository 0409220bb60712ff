"""Projections: modules of any library that multiply by a matrix.

This file also covers weights that a module uses in its own forward: routed experts and routers. A
mixture of experts holds the projections of all experts as three-dimensional tensors:

    gate_up_proj    (experts, 2 d_inner, d)        up_proj    (experts, d_inner, d)
    down_proj       (experts, d, d_inner)

Some architectures store each matrix transposed. A router is also a matrix, (experts, d), inside a
module that returns more than the product: scores, and the numbers of the selected experts.

Other modules have matrices in their parameters: kernels, tables, packed weights.

    Conv1d, Conv2d, Conv3d   (d_out, d_in / groups, k, ...)   as (d_out, d_in / groups * k * ...)
    Embedding                (numbers, d)                     as (d, numbers)
    MultiheadAttention       (3 d, d)                         as three of (d, d)

A convolution is a projection of patches of its input, so a method that changes a matrix can change
a kernel.

The source code of a module's forward shows the call order and the return value. It shows whether
attention uses transformers' attention interface or torch's functions, whether queries and keys are
rotated by position, and whether a custom autograd function computes the layers (Reformer). Nothing
is run.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from adapterhub.anatomy.backbone import join, own_modules

Attends = Literal["interface", "torch"]
_WEIGHTS = frozenset({"softmax", "scaled_dot_product_attention"})
_FACTS = frozenset({"dtype", "device", "shape", "size", "ndim", "is_meta"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "@", "scaled_dot_product_attention"})


def call_order(module: nn.Module) -> tuple[str, ...]:
    """List the paths of the submodules that a module's forward uses, in the order of first use.

    Calls of the module's methods are followed, and all branches count as taken. The result is empty
    if the source is not available.
    """
    return tuple(dict.fromkeys(_used(module)))


def is_called_whole(model: nn.Module, path: str) -> bool:
    """Return whether the enclosing modules call a module itself, not only its parts.

    BridgeTower calls only parts. Also true if the source is not available, or if a module on the
    path is passed to other code.
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

    Its annotation decides, or without one its `return` statements. False if the source is not
    available.
    """
    function = definition_of(module, "forward")
    if function is None:
        return False
    if function.returns is not None:
        return ast.unparse(function.returns).strip("'\"").lower().startswith("tuple")
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return any(isinstance(value, ast.Tuple) for value in values)


def multiplies_otherwise(module: nn.Module) -> bool:
    """Return whether a `Linear` of a transformers model computes a different product.

    An example is a layer that multiplies groups of features by blocks of its weight (DeepSeek-V4):
    its forward splits the weight.
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
    """Return the paths of the submodules whose weights a module's forward reads directly.

    The result used may differ from the submodule's own output: `F.conv1d(x, self.conv.weight)`.
    Calls of the module's methods are followed. Reading only a weight's dtype or the like does not
    count.
    """
    split = (f"{path}.".partition(".weight.") for path in _read(module))
    return {owner for owner, at, rest in split if at and rest.partition(".")[0] not in _FACTS}


def multiplies_weight(module: nn.Module, child: str) -> bool:
    """Return whether a module multiplies by a child's weight: `self.dt_proj.weight @ x`."""
    weight = f"self.{child}.weight"
    return any(weight in _operands(method) for method in _own_methods(module))


@cache
def _operands(method: Callable[..., Any] | None) -> frozenset[str]:
    """Return the source text of the operands of the products `a @ b` in a method."""
    nodes = ast.walk(_definition(method) or ast.Pass())
    products = (n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult))
    return frozenset(ast.unparse(side) for n in products for side in (n.left, n.right))


def reads_token_ids(stack: nn.Module, layer: nn.Module) -> bool:
    """Return whether a stack needs token ids in addition to embeddings; virtual tokens lack ids.

    It does if it passes ids to its layers, where they may select experts, or to a submodule that
    does not also receive the embeddings, such as one that detects padding by id.

    `stack` is the module whose forward takes `input_ids`.
    """
    if "input_ids" in inspect.signature(layer.forward).parameters:
        return True
    function = definition_of(stack, "forward")
    children = {f"self.{name}" for name, _ in stack.named_children()} - {"self.embed_tokens"}
    calls = _unconditional_calls(function.body) if function else []
    others = {"inputs_embeds", "position_ids"}  # values computed from these need no ids
    passed = (_names_in(call) for call in calls if ast.unparse(call.func) in children)
    return any("input_ids" in names and not names & others for names in passed)


def _unconditional_calls(statements: list[ast.stmt]) -> list[ast.Call]:
    """List the unconditional calls of a function's body."""
    plain = [s for s in statements if not isinstance(s, ast.If | ast.For | ast.While | ast.Try)]
    return [node for s in plain for node in ast.walk(s) if isinstance(node, ast.Call)]


def _names_in(call: ast.Call) -> set[str]:
    passed = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {n.id for value in passed for n in ast.walk(value) if isinstance(n, ast.Name)}


def definition_of(module: nn.Module, method: str) -> ast.FunctionDef | None:
    """Return the definition of a method of a module's class, or None without its source."""
    return _definition(_method(type(module), method))


def own_methods(module: nn.Module) -> list[ast.FunctionDef]:
    """List the definitions of a class's methods, without the methods of `nn.Module`."""
    definitions = map(_definition, _own_methods(module))
    return [definition for definition in definitions if definition is not None]


def _own_methods(module: nn.Module) -> Iterator[Callable[..., Any] | None]:
    classes = type(module).__mro__
    own = classes[: classes.index(nn.Module)]
    return (_method(type(module), name) for name in {n: None for c in own for n in vars(c)})


def _method(cls: type[nn.Module], name: str) -> Callable[..., Any] | None:
    method = getattr(cls, name, None)
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
    return (path for path in _read(module) if path in submodules)


def _read(module: nn.Module) -> tuple[str, ...]:
    """List the attributes that a module's forward reads from `self`, as dotted paths.

    Functions that receive `self` are followed. So are names for an attribute, as in
    `q = self.q_proj`, and arguments that pass it on.
    """
    # mypy takes the hash of an instance for the hash of its class.
    return _read_by(type(module), _method(type(module), "forward"))  # type: ignore[arg-type]


@lru_cache(1024)  # a model has few classes, and is read for each attachment
def _read_by(cls: type[nn.Module], forward: Callable[..., Any] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_read_in(cls, forward, [("",)], {}, frozenset())))


# The paths that a name refers to; "" is the module itself.
_Names = dict[str, tuple[str, ...]]


def _read_in(
    cls: type[nn.Module],
    function: Callable[..., Any] | None,
    places: Sequence[tuple[str, ...]],
    named: _Names,
    followed: frozenset[str],
) -> Iterator[str]:
    """Yield the attributes of a class that a function reads, given the paths of its arguments."""
    definition = _definition(function)
    if function is None or definition is None or function.__qualname__ in followed:
        return
    parameters = [each.arg for each in definition.args.args]
    names = {n: paths for n, paths in zip(parameters, places, strict=False) if paths} | named
    reader = _Reader(cls, function, names, followed | {function.__qualname__})
    for statement in definition.body:
        yield from reader.attributes(statement)


class _Reader:
    """Reader of one function: the module attributes it uses, in the order of evaluation."""

    def __init__(
        self,
        cls: type[nn.Module],
        function: Callable[..., Any],
        names: _Names,
        followed: frozenset[str],
    ) -> None:
        self.cls, self.names, self.followed = cls, names, followed
        self.known = getattr(function, "__globals__", {})

    def attributes(self, node: ast.AST) -> Iterator[str]:
        """Yield the attributes that are read, as dotted paths."""
        if isinstance(node, ast.Attribute | ast.Name) and (paths := self.paths(node)):
            for path in paths:
                if path and _method(self.cls, path) is not None:
                    yield from self._follow(_method(self.cls, path), [("",)], {})
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
        """Return the paths that an expression refers to: `self.q`, a name for it, `getattr`."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        paths: tuple[str, ...] = ()
        if isinstance(node, ast.Name):
            paths = self.names.get(node.id, ())
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, name = node.args[0], node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                paths = tuple(join(path, name.value) for path in self.paths(owner))
        return tuple(join(path, *reversed(names)) for path in paths)

    def _renames(self, node: ast.Assign) -> bool:
        """Record the names that an assignment gives to attributes, if it does nothing else."""
        (target, *others), value = node.targets, node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        renamed = {t.id: self.paths(v) for t, v in pairs if isinstance(t, ast.Name)}
        for name in renamed:
            self.names.pop(name, None)  # drop the earlier meaning
        if others or len(renamed) < len(pairs) or not all(renamed.values()):
            return False
        self.names |= renamed
        return True

    def _renames_each(self, target: ast.expr, values: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(values, ast.Tuple | ast.List):
            self.names[target.id] = tuple(p for v in values.elts for p in self.paths(v))

    def _followed(self, call: ast.Call) -> Iterator[str] | None:
        """Return the reads of a function that receives the module or a part; None for others."""
        function, first = call.func, []
        if isinstance(function, ast.Name):
            target = self.known.get(function.id)
            target = target if inspect.isfunction(target) else None
        else:
            paths = self.paths(function)
            target = _method(self.cls, paths[0]) if len(paths) == 1 else None
            first = [("",)]
        positional = [self.paths(a) for a in call.args]
        named = {k.arg: self.paths(k.value) for k in call.keywords if k.arg}
        if target is None or _definition(target) is None or not any([*positional, *named.values()]):
            return None
        return self._read_call(call, target, [*first, *positional], named)

    def _read_call(
        self,
        call: ast.Call,
        function: Callable[..., Any],
        places: Sequence[tuple[str, ...]],
        named: _Names,
    ) -> Iterator[str]:
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            if not self.paths(value):
                yield from self.attributes(value)
        yield from self._follow(function, places, {n: p for n, p in named.items() if p})

    def _follow(
        self, function: Callable[..., Any] | None, places: Sequence[tuple[str, ...]], named: _Names
    ) -> Iterator[str]:
        return _read_in(self.cls, function, places, named, self.followed)


def _in_order(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node in the order of evaluation."""
    if isinstance(node, ast.Call):  # arguments are evaluated before the call
        return [*node.args, *node.keywords, node.func]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return [*node.generators, node.elt]
    return list(ast.iter_child_nodes(node))


def rotates(module: nn.Module) -> bool:
    """Return whether an attention rotates queries and keys by their positions (RoPE)."""
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
        softmax on each path through its forward, and products with `matmul` or a similar function.
        None: it has no attention, or attention of another form (several softmaxes, as over
        landmarks; products with `einsum` only).
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
        return "interface"
    paths = _Paths(module)
    one = paths.most_of("forward") == 1
    return "torch" if one and _PRODUCTS & paths.names else None


class _Paths:
    """Counter of softmaxes on the paths through a module's forward and the methods it calls."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.followed: tuple[str, ...] = ()
        self.names: set[str] = set()  # names of the called functions

    def most_of(self, method: str) -> int:
        """Return the largest number of softmaxes on one path through a method."""
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
        None if autograd records each operation of the layers, as in nearly all models.
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


# Three-dimensional parameters, and the roles of the projections they hold.
_EXPERT_PARAMETERS = {
    "gate_up_proj": "gate_up",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_ROUTER = re.compile(r"router|gate|gating|classifier", re.IGNORECASE)
_NO_ROUTER = re.compile(r"shared|gate_proj|gate_up", re.IGNORECASE)


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a matrix with an input and an output size.

    True for torch's `Linear`, its quantized variants (with a weight or packed codes) and GPT-2's
    `Conv1D`. False for a subclass that multiplies differently, and for the output projection of
    torch's attention. The latter never runs: the attention reads its weight.
    """
    if multiplies_otherwise(module) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    has_size = hasattr(module, "in_features") and hasattr(module, "out_features")
    has_size = has_size or hasattr(module, "nx")
    return has_size and getattr(module, "weight", module) is not None


def plain_projections(module: nn.Module) -> dict[str, nn.Module]:
    """Map paths to the projections in a module that output one tensor."""
    return {p: m for p, m in own_modules(module) if is_projection(m) and not returns_tuple(m)}


def latent_sizes(attention: nn.Module) -> tuple[int, int] | None:
    """Return the sizes of the keys and values that latent attention computes.

    Keys have `qk_head_dim` features in each head, values `v_head_dim`: DeepSeek-V2, section 2.1,
    https://arxiv.org/abs/2405.04434.
    """
    names = ("num_heads", "qk_head_dim", "v_head_dim")
    heads, keys, values = (getattr(attention, name, None) for name in names)
    if not (isinstance(heads, int) and isinstance(keys, int) and isinstance(values, int)):
        return None
    return heads * keys, heads * values


def in_features(module: nn.Module) -> int:
    """Return the input size of a projection."""
    size = getattr(module, "in_features", None) or getattr(module, "nx", None)
    return int(size) if size else module.get_parameter("weight").shape[0]


def out_features(module: nn.Module) -> int:
    """Return the output size of a projection."""
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    return int(size) if size else module.get_parameter("weight").shape[-1]


def usual_size(layers: Iterable[nn.Module]) -> int:
    """Return the most common input or output size of the projections of some layers, or 0."""
    projections = [m for layer in layers for m in layer.modules() if is_projection(m)]
    sizes = Counter(n for m in projections for n in {in_features(m), out_features(m)})
    return sizes.most_common(1)[0][0] if sizes else 0


class HeldWeight(NamedTuple):
    """A parameter that its module multiplies by.

    Attributes:
        parameter: the name of the parameter in the module.
        experts: the number of matrices it holds; None if it is one matrix.
        transposed: whether a matrix is stored as (d_in, d_out), not (d_out, d_in).
    """

    parameter: str
    experts: int | None = None
    transposed: bool = False

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """Return the input and the output size of one matrix."""
        rows, columns = module.get_parameter(self.parameter).shape[-2:]
        return (rows, columns) if self.transposed else (columns, rows)


def expert_weights(module: nn.Module) -> dict[str, HeldWeight]:
    """Map the projections of routed experts in a module, such as `gate_up`, to their weights.

    Returns:
        {} for any other module, and for experts with quantized weights.
    """
    stacked = {
        name: p
        for name, p in module.named_parameters(recurse=False)
        if name in _EXPERT_PARAMETERS and p.ndim == 3 and p.is_floating_point()
    }
    if (
        "down_proj" not in stacked
        or len(stacked) < 2
        or len({len(p) for p in stacked.values()}) > 1
    ):
        return {}
    transposed = _is_transposed(module, stacked)
    experts = len(stacked["down_proj"])
    return {
        role: HeldWeight(name, experts, transposed)
        for name, role in _EXPERT_PARAMETERS.items()
        if name in stacked
    }


def _is_transposed(module: nn.Module, stacked: dict[str, nn.Parameter]) -> bool:
    """Return whether the matrices are transposed, as the module declares or else by their sizes.

    The output of `down` has the same size as the input of the others.
    """
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    down = stacked["down_proj"]
    others = [p for name, p in stacked.items() if name != "down_proj"]
    return not all(p.shape[2] == down.shape[1] for p in others)


def expert_modules(layer: nn.Module) -> list[str]:
    """List the paths of the modules in a layer that hold the weights of routed experts."""
    return [path for path, module in own_modules(layer) if expert_weights(module)]


def router_weight(module: nn.Module) -> HeldWeight | None:
    """Return the weight of a router that returns more than the product; None for other modules."""
    if is_projection(module) and not returns_tuple(module):
        return None
    weight = module._parameters.get("weight")
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    return HeldWeight("weight") if plain else None


def router_path(layer: nn.Module, experts: str) -> str | None:
    """Return the path of the router next to the experts at a path, or None.

    It is the first such module with a router's name and one output for each expert.
    """
    count = _number_of_experts(layer.get_submodule(experts))
    around = experts.rpartition(".")[0]
    for path, module in _beside(layer, around, experts):
        named = _ROUTER.search(path) and not _NO_ROUTER.search(path)
        if named and count and _outputs(module) == count:
            return f"{around}.{path}" if around else path
    return None


def _number_of_experts(module: nn.Module) -> int | None:
    weights = expert_weights(module)
    if weights:
        return next(iter(weights.values())).experts
    return len(module) if isinstance(module, nn.ModuleList | nn.ModuleDict) else None


def _beside(layer: nn.Module, around: str, experts: str) -> Iterator[tuple[str, nn.Module]]:
    inside = experts[len(around) + 1 :] if around else experts
    for path, module in own_modules(layer.get_submodule(around)):
        if path and not f"{path}.".startswith(f"{inside}."):
            yield path, module


def _outputs(module: nn.Module) -> int | None:
    if held := router_weight(module):
        return held.sizes(module)[1]
    return out_features(module) if is_projection(module) else None


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WeightMatrix(NamedTuple):
    """A matrix in a parameter of a module.

    Attributes:
        weight: the path of the parameter in the module.
        bias: the path of the bias of its outputs, which may not exist.
        start: the first row of the matrix, if the parameter packs several matrices.
        rows: the number of its rows; None for all.
        transposed: whether the parameter is stored as (d_in, d_out).
    """

    weight: str = "weight"
    bias: str = "bias"
    start: int = 0
    rows: int | None = None
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """Return the matrix, (d_out, d_in), as a view of the parameter."""
        return parameter.T if self.transposed else self.bias_of(parameter).flatten(1)

    def bias_of(self, bias: Tensor) -> Tensor:
        """Return the bias of the outputs of the matrix, (d_out,)."""
        return bias[self._own(bias)]

    def _own(self, parameter: Tensor) -> slice:
        """Return the slice of a weight's or a bias's rows that belong to the matrix."""
        if self.rows is None or len(parameter) == self.rows:
            return slice(None)
        return slice(self.start, self.start + self.rows)

    def within(self, parameter: Tensor, changed: Tensor) -> Tensor:
        """Return a parameter or bias with the rows of the matrix replaced by `changed`."""
        if self.transposed:
            return changed.T
        rows = changed.reshape(len(changed), *parameter.shape[1:]).to(parameter.dtype)
        own = self._own(parameter)
        if own.stop is None:
            return rows
        return torch.slice_scatter(parameter, rows, 0, own.start, own.stop)

    def sizes(self, host: nn.Module) -> tuple[int, int]:
        """Return the input and the output size."""
        rows, columns = self.of(host.get_parameter(self.weight)).shape
        return columns, rows


def matrices_in(module: nn.Module) -> dict[str, WeightMatrix]:
    """Map roles to the matrices of a module; "" is the role of a single matrix.

    Returns:
        {} for a projection, for a weight that is computed from other parameters (a weight norm),
        and for any other module.
    """
    if isinstance(module, nn.MultiheadAttention):
        return _of_attention(module)
    if not isinstance(module._parameters.get("weight"), nn.Parameter):  # computed from others
        return {}
    if isinstance(module, CONVOLUTIONS):
        return {"": WeightMatrix()}
    return {"": WeightMatrix(transposed=True)} if is_table(module) else {}


def is_table(module: nn.Module) -> bool:
    """Return whether a module looks up rows of its weight, optionally scaled.

    transformers' scaled embeddings store the factor as `embed_scale`. False for an embedding with
    another forward, such as one that counts positions itself, and for one that changes its rows
    (`max_norm`).
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if len(module._parameters) > 1:  # a separate row for some token
        return False
    return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")


def _of_attention(attention: nn.MultiheadAttention) -> dict[str, WeightMatrix]:
    """Return the matrices of torch's attention; its forward reads all parameters directly."""
    size = attention.embed_dim
    matrices: dict[str, WeightMatrix] = {}
    for number, role in enumerate("qkv"):
        own = f"{role}_proj_weight"  # if keys or values have another size; biases are packed
        apart = getattr(attention, own, None) is not None
        weight = own if apart else "in_proj_weight"
        matrices[role] = WeightMatrix(weight, "in_proj_bias", number * size, size)
    if attention.in_proj_weight is not None:
        matrices["qkv"] = WeightMatrix("in_proj_weight", "in_proj_bias")
    matrices["o"] = WeightMatrix("out_proj.weight", "out_proj.bias")
    return matrices
