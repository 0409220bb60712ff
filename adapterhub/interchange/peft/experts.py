"""peft's updates of parameters (`target_parameters`), such as the stacked weights of experts.

    W_e + s B_e A_e        A_e: (rank, d_in), B_e: (d_out, rank), one pair for each expert e

peft keeps the factors of all experts in two matrices, A by expert and B by rank:

    lora_A.weight    (experts rank, d_in)      rows of expert 0, of expert 1, ...
    lora_B.weight    (d_out, rank experts)     columns of rank 0 for all experts, of rank 1, ...

It wraps the module once for each of its parameters, in their order: the tensors of the first
of two are called `experts.base_layer.lora_A.weight`, those of the second `experts.lora_A.weight`.

peft reads whether a matrix is stored as (d_in, d_out) from an attribute of the module. A model
without that attribute (Llama 4) gets W_e^T + s B_e A_e, and so W_e + s A_e^T B_e^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site, join
from adapterhub.interchange.peft.targets import ends_with

WRAPPER = ".base_layer"
Factors = tuple[Tensor, Tensor]


def held_sites(anatomy: Anatomy) -> dict[tuple[str, str], Site]:
    """Map a module's path and the name of its parameter to the site of that weight."""
    sites = {(s.host, s.held.parameter): s for s in anatomy.sites.values() if s.held}
    # The only weight of a router is also that of the module as a whole.
    return sites | {(s.host, ""): s for s in sites.values() if s.held and not s.held.experts}


def parameter_path(site: Site) -> str:
    """Return the path of the parameter that a host multiplies by itself."""
    assert site.held is not None
    return join(site.host, site.held.parameter)


def is_exchanged(site: Site, module: nn.Module) -> bool:
    """Return whether peft takes the outputs of a weight for its inputs.

    It takes a matrix for (d_out, d_in), and stacked ones too unless the module is `is_transposed`.
    """
    assert site.held is not None
    stacked = site.held.experts is not None
    return site.held.transposed != (stacked and bool(getattr(module, "is_transposed", False)))


def unpacked(site: Site, module: nn.Module, low: Tensor, high: Tensor) -> Factors:
    """Return A and B of a site from peft's matrices; stacked for experts.

    Returns:
        (experts, rank, d_in) and (experts, d_out, rank), or those of one matrix.
    """
    assert site.held is not None
    if count := site.held.experts:
        low = low.reshape(count, -1, low.shape[-1])
        high = high.reshape(len(high), -1, count).permute(2, 0, 1)
    return _exchanged(low, high) if is_exchanged(site, module) else (low, high.contiguous())


def packed(site: Site, module: nn.Module, low: Tensor, high: Tensor) -> Factors:
    """Return peft's matrices of A and B of a site, as `unpacked` takes them."""
    if is_exchanged(site, module):
        low, high = _exchanged(low, high)
    if low.ndim == 2:
        return low, high
    return low.flatten(0, 1), high.permute(1, 2, 0).flatten(1)


def _exchanged(low: Tensor, high: Tensor) -> Factors:
    """Return the factors of the transposed product."""
    return high.mT.contiguous(), low.mT.contiguous()


def wrapped_names(parameters: Iterable[str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map the paths of adapted parameters to the module paths that begin peft's tensor names."""
    chosen = set(parameters)
    names: dict[str, str] = {}
    for host in {path.rpartition(".")[0] for path in chosen}:
        own = [name for name, _ in modules[host].named_parameters(recurse=False)]
        own = [name for name in own if join(host, name) in chosen]
        for depth, name in enumerate(reversed(own)):
            names[join(host, name)] = host + depth * WRAPPER
    return names


def parameter_names(paths: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return names for `target_parameters` that match exactly these parameters.

    They are the last two components of the paths, or the paths.
    """
    short = sorted({".".join(path.split(".")[-2:]) for path in paths})
    every = (
        join(host, name)
        for host, module in modules.items()
        for name, _ in module.named_parameters(recurse=False)
    )
    matched = {path for path in every if ends_with(path, short)}
    return short if matched == set(paths) else sorted(paths)


def stacked(pairs: Sequence[Factors], experts: int) -> Factors:
    """Stack the factors of each expert, or repeat those that all of them share."""
    lows, highs = (torch.stack(factors) for factors in zip(*pairs, strict=True))
    return lows.expand(experts, -1, -1), highs.expand(experts, -1, -1)
