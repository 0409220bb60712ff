"""The low-rank updates of a peft checkpoint, one for each adapted module or parameter.

    lora_A.weight, lora_B.weight                 of a projection
    lora_embedding_A, lora_embedding_B           of an embedding
    lora_magnitude_vector, lora_B.bias           with use_dora, with lora_bias
    lora_diag                                    with kasa_config
    base_layer.lora_A.weight, lora_A.weight      of the first and the second of `target_parameters`
                                                 in a module

The factors of E stacked matrices, such as experts, are stored as A: (E rank, d_in) and
B: (d_out, rank E); or each expert has separate tensors, in files from before transformers stacked
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.projections import CONVOLUTIONS
from adapterhub.anatomy.sites import Site
from adapterhub.interchange.peft.experts import (
    WRAPPER,
    StoredModule,
    find_stored,
    joined,
    packed,
    stored_modules,
)
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.kernels import OTHER_KERNEL, as_factor, only_shifts
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation
from adapterhub.methods.pissa import principal

_KEY = re.compile(
    r"(?P<path>.+)\.lora_(?:embedding_)?(?P<what>A|B|magnitude_vector|diag|B\.bias)(?:\.weight)?"
)
BIAS = "B.bias"
TIMES_OUTPUT = 2  # peft 0.21 adds the update of the output of torch's MultiheadAttention twice


@dataclass
class Update:
    """The update of one module, or of one parameter of it.

    `file_path` is the module's path in the checkpoint, `path` its path in the model; `parameter` is
    "" for the weight of a projection or an embedding. `tensors` are A: (rank, d_in), B: (d_out,
    rank) and, if present, magnitude_vector: (d_out,), diag: (rank,) and BIAS: (d_out,). `blocks`
    has the number of blocks that A, or B, consists of.
    """

    file_path: str
    path: str
    rank: int
    alpha: float
    scale: float
    tensors: dict[str, Tensor]
    parameter: str = ""
    blocks: Mapping[str, int] = field(default_factory=dict)

    def shape_problems(self, d_in: int, d_out: int, matrices: int = 1) -> list[str]:
        """Return one line for each tensor that does not fit a weight, (d_out, d_in).

        The factors may belong to several stacked matrices.
        """
        rank, split = self.rank * matrices, self.blocks.get
        shapes = {
            "A": (rank, d_in // split("A", 1)),
            "B": (d_out, rank // split("B", 1)),
            "magnitude_vector": (d_out,),
            "diag": (rank,),
            BIAS: (d_out,),
        }
        return [
            f"{self.file_path}: {name} is {tuple(tensor.shape)}, here it must be {shapes[name]}"
            for name, tensor in sorted(self.tensors.items())
            if tuple(tensor.shape) != shapes[name]
        ]


def read_updates(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> tuple[list[Update], dict[str, Tensor]]:
    """Collect the updates of a checkpoint, and the remaining tensors."""
    by_path: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        if match := _KEY.fullmatch(name):
            by_path.setdefault(match["path"], {})[match["what"]] = tensor.to(torch.float32)
        else:
            rest[name] = tensor
    experts = _of_stored_modules(files.config, by_path, finder, translation)
    updates = (_update(files.config, p, t, finder, translation) for p, t in by_path.items())
    return [*experts, *(update for update in updates if update is not None)], rest


def _of_stored_modules(
    config: Mapping[str, Any],
    by_path: dict[str, dict[str, Tensor]],
    finder: ModuleFinder,
    translation: Translation,
) -> list[Update]:
    """Collect the updates of modules that this transformers stacks, such as an expert's.

    They are removed from `by_path`.
    """
    unknown = [path for path in by_path if WRAPPER not in path and finder.find(path) is None]
    modules = stored_modules(translation.anatomy) if unknown else {}
    by_site: dict[Site, dict[str, StoredModule]] = {}
    for path in unknown:
        part = find_stored(path, modules)
        if part is not None and by_path[path].keys() == {"A", "B"}:
            by_site.setdefault(part.site, {})[path] = part
    finder.stored.update(path for parts in by_site.values() for path in parts)
    updates = []
    for site, parts in by_site.items():
        pieces = {}
        for path, part in parts.items():
            rank, alpha, scale = _scale(config, path, finder)
            pieces[path] = Update(path, path, rank, alpha, scale, by_path.pop(path))
            wrong = pieces[path].shape_problems(site.d_in, part.stop - part.start)
            translation.problems += wrong
        if not translation.problems:
            updates.append(_joined_update(config, site, parts, pieces, finder))
    return updates


def _joined_update(
    config: Mapping[str, Any],
    site: Site,
    parts: Mapping[str, StoredModule],
    pieces: Mapping[str, Update],
    finder: ModuleFinder,
) -> Update:
    """Join the updates of the modules that a weight is stacked from, as peft packs them."""
    scales = {piece.scale for piece in pieces.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    factors = []
    for path, piece in pieces.items():
        low, high = piece.tensors["A"], piece.tensors["B"]
        # Equal scales leave the factors bit-identical.
        factors.append((parts[path], low, high * (piece.scale / scale)))
    low, high = joined(site, factors)
    rank = low.shape[-2]
    alpha = scale * (math.sqrt(rank) if config["use_rslora"] else rank)
    alpha = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
    low, high = packed(site, finder.modules[site.host], low, high)
    assert site.held is not None
    tensors = {"A": low, "B": high}
    return Update(site.host, site.host, rank, alpha, scale, tensors, site.held.parameter)


def _scale(config: Mapping[str, Any], path: str, finder: ModuleFinder) -> tuple[int, float, float]:
    """Return the rank, the alpha and the scale of the update at a path."""
    rank = finder.targets.value_at(config["rank_pattern"], path, config["r"])
    alpha = finder.targets.value_at(config["alpha_pattern"], path, config["lora_alpha"])
    return rank, alpha, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def _update(
    config: Mapping[str, Any],
    file_path: str,
    tensors: dict[str, Tensor],
    finder: ModuleFinder,
    translation: Translation,
) -> Update | None:
    """Collect the update of one module, or report why it cannot be used."""
    module_path = file_path
    while module_path.endswith(WRAPPER):
        module_path = module_path.removesuffix(WRAPPER)
    output = f"{WRAPPER}.out_proj"  # of torch's attention
    if module_path.endswith(output) and "B" in tensors:
        module_path = module_path.removesuffix(output) + ".out_proj"
        tensors["B"] = TIMES_OUTPUT * tensors["B"]
    path = finder.find(module_path)
    if path is None:
        translation.problems.append(f"{file_path}: this backbone has no such module")
        return None
    names = finder.targets.parameters_at(module_path, finder.modules[path])
    depth = file_path.count(WRAPPER)
    # The first parameter has the innermost wrapper.
    parameter = names[len(names) - 1 - depth] if depth < len(names) else ""
    target = f"{module_path}.{parameter}" if parameter else file_path
    needed = {"A", "B"} | ({"magnitude_vector"} if config["use_dora"] else set())
    needed |= {BIAS} if config["lora_bias"] else set()
    needed |= {"diag"} if config["kasa_config"] else set()
    if tensors.keys() != needed:
        wrong = [f"{n} missing" for n in sorted(needed - tensors.keys())]
        wrong += [f"{n} unexpected" for n in sorted(tensors.keys() - needed)]
        translation.problems.append(f"{file_path}: {', '.join(wrong)}")
        return None
    module = finder.modules[path]
    if isinstance(module, CONVOLUTIONS) and not only_shifts(module):
        translation.problems.append(f"{file_path}: {OTHER_KERNEL}")
        return None
    tensors = {name: as_factor(module, name, tensor) for name, tensor in tensors.items()}
    rank, alpha, scale = _scale(config, target, finder)
    blocks = _blocks(config["use_bdlora"] or {}, module_path)
    return Update(file_path, path, rank, alpha, scale, tensors, parameter, blocks)


def _blocks(config: Mapping[str, Any], path: str) -> dict[str, int]:
    """Return the number of blocks of the factor that peft divides at a module."""
    patterns = {"A": config.get("target_modules_bd_a"), "B": config.get("target_modules_bd_b")}
    return {
        factor: config["nblocks"]
        for factor, names in patterns.items()
        if any(pattern in path for pattern in names or ())
    }


# Initializations that keep W.
_PLAIN = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


def subtracted_initialization(config: Mapping[str, Any], translation: Translation) -> str:
    """Return the decomposition whose leading part was subtracted from W, "" if none.

    PiSSA and OLoRA start from a part of W and replace W by W - s B0 A0, so their files apply to
    that weight. Like peft, which only has W on loading, the importer recomputes B0 and A0.
    """
    init = config["init_lora_weights"]
    name = init.lower() if isinstance(init, str) else init
    if name in _PLAIN:
        return ""
    assert isinstance(name, str)
    decomposition, _, iterations = name.partition("_niter_")
    if config["use_dora"] or decomposition not in _DECOMPOSITIONS:
        translation.problems.append(
            f"init_lora_weights: {init!r} changed weights that are not in the files"
        )
        return ""
    if iterations:
        translation.notes.append(
            f"init_lora_weights {init}: the randomized decomposition that was subtracted from the "
            "weights is not in the files; the exact one is used instead"
        )
    return decomposition


def subtracted_factors(
    initialization: str, module: nn.Module, weight: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the subtracted part s B0 A0 of a module's weight.

    `initialization` is pissa or olora, `weight` W: (d_out, d_in), `scale` s. The rank is lower if W
    has fewer components.

    Returns:
        B0: (d_out, rank) and A0: (rank, d_in).
    """
    return _DECOMPOSITIONS[initialization](module, weight, rank, scale)


def _components(
    module: nn.Module, weight: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    left, right = principal(weight, rank, 0)
    return left / scale**0.5, right / scale**0.5


def _orthonormal(
    module: nn.Module, weight: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    transposed = isinstance(module, Conv1D)  # peft decomposes the weight as stored
    q, r = torch.linalg.qr(weight.T if transposed else weight)
    q, r = q[:, :rank], r[:rank]
    return (r.T, q.T) if transposed else (q, r)


_DECOMPOSITIONS = {"pissa": _components, "olora": _orthonormal}
