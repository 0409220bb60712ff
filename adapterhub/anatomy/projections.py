"""Projections: modules that multiply by a matrix, whatever library they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from adapterhub.anatomy.forward_source import multiplies_otherwise, returns_tuple
from adapterhub.anatomy.own_modules import own_modules


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a matrix with an input and an output size.

    torch's `Linear`, its quantized variants, with a weight or with packed codes, and GPT-2's
    `Conv1D`. None is a subclass that multiplies in another way.
    """
    if multiplies_otherwise(module):
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
