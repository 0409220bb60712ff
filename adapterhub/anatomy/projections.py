"""Projections: modules that multiply by a matrix, whatever library they come from.

Also weights that a module multiplies by in its own forward: of routed experts, and of routers. A
mixture of experts holds the projections of all experts as tensors of three dimensions:

    gate_up_proj    (experts, 2 d_inner, d)        up_proj    (experts, d_inner, d)
    down_proj       (experts, d, d_inner)

Some architectures store each matrix transposed. A router is a matrix too, (experts, d), inside a
module that returns more than the product: scores, and the numbers of the selected experts.

Other modules have matrices in their parameters: kernels, tables, packed weights.

    Conv1d, Conv2d, Conv3d   (d_out, d_in / groups, k, ...)   as (d_out, d_in / groups * k * ...)
    Embedding                (numbers, d)                     as (d, numbers)
    MultiheadAttention       (3 d, d)                         as three of (d, d)

A convolution is a projection of patches of its input: so what changes a matrix changes a kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from adapterhub.anatomy.forward_source import multiplies_otherwise, returns_tuple
from adapterhub.anatomy.own_modules import own_modules

# Parameters of three dimensions, and the roles of the projections that they hold.
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

    torch's `Linear`, its quantized variants, with a weight or with packed codes, and GPT-2's
    `Conv1D`. None is a subclass that multiplies in another way, or the output projection of torch's
    attention, which never runs: the attention reads its weight.
    """
    if multiplies_otherwise(module) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    has_size = hasattr(module, "in_features") and hasattr(module, "out_features")
    has_size = has_size or hasattr(module, "nx")
    return has_size and getattr(module, "weight", module) is not None


def plain_projections(module: nn.Module) -> dict[str, nn.Module]:
    """Map paths to the projections inside a module whose output is one tensor."""
    return {p: m for p, m in own_modules(module) if is_projection(m) and not returns_tuple(m)}


def latent_sizes(attention: nn.Module) -> tuple[int, int] | None:
    """Return the sizes of the keys and the values of latent attention, which it makes itself.

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
    """Return the size that most projections of some layers have, as input or output; 0 if none."""
    projections = [m for layer in layers for m in layer.modules() if is_projection(m)]
    sizes = Counter(n for m in projections for n in {in_features(m), out_features(m)})
    return sizes.most_common(1)[0][0] if sizes else 0


class HeldWeight(NamedTuple):
    """A parameter that its module multiplies by.

    Attributes:
        parameter: the name of the parameter in the module.
        experts: how many matrices it holds; None if it is one matrix.
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
        {} for any other module, and for one whose weights are quantized.
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
    """Return how the module declares its matrices; else what their sizes allow.

    The output of `down` has the size of the input of the others.
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
    """Return the weight of a router whose output is not the product alone; None for others."""
    if is_projection(module) and not returns_tuple(module):
        return None
    weight = module._parameters.get("weight")
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    return HeldWeight("weight") if plain else None


def router_path(layer: nn.Module, experts: str) -> str | None:
    """Return the path of the router beside the experts at a path; None if there is none.

    It is the first module beside them that is named as a router and has one output for each.
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
        bias: the path of the bias of its outputs; there may be none.
        start: the first row that belongs to the matrix, where others are packed with it.
        rows: how many do; None for all.
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
        """Return which rows of a weight or a bias belong to the matrix."""
        if self.rows is None or len(parameter) == self.rows:
            return slice(None)
        return slice(self.start, self.start + self.rows)

    def within(self, parameter: Tensor, changed: Tensor) -> Tensor:
        """Return a parameter, or a bias, with other rows in the place of those of the matrix."""
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
    """Map the roles of the matrices of a module to them; "" is the role of the only one.

    Returns:
        {} for a projection, for a weight that is computed of other parameters (a weight norm), and
        for any other module.
    """
    if isinstance(module, nn.MultiheadAttention):
        return _of_attention(module)
    if not isinstance(module._parameters.get("weight"), nn.Parameter):  # made of others
        return {}
    if isinstance(module, CONVOLUTIONS):
        return {"": WeightMatrix()}
    return {"": WeightMatrix(transposed=True)} if is_table(module) else {}


def is_table(module: nn.Module) -> bool:
    """Return whether a module looks up rows of its weight, perhaps with a factor on them.

    transformers' scaled embeddings keep that as `embed_scale`. An embedding with another forward,
    as of positions that it counts itself, or one that changes its rows (`max_norm`), is none.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if len(module._parameters) > 1:  # a row of its own for some token
        return False
    return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")


def _of_attention(attention: nn.MultiheadAttention) -> dict[str, WeightMatrix]:
    """Return the matrices of torch's attention, whose forward reads all parameters itself."""
    size = attention.embed_dim
    found: dict[str, WeightMatrix] = {}
    for number, role in enumerate("qkv"):
        own = f"{role}_proj_weight"  # where keys or values have another size; biases are packed
        apart = getattr(attention, own, None) is not None
        weight = own if apart else "in_proj_weight"
        found[role] = WeightMatrix(weight, "in_proj_bias", number * size, size)
    if attention.in_proj_weight is not None:
        found["qkv"] = WeightMatrix("in_proj_weight", "in_proj_bias")
    found["o"] = WeightMatrix("out_proj.weight", "out_proj.bias")
    return found
