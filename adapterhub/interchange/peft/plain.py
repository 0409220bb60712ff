"""Kinds of peft checkpoints that differ from our methods only in names: one row each.

A row is read forwards to import and backwards to export. Where layouts or options differ too, it
has a function for each direction. Ours and peft's tensors of one module:

    encoder.0.attn.q.loha.A1    ...attention.self.query.hada_w1_b
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.projections import CONVOLUTIONS
from adapterhub.anatomy.sites import Site, sites_option
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.interchange.peft.export_types import (
    CheckpointPart,
    ExportedModule,
    ExportSource,
    target_options,
)
from adapterhub.interchange.peft.files import Kind, PeftFiles
from adapterhub.interchange.peft.kernels import only_shifts
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation, size_options
from adapterhub.methods.adalora import AdaLoRA, SingularUpdate
from adapterhub.methods.adamss import (
    AdaMSS,
    ClusteredUpdate,
    clustered,
    clusters_of_rows,
    with_bias,
)
from adapterhub.methods.beft import BEFT, AddedBias, LoneBias
from adapterhub.methods.boft import BOFT, ButterflyRotation
from adapterhub.methods.c3a import C3A, CirculantUpdate
from adapterhub.methods.common.base import Method
from adapterhub.methods.common.ops import skew
from adapterhub.methods.deft import DEFT, ReplacedSubspace
from adapterhub.methods.delora import BoundedUpdate, DeLoRA
from adapterhub.methods.fourierft import FourierFT, SpectralUpdate
from adapterhub.methods.glora import GLoRA, ScaledShiftedWeight
from adapterhub.methods.gralora import BlockUpdates, GraLoRA
from adapterhub.methods.hira import HadamardWeight, HiRA
from adapterhub.methods.hra import HRA, Reflections
from adapterhub.methods.loha import HadamardProduct, LoHa
from adapterhub.methods.lokr import KroneckerUpdate, LoKr
from adapterhub.methods.lora_xs import LoRAXS
from adapterhub.methods.miss import MiSS, SharedShards
from adapterhub.methods.oft import OFT, CayleyRotation
from adapterhub.methods.osf import OSF, LowComponents
from adapterhub.methods.peanut import PEANuT, WeightNetwork
from adapterhub.methods.psoft import PSOFT, RotatedCore
from adapterhub.methods.randlora import RandLoRA, ScaledBases
from adapterhub.methods.road import PairRotation, RoAd
from adapterhub.methods.shira import SHiRA, SparseUpdate
from adapterhub.methods.unilora import TakenFactors, UniLoRA
from adapterhub.methods.vblora import ComposedFactors, VBLoRA
from adapterhub.methods.vera import ScaledFactors, VeRA
from adapterhub.methods.waveft import WaveFT, WaveletUpdate

Values: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]


@dataclass
class PlainUpdate:
    """One adapted module: our options and tensors, and peft's.

    `host` is the backbone's module; `config` are peft's options; `theirs` its tensors by suffix.
    """

    site: Site
    host: nn.Module
    config: Mapping[str, Any]
    theirs: Tensors
    options: Values
    ours: Tensors


# Returns the features that cannot be expressed, "" if none.
Import: TypeAlias = Callable[[PlainUpdate], str]
# Returns peft's options and tensors; options that are None cannot be expressed.
Export: TypeAlias = Callable[[ExportedModule], tuple[Values, Tensors]]


# Shared tensors of all modules, by our names, where the file lacks them: computed from the
# checkpoint and the updates in the order of the model.
Share: TypeAlias = "Callable[[PeftFiles, list[PlainUpdate]], Tensors]"


def _imports_nothing(update: PlainUpdate) -> str:
    return ""


def _exports_nothing(part: ExportedModule) -> tuple[Values, Tensors]:
    return {}, {}


@dataclass(frozen=True)
class PlainKind:
    """A kind of checkpoint.

    `tensors` are the suffixes of peft's tensors by our names, and may be absent where a function
    replaces them; `more` are other suffixes. `options` are peft's options by ours, `patterns` the
    options with other values for some modules. `rank` is a tensor of peft and the dimension that is
    our rank. `turned` tells that peft also adapts Conv1D. `shared` are peft's tensors by ours that
    all modules share, and `share` computes the ones missing from a file. A kind without a `module`
    is only imported.
    """

    kind: Kind
    method: type[Method]
    module: type[nn.Module] | None
    tensors: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    patterns: Mapping[str, str] = field(default_factory=dict)
    rank: tuple[str, int] | None = None
    more: tuple[str, ...] = ()
    turned: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)
    share: Share | None = None
    imported: Import = _imports_nothing
    exported: Export = _exports_nothing

    @property
    def without_tensors(self) -> bool:
        """Whether modules may lack tensors."""
        return not self.tensors

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All suffixes of peft's tensors."""
        return (*self.tensors.values(), *self.more)


def _transposed(*names: str) -> tuple[Import, Export]:
    """Return the functions of a kind with tensors that peft stores transposed."""

    def imported(update: PlainUpdate) -> str:
        update.ours |= {name: update.ours[name].mT.contiguous() for name in names}
        return ""

    def exported(part: ExportedModule) -> tuple[Values, Tensors]:
        return {}, {name: getattr(part.module, name).detach().mT for name in names}

    return imported, exported


def _import_lokr(update: PlainUpdate) -> str:
    theirs, ours = update.theirs, update.ours
    if "lokr_w1_a" in theirs:
        ours["C"] = theirs["lokr_w1_a"] @ theirs["lokr_w1_b"]
    return ""


def _import_miss(update: PlainUpdate) -> str:
    if update.config["init_weights"] == "mini":
        repeats = update.site.d_out // update.theirs["miss_block"].shape[1]
        update.ours["D"] = update.ours["D"].repeat(1, repeats)
    update.ours["D"] = update.ours["D"].T.contiguous()
    return ""


def _import_gralora(update: PlainUpdate) -> str:
    for name in ("A", "B"):
        update.ours[name] = update.ours[name].mT.contiguous()
    update.options["pieces"] = len(update.ours["A"])
    return ""


def _import_oft(update: PlainUpdate) -> str:
    config, upper = update.config, update.ours["Q"]
    size = (1 + math.isqrt(1 + 8 * upper.shape[1])) // 2
    blocks = update.site.d_in // size
    if upper.shape != (1 if config["block_share"] else blocks, size * (size - 1) // 2):
        return f"oft_R has the shape {tuple(upper.shape)}"
    terms = config["num_cayley_neumann_terms"] if config["use_cayley_neumann"] else 0
    if terms == 0:
        update.ours["Q"] = -upper  # peft's exact form is the inverse of its series
    if config["use_cayley_neumann"] and terms == 1:
        return "num_cayley_neumann_terms: 1 is not a rotation"
    # peft computes the fourth term with 3, too.
    update.options |= {"block": size, "terms": 4 if terms == 3 else terms}
    return ""


def _export_oft(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    exact = module.terms == 0
    terms = None if module.terms in (1, 3) else module.terms
    options = {
        "oft_block_size": module.block,
        "use_cayley_neumann": not exact,
        "num_cayley_neumann_terms": 5 if exact else terms,
    }
    return options, {"Q": -module.Q.detach() if exact else module.Q.detach()}


def _import_boft(update: PlainUpdate) -> str:
    theirs = update.theirs["boft_R"]
    if theirs.ndim != 4 or len(theirs) != 1:
        return f"boft_R has the shape {tuple(theirs.shape)}: one butterfly factor is imported"
    size = theirs.shape[-1]
    rows, columns = torch.triu_indices(size, size, 1)
    # peft's rotation is the inverse of ours.
    update.ours["Q"] = -0.5 * (theirs - theirs.mT)[..., rows, columns]
    update.ours["s"] = update.ours["s"].flatten()
    update.options |= {"block": size, "factors": 1}
    return ""


def _export_boft(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    blocks = -skew(module.Q.detach().flatten(0, 1), module.block)
    options = {
        "boft_block_size": module.block,
        "boft_n_butterfly_factor": 1 if len(module.Q) == 1 else None,
    }
    return options, {"Q": blocks[None], "s": module.s.detach()[:, None]}


_VARIANTS = {"road_1": 1, "road_2": 2, "road_4": 4}


def _import_road(update: PlainUpdate) -> str:
    group, variant = update.config["group_size"], _VARIANTS[update.config["variant"]]
    shape = (-1, 2 if variant == 4 else 1, 1 if variant == 1 else 2, group // 2)
    update.ours |= {name: tensor.reshape(shape) for name, tensor in update.ours.items()}
    update.options |= {"group": group, "variant": variant}
    return ""


def _export_road(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    method: Any = part.method
    options = {"group_size": module.group, "variant": f"road_{method.variant}"}
    return options, {name: getattr(module, name).detach().flatten() for name in ("angle", "scale")}


def _import_shira(update: PlainUpdate) -> str:
    indices = update.theirs["shira_indices"].long()
    sizes = torch.tensor([[update.site.d_out], [update.site.d_in]])
    if indices.ndim != 2 or len(indices) != 2 or (indices < 0).any() or (indices >= sizes).any():
        return "shira_indices are outside of the weight"
    update.ours["S.places"] = indices[0] * update.site.d_in + indices[1]
    update.options |= {"rank": update.config["r"], "places": "file"}
    return ""


def _export_shira(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    places, (d_out, d_in) = module.S.places, module.S.shape
    count = places.numel()
    rank, rest = divmod(count, d_in + d_out)
    indices = torch.stack([places // d_in, places % d_in]).int()
    values = module.S.values.detach()
    return {"r": None if rest else rank}, {"S.values": values, "shira_indices": indices}


def _import_supertuning(update: PlainUpdate) -> str:
    values, share = update.ours["S.values"], 1 - update.config["sparsity"]
    if (places := update.theirs.get("supertuning_indices")) is None:
        sizes = read_weight(update.host).detach().abs().flatten()
        places = sizes.topk(len(values), largest=update.config["select_top"]).indices
    update.ours["S.places"] = places.long()
    update.options |= {"share": share, "places": "file"}
    return "" if places.shape == values.shape else "as many values as indices are needed"


def _import_beft(update: PlainUpdate) -> str:
    update.ours["b"] = update.ours["b"].flatten()
    return ""


def _export_beft(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    return {}, {"b": module.b.detach()[None]}


def _import_osf(update: PlainUpdate) -> str:
    least = min(update.site.d_in, update.site.d_out)
    update.options["kept"] = (least - len(update.ours["S"])) / least
    return ""


def _export_osf(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    return {"effective_rank": module.left_kept.shape[1]}, {}


def _import_pvera(update: PlainUpdate) -> str:
    # Without samples it is the VeRA of the means; the other half are logarithms of variances.
    update.ours["d"] = update.ours["d"][: update.options["rank"]]
    update.options["stored"] = True
    return ""


def _share_pvera(files: PeftFiles, updates: list[PlainUpdate]) -> Tensors:
    return _share_vera(files, updates, variances=True)


def _import_tinylora(update: PlainUpdate) -> str:
    update.options |= {"rank": len(update.ours["A0"]), "stored": True}
    return ""


def _share_tinylora(files: PeftFiles, updates: list[PlainUpdate]) -> Tensors:
    """Compute R = sum_i v_i P_i of the updates, where groups of modules share v."""
    config, count = files.config, len(updates)
    groups = max(1, round(count * (1 - config["weight_tying"])))
    size = max(1, count // groups)
    for number, update in enumerate(updates):
        group = min(number // size, groups - 1)
        v = files.tensors.get(f"base_model.tinylora_v.{group}", torch.zeros(0)).flatten().float()
        rank = len(update.ours["A0"])
        shape = (len(v), rank, rank)
        if (matrices := update.theirs.get("tinylora_P")) is None:
            generator = torch.Generator().manual_seed(config["projection_seed"] + number)
            matrices = torch.normal(0.0, rank**-0.5, shape, generator=generator)
        if len(v) and matrices.shape == shape:  # without R the update is refused
            update.ours["R"] = torch.tensordot(v, matrices.float(), 1)
    return {}


def _import_psoft(update: PlainUpdate) -> str:
    rank, config, ours = update.options["rank"], update.config, update.ours
    terms = config["num_cayley_neumann_terms"] if config["use_cayley_neumann"] else 0
    if terms == 1:
        return "num_cayley_neumann_terms: 1 is not a rotation"
    if ours["Q"].shape != (rank * (rank - 1) // 2,):
        return f"psoft_R.weight has the shape {tuple(ours['Q'].shape)}, and the rank is {rank}"
    for name in ("a", "b"):
        ours.setdefault(name, torch.ones(rank))
    ours["B0"], ours["A0"] = _psoft_components(update.host, rank)
    # peft computes the fourth term with 3, too.
    update.options |= {"terms": 4 if terms == 3 else terms, "stored": True}
    return ""


def _psoft_components(host: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """Return U_r S_r and V_r^T, with the signs of peft's decomposition."""
    u, s, vh = torch.linalg.svd(read_weight(host).detach().cpu(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).contiguous(), vh[:rank].contiguous()


def _export_psoft(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    rank, terms = len(module.a), module.terms
    options: Values = {
        "psoft_alpha": rank,
        "use_cayley_neumann": terms > 0,
        "num_cayley_neumann_terms": (terms or 5) if terms not in (1, 3) else None,
    }
    if part.site.part is not None or module.A0.is_meta:
        return options, {}  # a partial set is refused, and without values only the options count
    overlap = (_psoft_components(part.host, rank)[1] @ module.A0.detach().cpu().T).diagonal()
    if (overlap.abs() - 1).abs().max() > 1e-3:
        return options | {"components of these weights": None}, {}
    signs = overlap.sign()
    rows, columns = torch.triu_indices(rank, rank, 1)
    return options, {"Q": module.Q.detach().cpu() * signs[rows] * signs[columns]}


def _import_deft(update: PlainUpdate) -> str:
    config = update.config
    alpha, writes = float(config["alpha"] or 0), not config["para"]
    update.options |= {"alpha": alpha, "writes": writes}
    return ""


def _export_deft(part: ExportedModule) -> tuple[Values, Tensors]:
    method: Any = part.method
    alpha = {"alpha": method.alpha} if method.alpha else {}
    return {"para": not method.writes, **alpha}, {}


_DEEPEST = 64
_OF_DEPTH = {"E": "peanut_encoders", "D": "peanut_decoders"}


def _import_peanut(update: PlainUpdate) -> str:
    for ours, theirs in _OF_DEPTH.items() if update.options["depth"] else ():
        names = [f"{theirs}.{number}.weight" for number in range(update.options["depth"])]
        update.ours[ours] = torch.stack([update.theirs[name] for name in names])
    return ""


def _export_peanut(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    layers = {n: getattr(module, n) for n in _OF_DEPTH if getattr(module, n) is not None}
    return {}, {
        f"{_OF_DEPTH[name]}.{number}.weight": matrix
        for name, stack in layers.items()
        for number, matrix in enumerate(stack.detach())
    }


_SUPPORTS = {"left": "Xd", "right": "Xu", "value": "X"}


def _import_glora(update: PlainUpdate) -> str:
    for name in ("D.value", "E.value"):
        if name in update.ours and update.options["biases"] == "vector":
            update.ours[name] = update.ours[name][:, None]
    return ""


def _export_glora(part: ExportedModule) -> tuple[Values, Tensors]:
    module, site = part.module, part.site
    vectors = {n: t.detach() for n, t in module.named_parameters() if n[0] in "DE"}
    zeros = {
        "A": (site.d_out, site.d_in), "B": (site.d_out, site.d_in), "C": (site.d_in, 1),
        "D": (site.d_out,), "E": (site.d_out,),
    }  # fmt: skip
    absent = zeros.keys() - dict(module.named_children()).keys()
    return {}, {name: vector.flatten() for name, vector in vectors.items()} | {
        f"glora_{name}.zeros": torch.zeros(zeros[name]) for name in absent
    }


def _export_vblora(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    vectors, block = module.shared[0].v.shape
    return {"vector_length": block, "num_vectors": vectors, "topk": module.top}, {}


def _share_unilora(files: PeftFiles, updates: list[PlainUpdate]) -> Tensors:
    """Return how often each number of the vector is used, and set the places of the updates."""
    config = files.config
    rank, size = config["r"], config["theta_d_length"]
    sizes = [rank * (update.site.d_in + update.site.d_out) for update in updates]
    names = ("unilora_indices_A", "unilora_indices_B")
    if all(name in update.theirs for update in updates for name in names):
        places = [torch.cat([u.theirs[n].flatten().long() for n in names]) for u in updates]
    else:
        times, rest = divmod(sum(sizes), size)
        random = np.random.default_rng(config["proj_seed"])
        order = np.repeat(np.arange(size), times)
        if rest:
            order = np.concatenate([order, random.choice(size, size=rest, replace=False)])
        random.shuffle(order)
        places = list(torch.split(torch.from_numpy(order), sizes))
    for update, own in zip(updates, places, strict=True):
        update.ours["places"] = own.clone()
    taken = torch.cat(places)
    inside = bool(((taken >= 0) & (taken < size)).all())
    return {"vector.times": taken[taken >= 0].bincount(minlength=size).float()} if inside else {}


def _import_unilora(update: PlainUpdate) -> str:
    update.options["stored"] = True
    return ""


def _export_unilora(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    shared, shapes = module.shared[0], {"A": (module.rank, -1), "B": (-1, module.rank)}
    first = module.rank * module.d_in
    tensors: Tensors = {}
    for name, places in zip(shapes, (module.places[:first], module.places[first:]), strict=True):
        tensors[f"unilora_indices_{name}"] = places.view(shapes[name])
        tensors[f"unilora_scales_{name}"] = shared.times.rsqrt()[places].view(shapes[name])
    return {"save_indices": True}, tensors


_SAME_COMPONENTS = 1e-4  # of the cosine of two components that are the same


def _import_adamss(update: PlainUpdate) -> str:
    config, theirs, ours = update.config, update.theirs, update.ours
    site, count = update.site, len(ours["V"])
    d_out, clusters = site.d_out, min(config["num_subspaces"], site.d_out)
    if count > min(site.d_in, d_out):
        return f"{count} components of a weight with {site.d_in} inputs"
    weight = with_bias(read_weight(update.host).detach(), read_bias(update.host))
    places, components = clustered(weight, count, clusters, config["random_seed"])
    if not _same_clusters(weight, places, components, ours["V"], clusters):
        return (
            "adamss_newB has other components than this processor computes of these weights, so "
            "that the clusters, which the file does not hold, cannot be known: import it on the "
            "machine that trained it, and save it"
        )
    rank = max(len(theirs[f"adamss_A.{number}"]) for number in range(clusters))
    ours |= {"A": torch.zeros(clusters, rank, count), "B": torch.zeros(d_out, rank)}
    for number in range(clusters):
        a, b = (theirs[f"adamss_{name}.{number}"] for name in "AB")
        if b.shape != (int((places == number).sum()), len(a)):
            return f"adamss_B.{number} is of another cluster than that of these weights"
        ours["A"][number, : len(a)] = a
        ours["B"][places == number, : len(a)] = b
    ours["places"] = places
    update.options |= {
        "rank": rank, "clusters": clusters, "components": config["r"], "stored": True
    }  # fmt: skip
    return ""


def _same_clusters(
    weight: Tensor, places: Tensor, components: Tensor, stored: Tensor, clusters: int
) -> bool:
    """Return whether the clusters of a file match the clusters computed here.

    The rows of U are clustered; its columns belong to the components of the file. Where these are
    the same, up to signs, so are the clusters; otherwise the clusters of the rows of W V must
    agree.
    """
    stored, weight = stored.detach().float().cpu(), weight.float().cpu()
    cosines = (stored * components.float()).sum(1).abs()
    if bool((cosines - 1).abs().max() < _SAME_COMPONENTS):
        return True
    rows = weight @ stored.T
    rows = rows / rows.norm(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.equal(clusters_of_rows(rows, clusters), places)


def _export_adamss(part: ExportedModule) -> tuple[Values, Tensors]:
    module, method = part.module, part.method
    assert isinstance(module, ClusteredUpdate)
    assert isinstance(method, AdaMSS)
    clusters, rank, count = module.A.shape
    weight = with_bias(read_weight(part.host).detach(), read_bias(part.host))
    same = min(method.components, *weight.shape) == count  # peft counts the bias as an input
    options = {"r": method.components if same else count, "subspace_rank": rank, "random_seed": 0}
    if part.site.part is not None or module.V.is_meta:
        return options, {}
    places = module.places.cpu()
    if not torch.equal(clustered(weight, count, clusters)[0], places):
        return options | {"clusters of these weights": None}, {}
    tensors = {"V": module.V.detach()}
    for number in range(clusters):
        tensors[f"adamss_A.{number}"] = module.A[number].detach()
        tensors[f"adamss_B.{number}"] = module.B.detach().cpu()[places == number]
    return options, tensors


def _import_fourierft(update: PlainUpdate) -> str:
    site, count = update.site, update.ours["E.values"].numel()
    if count != update.options["coefficients"]:
        return f"{count} coefficients, n_frequency is {update.options['coefficients']}"
    generator = torch.Generator().manual_seed(update.config["random_loc_seed"])
    drawn = torch.randperm(site.d_in * site.d_out, generator=generator)
    update.ours["E.places"] = drawn[:count].clone()
    update.options["stored"] = True
    return ""


def _import_waveft(update: PlainUpdate) -> str:
    if update.site.d_in % 2 or update.site.d_out % 2:
        return "an odd size, whose transform peft centers"
    return _import_fourierft(update)


def _export_fourierft(part: ExportedModule) -> tuple[Values, Tensors]:
    return {"places in files": None}, {}


def _import_c3a(update: PlainUpdate) -> str:
    update.options["block"] = update.ours["k"].shape[-1]
    return ""


def _export_c3a(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    return {"block_size": module.k.shape[-1]}, {}


_SHARED = "fixed matrices in the file (stored=true)"


def _import_vera(update: PlainUpdate) -> str:
    update.options["stored"] = True
    return ""


def _share_vera(files: PeftFiles, updates: list[PlainUpdate], variances: bool = False) -> Tensors:
    rank, sites = files.config["r"], [update.site for update in updates]
    generator = torch.Generator().manual_seed(files.config["projection_prng_key"] or 0)
    d_in, d_out = max(site.d_in for site in sites), max(site.d_out for site in sites)
    shapes = {"fixed.A": (rank * (1 + variances), d_in), "fixed.B": (d_out, rank)}
    return {name: _kaiming(shape, generator) for name, shape in shapes.items()}


def _kaiming(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a tensor as peft does: uniform, with a deviation of sqrt(2 / fan-in)."""
    bound = math.sqrt(3) * (math.sqrt(2) / math.sqrt(math.prod(shape[1:])))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _export_vera(part: ExportedModule) -> tuple[Values, Tensors]:
    method: Any = part.method
    return {_SHARED: True if method.stored else None}, {}


def _import_adalora(update: PlainUpdate) -> str:
    rank, ours = update.options["rank"], update.ours
    missing = rank - len(ours["A"])
    if missing < 0:
        return f"lora_A has the shape {tuple(ours['A'].shape)}, and init_r is {rank}"
    # A peft file lacks the components that training has set to zero.
    ours["A"] = pad(ours["A"], (0, 0, 0, missing))
    ours["B"] = pad(ours["B"], (0, missing))
    ours["E"] = pad(ours["E"].flatten(), (0, missing))
    update.options["target"] = None
    if update.options["alpha"] <= 0:
        update.options["alpha"] = float(rank)
    return ""


def _export_adalora(part: ExportedModule) -> tuple[Values, Tensors]:
    module: Any = part.module
    method: Any = part.method
    rank = len(module.E)
    options = {"init_r": rank if rank == method.rank else None, "total_step": 1}
    if method.alpha <= 0:
        options["lora_alpha"] = None
    return options, {"E": module.E.detach()[:, None]}


_LEFT_RIGHT = ("A", "B")
_RANKS = {"r": "rank_pattern"}
_ROWS = (
    PlainKind(
        "LOHA", LoHa, HadamardProduct,
        {"A1": "hada_w1_b", "B1": "hada_w1_a", "A2": "hada_w2_b", "B2": "hada_w2_a"},
        {"rank": "r", "alpha": "alpha"}, {**_RANKS, "alpha": "alpha_pattern"}, ("hada_w1_b", 0),
    ),
    PlainKind(
        "LOKR", LoKr, KroneckerUpdate,
        {"C": "lokr_w1", "A": "lokr_w2_b", "B": "lokr_w2_a", "G": "lokr_w2"},
        {"rank": "r", "alpha": "alpha", "factor": "decompose_factor"},
        {**_RANKS, "alpha": "alpha_pattern"}, more=("lokr_w1_a", "lokr_w1_b"),
        imported=_import_lokr,
    ),
    PlainKind(
        "HIRA", HiRA, HadamardWeight, {"A": "hira_A", "B": "hira_B"}, {"rank": "r"},
        rank=("hira_A", 0), turned=True,
    ),
    PlainKind(
        "MISS", MiSS, SharedShards, {"D": "miss_block"}, {"rank": "r"},
        rank=("miss_block", 0), imported=_import_miss, exported=_transposed("D")[1],
    ),
    PlainKind(
        "SHIRA", SHiRA, SparseUpdate, {"S.values": "shira_weight"}, more=("shira_indices",),
        imported=_import_shira, exported=_export_shira,
    ),
    PlainKind(
        "GRALORA", GraLoRA, BlockUpdates,
        {"A": "gralora_A", "B": "gralora_B", "A0": "gralora_A_general.weight",
         "B0": "gralora_B_general.weight"},
        {"rank": "r", "alpha": "alpha", "pieces": "gralora_k", "hybrid": "hybrid_r"},
        rank=("gralora_A", 2), imported=_import_gralora, exported=_transposed("A", "B")[1],
        turned=True,
    ),
    PlainKind(
        "DELORA", DeLoRA, BoundedUpdate,
        {"A": "delora_A", "B": "delora_B", "strength": "delora_lambda", "norms": "delora_w_norm"},
        {"rank": "r", "strength": "delora_lambda"}, {**_RANKS, "delora_lambda": "lambda_pattern"},
        ("delora_A", 0),
    ),
    PlainKind(
        "OFT", OFT, CayleyRotation, {"Q": "oft_R.weight"}, {"share": "block_share"},
        imported=_import_oft, exported=_export_oft,
    ),
    PlainKind(
        "BOFT", BOFT, ButterflyRotation, {"Q": "boft_R", "s": "boft_s"},
        imported=_import_boft, exported=_export_boft,
    ),
    PlainKind(
        "HRA", HRA, Reflections, {"U": "hra_u"}, {"rank": "r"}, rank=("hra_u", 1),
        imported=_transposed("U")[0], exported=_transposed("U")[1],
    ),
    PlainKind(
        "ROAD", RoAd, PairRotation, {"angle": "road_theta", "scale": "road_alpha"},
        imported=_import_road, exported=_export_road,
    ),
    PlainKind(
        "VERA", VeRA, ScaledFactors, {"b": "vera_lambda_b", "d": "vera_lambda_d"}, {"rank": "r"},
        rank=("vera_lambda_d", 0), imported=_import_vera, exported=_export_vera, turned=True,
        shared={"fixed.A": "vera_A", "fixed.B": "vera_B"}, share=_share_vera,
    ),
    PlainKind(
        "PVERA", VeRA, None, {"b": "pvera_lambda_b", "d": "pvera_lambda_d"}, {"rank": "r"},
        imported=_import_pvera, turned=True,
        shared={"fixed.A": "pvera_A", "fixed.B": "pvera_B"}, share=_share_pvera,
    ),
    PlainKind(
        "TINYLORA", LoRAXS, None, {"A0": "tinylora_A", "B0": "tinylora_B"}, more=("tinylora_P",),
        imported=_import_tinylora, share=_share_tinylora, turned=True,
    ),
    PlainKind(
        "BEFT", BEFT, AddedBias, {"b": "beft_bias"},
        imported=_import_beft, exported=_export_beft,
    ),
    PlainKind(
        "OSF", OSF, LowComponents,
        {n: f"osf_svd_params.{n}_low" for n in "USV"}, {}, {"effective_rank": "rank_pattern"},
        imported=_import_osf, exported=_export_osf,
    ),
    PlainKind(
        "RANDLORA", RandLoRA, ScaledBases, {"l": "randlora_lambda", "g": "randlora_gamma"},
        {"rank": "r", "alpha": "randlora_alpha"}, rank=("randlora_lambda", 0),
        imported=_import_vera, exported=_export_vera, turned=True,
        shared={"fixed.A": "randlora_A", "fixed.B": "randlora_B"},
        more=("randlora_A", "randlora_B"),
    ),
    PlainKind(
        "FOURIERFT", FourierFT, SpectralUpdate, {"E.values": "fourierft_spectrum"},
        {"coefficients": "n_frequency", "scale": "scaling"}, {"n_frequency": "n_frequency_pattern"},
        imported=_import_fourierft, exported=_export_fourierft, turned=True,
    ),
    PlainKind(
        "WAVEFT", WaveFT, WaveletUpdate, {"E.values": "waveft_spectrum"},
        {"coefficients": "n_frequency", "scale": "scaling"}, {"n_frequency": "n_frequency_pattern"},
        imported=_import_waveft, exported=_export_fourierft, turned=True,
    ),
    PlainKind(
        "C3A", C3A, CirculantUpdate, {"k": "c3a_kernel"}, {}, {"block_size": "block_size_pattern"},
        imported=_import_c3a, exported=_export_c3a,
    ),
    PlainKind(
        "ADALORA", AdaLoRA, SingularUpdate, {"A": "lora_A", "E": "lora_E", "B": "lora_B"},
        {"rank": "init_r", "alpha": "lora_alpha"}, imported=_import_adalora,
        exported=_export_adalora, turned=True,
    ),
    PlainKind(
        "SUPERTUNING", SHiRA, None, {"S.values": "supertuning_values"},
        more=("supertuning_indices",), imported=_import_supertuning,
    ),
    PlainKind(
        "PSOFT", PSOFT, RotatedCore,
        {"Q": "psoft_R.weight", "a": "psoft_R.vector_a", "b": "psoft_R.vector_b"}, {"rank": "r"},
        imported=_import_psoft, exported=_export_psoft,
    ),
    PlainKind(
        "DEFT", DEFT, ReplacedSubspace, {"P": "deft_P", "R": "deft_R"},
        {"rank": "r", "basis": "decomposition_method"}, rank=("deft_P", 1),
        imported=_import_deft, exported=_export_deft, turned=True,
    ),
    PlainKind(
        "PEANUT", PEANuT, WeightNetwork, {"A": "peanut_A.weight", "B": "peanut_B.weight"},
        {"rank": "r", "depth": "depth", "scale": "scaling", "activation": "act_fn"},
        rank=("peanut_A.weight", 0), imported=_import_peanut, exported=_export_peanut,
        more=tuple(f"{n}.{i}.weight" for n in _OF_DEPTH.values() for i in range(_DEEPEST)),
    ),
    PlainKind(
        "GLORA", GLoRA, ScaledShiftedWeight,
        {f"{n}.{o}": f"glora_{n}.{t}" for n in "ABCDE" for o, t in _SUPPORTS.items()},
        {"rank": "r", "weights": "config_A_B", "prompt": "config_C", "biases": "config_D_E"},
        more=tuple(f"glora_{n}.zeros" for n in "ABCDE"),
        imported=_import_glora, exported=_export_glora,
    ),
    PlainKind(
        "VBLORA", VBLoRA, ComposedFactors, {"A": "vblora_logits_A", "B": "vblora_logits_B"},
        {"rank": "r", "vectors": "num_vectors", "block": "vector_length", "top": "topk"},
        rank=("vblora_logits_A", 0), shared={"bank.v": "vblora_vector_bank"},
        exported=_export_vblora, turned=True,
    ),
    PlainKind(
        "ADAMSS", AdaMSS, ClusteredUpdate, {"V": "adamss_newB"},
        {"clusters": "num_subspaces"},
        more=tuple(f"adamss_{name}.{number}" for name in "AB" for number in range(_DEEPEST)),
        imported=_import_adamss, exported=_export_adamss,
    ),
    PlainKind(
        "UNILORA", UniLoRA, TakenFactors, {}, {"rank": "r", "numbers": "theta_d_length"},
        more=tuple(f"unilora_{n}_{m}" for n in ("indices", "scales") for m in _LEFT_RIGHT),
        shared={"vector.v": "unilora_theta_d"}, share=_share_unilora,
        imported=_import_unilora, exported=_export_unilora, turned=True,
    ),
)  # fmt: skip
PLAIN: Mapping[Kind, PlainKind] = {row.kind: row for row in _ROWS}
_OF_KERNELS: tuple[Kind, ...] = ("LOHA", "HRA")  # change a kernel as a matrix, as here
PLAIN_MODULES: Mapping[type[nn.Module], Kind] = {
    **{row.module: row.kind for row in _ROWS if row.module},
    LoneBias: "BEFT",
}


def import_plain(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate the updates of a checkpoint of one of these kinds; return the other tensors."""
    row, anatomy = PLAIN[files.kind], translation.anatomy
    sites = {s.host: s for s in anatomy.every() if s.kind == "linear" and not s.part}
    by_path: dict[str, Tensors] = {}
    rest: Tensors = {}
    for name, tensor in files.tensors.items():
        suffix = next((s for s in row.suffixes if name.endswith(f".{s}")), None)
        if suffix is None or name == f"base_model.{suffix}":
            rest[name] = tensor
            continue
        value = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
        by_path.setdefault(name.removesuffix(f".{suffix}"), {})[suffix] = value
    if row.without_tensors:
        by_path = {p: by_path.get(p, {}) for p in finder.modules if p in finder.targets}
    updates: list[PlainUpdate] = []
    for file_path, theirs in by_path.items():
        path = finder.find(file_path)
        site = sites.get(path or "")
        if site is None:
            reason = "no such module" if path is None else "not a site"
            translation.problems.append(f"{file_path}: {reason} in this backbone")
            continue
        if problem := _kernel_problem(row.kind, site, finder.modules[site.host]):
            translation.problems.append(f"{file_path}: {problem}")
            continue
        update = _update(row, files.config, file_path, site, theirs, finder)
        if isinstance(update, str):
            translation.problems.append(f"{file_path}: {update}")
        else:
            updates.append(update)
    shared = _shared_tensors(row, files, updates, rest, translation)
    _add_methods(row, updates, translation)
    if updates:
        adapted = {update.site for update in updates}
        first = next(site for site in anatomy.every() if site in adapted)
        for name, tensor in shared.items():
            translation.tensors[f"{first.id}.{row.method.name}.{name}"] = tensor.float()
    return rest


def _update(
    row: PlainKind,
    config: Mapping[str, Any],
    file_path: str,
    site: Site,
    theirs: Tensors,
    finder: ModuleFinder,
) -> PlainUpdate | str:
    """Translate the update of one module; return the features that cannot be expressed."""
    values = dict(config)
    for option, pattern in row.patterns.items():
        values[option] = finder.targets.value_at(config.get(pattern), file_path, config[option])
    options = {ours: _as_ours(row, ours, values[name]) for ours, name in row.options.items()}
    host = finder.modules[finder.find(file_path) or ""]
    if row.rank is not None:
        suffix, dimension = row.rank
        shape = tuple(theirs[suffix].shape) if suffix in theirs else ()
        if dimension >= len(shape) or shape[dimension] != options["rank"]:
            return f"{suffix} has the shape {shape}, and the rank is {options['rank']}"
    ours = {name: theirs[each] for name, each in row.tensors.items() if each in theirs}
    update = PlainUpdate(site, host, values, theirs, options, ours)
    try:
        problem = row.imported(update)
    except (RuntimeError, LookupError, ArithmeticError):
        problem = "tensors are missing, or have other shapes"
    return problem or update


def _as_ours(row: PlainKind, option: str, value: Any) -> Any:
    default = row.method.__dataclass_fields__[option].default  # type: ignore[attr-defined]
    return float(value) if isinstance(default, float) else value


def _add_methods(row: PlainKind, updates: list[PlainUpdate], translation: Translation) -> None:
    """Add one method for each set of options, with the tensors at its sites."""
    groups: dict[Any, list[PlainUpdate]] = {}
    for update in updates:
        same = tuple(sorted((k, v) for k, v in update.options.items() if k != "rank"))
        groups.setdefault(same, []).append(update)
    for group in groups.values():
        options = {
            **{k: v for k, v in group[0].options.items() if k != "rank"},
            "sites": sites_option(translation.anatomy, [update.site for update in group]),
        }
        if "rank" in group[0].options:
            options |= size_options("rank", {u.site.id: u.options["rank"] for u in group})
        translation.methods.append({row.method.name: options})
        for update in group:
            for name, tensor in update.ours.items():
                full = f"{update.site.id}.{row.method.name}.{name}"
                translation.tensors[full] = tensor


def _shared_tensors(
    row: PlainKind,
    files: PeftFiles,
    updates: list[PlainUpdate],
    rest: Tensors,
    translation: Translation,
) -> Tensors:
    """Return the shared tensors of all modules, by our names; compute those missing in the file."""
    tensors: Tensors = {}
    for ours, theirs in row.shared.items():
        own = [update.theirs[theirs] for update in updates if theirs in update.theirs]
        if any(not torch.equal(each, own[0]) for each in own):
            translation.problems.append(f"{theirs} is not the same in all modules")
        value = rest.pop(f"base_model.{theirs}", own[0] if own else None)
        if value is not None:
            tensors[ours] = value.squeeze(1) if value.ndim == 3 and ours == "fixed.A" else value
    for name in [name for name in rest if name.startswith(f"base_model.{row.kind.lower()}_")]:
        del rest[name]  # read by `share`
    missing = row.shared.keys() - tensors.keys()
    if not updates or (row.share is None and not missing):
        return tensors
    if row.share is None:
        translation.problems.append(f"{' and '.join(row.shared.values())} are not in the files")
        return tensors
    order = {module: number for number, module in enumerate(translation.anatomy.model.modules())}
    if computed := {
        name: value
        for name, value in row.share(
            files, sorted(updates, key=lambda update: order[update.host])
        ).items()
        if name in missing or name not in row.shared
    }:
        translation.notes.append(
            f"fixed numbers of {row.method.name} that are not in the files were computed by torch "
            f"{torch.__version__} and numpy {np.__version__}, as peft does"
        )
    tensors |= computed
    if row.kind == "PVERA":
        tensors["fixed.A"] = tensors["fixed.A"][: files.config["r"]]
    return tensors


def _kernel_problem(kind: Kind, site: Site, host: nn.Module) -> str:
    """Return why an update of a module that is not a projection differs here; "" if it does not."""
    if site.matrix is None:
        return ""
    kernel = isinstance(host, CONVOLUTIONS) and only_shifts(host)
    if kernel and kind in _OF_KERNELS:
        return ""
    return f"peft's update of a {type(host).__name__} is none of its weight as a matrix"


def export_plain(kind: Kind, source: ExportSource) -> CheckpointPart:
    """Return the updates of one of these kinds as peft's, one for each whole module."""
    row = PLAIN[kind]
    parts = [part for part in source.parts if PLAIN_MODULES.get(type(part.module)) == kind]
    problems = [
        f"{part.site.id}: {part.method.name} at a part of {part.site.host}; peft adapts it whole"
        for part in parts
        if part.site.part is not None
    ]
    problems += [
        f"{part.site.id}: {problem}"
        for part in parts
        if (problem := _kernel_problem(kind, part.site, source.modules[part.site.host]))
    ]
    hosts = Counter(part.site.host for part in parts)
    problems += [
        f"{host}: peft has no {row.method.name} at a Conv1D"
        for host in hosts
        if isinstance(source.modules[host], Conv1D) and not row.turned
    ]
    problems += [f"{host}: several updates of one module" for host, n in hosts.items() if n > 1]
    tensors: Tensors = {}
    by_host: dict[str, Values] = {}
    for part in parts:
        options, converted = row.exported(part)
        state = {n: t.detach() for n, t in part.module.state_dict(keep_vars=True).items()}
        state |= converted
        for ours, suffix in row.tensors.items():
            if ours in state:
                tensors[f"{part.site.host}.{suffix}"] = state[ours]
        others = converted.keys() - row.tensors.keys()
        tensors |= {f"{part.site.host}.{suffix}": converted[suffix] for suffix in others}
        for ours, theirs in row.shared.items():
            if ours in state:
                # RandLoRA's A has an additional dimension for its bases.
                bases = ours == "fixed.A" and state["fixed.B"].ndim == 3
                tensors[f"base_model.{theirs}"] = state[ours][:, None] if bases else state[ours]
        by_host[part.site.host] = _their_options(row, part, tensors) | options
    if any(value is None for options in by_host.values() for value in options.values()):
        none = {n for options in by_host.values() for n, value in options.items() if value is None}
        problems += [f"{row.method.name}: peft has no {name} as here" for name in sorted(none)]
    config, differing = _common(row, by_host)
    problems += [f"{row.method.name}: {n} differs, peft has one for all" for n in differing]
    config = {name: value for name, value in config.items() if name != _SHARED}
    return CheckpointPart(
        config=target_options(source, hosts) | config,
        tensors=tensors,
        targets=sorted(hosts),
        problems=problems,
    )


def _their_options(row: PlainKind, part: ExportedModule, tensors: Tensors) -> Values:
    values = {}
    for ours, theirs in row.options.items():
        value = getattr(part.method, ours)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        values[theirs] = value
    if row.rank is not None:
        suffix, dimension = row.rank
        values["r"] = tensors[f"{part.site.host}.{suffix}"].shape[dimension]
    return values


def _common(row: PlainKind, by_host: Mapping[str, Values]) -> tuple[Values, list[str]]:
    """Return the options of a checkpoint with its patterns, and options that differ without one."""
    config: Values = {}
    differing = []
    names = dict.fromkeys(name for options in by_host.values() for name in options)
    for name in names:
        values = {host: options.get(name) for host, options in by_host.items()}
        (usual, _), *others = Counter(values.values()).most_common()
        config[name] = usual
        if others and name in row.patterns:
            config[row.patterns[name]] = {
                re.escape(host): value for host, value in values.items() if value != usual
            }
        elif others:
            differing.append(name)
    return config, differing
