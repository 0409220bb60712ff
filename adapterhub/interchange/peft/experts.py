"""peft's updates of parameters (`target_parameters`), such as the stacked weights of experts.

    W_e + s B_e A_e        A_e: (rank, d_in), B_e: (d_out, rank), one pair for each expert e

peft keeps the factors of all experts in two matrices, A by expert and B by rank:

    lora_A.weight    (experts rank, d_in)      rows of expert 0, of expert 1, ...
    lora_B.weight    (d_out, rank experts)     columns of rank 0 for all experts, of rank 1, ...

It wraps the module once for each of its parameters, in their order: the tensors of the first of two
are called `experts.base_layer.lora_A.weight`, the tensors of the second `experts.lora_A.weight`.

An attribute of the module tells peft whether a matrix is stored as (d_in, d_out). A model without
this attribute (Llama 4) gets W_e^T + s B_e A_e, and so W_e + s A_e^T B_e^T.

Checkpoints may have a module for each expert (`experts.3.up_proj`), which transformers stacks on
loading: peft trained these before transformers 5, and vLLM accepts LoRAs under these names.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from adapterhub.anatomy.sites import Anatomy, Site, join
from adapterhub.interchange.peft.targets import ends_with

WRAPPER = ".base_layer"
Factors = tuple[Tensor, Tensor]


def held_sites(anatomy: Anatomy) -> dict[tuple[str, str], Site]:
    """Map a module's path and the name of its parameter to the site of that weight."""
    sites = {(s.host, s.held.parameter): s for s in anatomy.sites.values() if s.held}
    # The only weight of a router is also the weight of the whole module.
    return sites | {(s.host, ""): s for s in sites.values() if not is_of_experts(s)}


def parameter_path(site: Site) -> str:
    """Return the path of the parameter that a host multiplies by itself."""
    assert site.held is not None
    return join(site.host, site.held.parameter)


def is_of_experts(site: Site) -> bool:
    """Return whether a site is a stacked weight of routed experts."""
    return site.held is not None and site.held.experts is not None


def is_exchanged(site: Site, module: nn.Module) -> bool:
    """Return whether peft confuses the outputs of a weight with its inputs.

    It assumes that a matrix is (d_out, d_in), and stacked ones too unless the module is
    `is_transposed`.
    """
    assert site.held is not None
    declared = is_of_experts(site) and bool(getattr(module, "is_transposed", False))
    return site.held.transposed != declared


def unpacked(site: Site, module: nn.Module, low: Tensor, high: Tensor) -> Factors:
    """Return A and B of a site from peft's matrices; stacked for experts.

    Returns:
        (experts, rank, d_in) and (experts, d_out, rank), without experts for one matrix.
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
    return flattened(low, high) if is_of_experts(site) else (low, high)


def flattened(low: Tensor, high: Tensor) -> Factors:
    """Return the stacked factors of experts as two matrices: A by expert, and B by rank."""
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


@dataclass(frozen=True)
class StoredModule:
    """A module of a checkpoint that is part of a weight: some outputs of one expert.

    `expert` is 0 for a weight that is not stacked; `start` and `stop` number its outputs.
    """

    site: Site
    expert: int
    start: int
    stop: int


def stored_modules(anatomy: Anatomy) -> dict[str, StoredModule]:
    """Map the paths of modules in a checkpoint to their parts of held weights.

    The modules are the ones that `save_pretrained` writes. Weights that are stacked in a checkpoint
    are omitted.
    """
    modules: dict[str, StoredModule] = {}
    for site in anatomy.sites.values():
        if not site.held:
            continue
        stored = {parameter_path(site): _numbered(site)}
        if not anatomy.backbone.foreign:  # other libraries write what is in the model
            model = copy.copy(anatomy.backbone.pretrained)
            vars(model).pop("_weight_conversions", None)  # a quantization, which cannot be undone
            stored = revert_weight_conversion(model, stored)
        for name, outputs in stored.items():
            first, last = int(outputs.min()), int(outputs.max())
            expert, start = divmod(first, site.d_out)
            whole = outputs.numel() == last + 1 - first and last // site.d_out == expert
            if name.endswith(".weight") and whole and outputs.ndim == 2:
                part = StoredModule(site, expert, start, last + 1 - expert * site.d_out)
                modules[name.removesuffix(".weight")] = part
    return modules


def _numbered(site: Site) -> Tensor:
    """Return a stand-in for a weight that holds the numbers of its outputs, of all experts."""
    assert site.held is not None
    outputs = torch.arange((site.held.experts or 1) * site.d_out)
    stacked = outputs.view(-1, site.d_out, 1)
    stacked = stacked.mT if site.held.transposed else stacked
    return stacked if site.held.experts else stacked[0]


def find_stored(path: str, modules: Mapping[str, StoredModule]) -> StoredModule | None:
    """Return the part of a weight at a path in a checkpoint; None if it does not exist.

    Paths may differ before the first number, the layer's.
    """
    if path in modules:
        return modules[path]
    tail = _from_layer(path)
    same = [part for name, part in modules.items() if tail and _from_layer(name) == tail]
    return same[0] if len(same) == 1 else None


def _from_layer(path: str) -> str:
    number = re.search(r"\.\d+\.", path)
    return path[number.start() :] if number else ""


def joined(site: Site, pieces: Sequence[tuple[StoredModule, Tensor, Tensor]]) -> Factors:
    """Join the updates of modules that a weight is stacked from.

    The parts of an expert with the same A, such as gate and up in vLLM's files, share its ranks.
    Other parts have separate ranks, and zeros elsewhere.

    Args:
        site: the weight.
        pieces: A: (rank, d_in) and B: (outputs of the module, rank), for each module.

    Returns:
        (experts, rank, d_in) and (experts, d_out, rank), without experts for one matrix.
    """
    assert site.held is not None
    count = site.held.experts or 1
    lows: list[list[Tensor]] = [[] for _ in range(count)]
    highs: list[list[Tensor]] = [[] for _ in range(count)]
    for part, low, high in pieces:
        rows = low.new_zeros(site.d_out, len(low))
        rows[part.start : part.stop] = high
        same = next((n for n, a in enumerate(lows[part.expert]) if torch.equal(a, low)), None)
        if same is None:
            lows[part.expert].append(low)
            highs[part.expert].append(rows)
        else:
            highs[part.expert][same] += rows
    rank = max(sum(map(len, own)) for own in lows)
    stacked_low = torch.zeros(count, rank, site.d_in)
    stacked_high = torch.zeros(count, site.d_out, rank)
    for expert, (own, rows_of) in enumerate(zip(lows, highs, strict=True)):
        if own:
            low, high = torch.cat(own), torch.cat(rows_of, dim=1)
            stacked_low[expert, : len(low)], stacked_high[expert, :, : len(low)] = low, high
    one = not is_of_experts(site)
    return (stacked_low[0], stacked_high[0]) if one else (stacked_low, stacked_high)
