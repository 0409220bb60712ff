"""Export of an adapter to peft's format.

A peft checkpoint is of one kind (LoRA, (IA)^3, ...). In addition it can contain whole modules: the
task head and other trained modules of the backbone. Features that peft cannot express are refused;
one error lists all of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.projections import CONVOLUTIONS
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import MismatchError
from adapterhub.files.schema import shorten
from adapterhub.hooks.head import activation_between
from adapterhub.interchange.peft.adaption_prompt import export_adaption_prompt
from adapterhub.interchange.peft.experts import (
    WRAPPER,
    packed,
    parameter_names,
    parameter_path,
    stacked,
    wrapped_names,
)
from adapterhub.interchange.peft.export_types import (
    CheckpointPart,
    ExportedModule,
    ExportSource,
    exact_names,
    target_options,
)
from adapterhub.interchange.peft.files import Kind, PeftFiles, neutral
from adapterhub.interchange.peft.ia3 import export_ia3
from adapterhub.interchange.peft.kernels import OTHER_KERNEL, as_kernel, only_shifts
from adapterhub.interchange.peft.plain import PLAIN, PLAIN_MODULES, export_plain
from adapterhub.interchange.peft.prompts import export_prefix, export_prompt
from adapterhub.interchange.peft.updates import TIMES_OUTPUT
from adapterhub.methods.alora import InvokedLoRALayer
from adapterhub.methods.bdlora import BlockFactors
from adapterhub.methods.common.experts import ExpertsUpdate
from adapterhub.methods.common.ops import FactorModule
from adapterhub.methods.dora import DoRALayer
from adapterhub.methods.ia3 import InputScale, OutputScale
from adapterhub.methods.kasa import ReplacedComponents
from adapterhub.methods.llama_adapter import GatedPrompt
from adapterhub.methods.lora import LoRALayer
from adapterhub.methods.lora_fa import FrozenFactorLayer
from adapterhub.methods.mica import MinorComponents
from adapterhub.methods.pissa import PiSSALayer
from adapterhub.methods.prefix import PartlyFrozenKeyValues, PrefixKeyValues, SkippedPositions
from adapterhub.methods.prompt import VirtualTokens
from adapterhub.methods.rslora import RsLoRA

# Modules that peft saves by default, by task type; it matches the ends of paths.
_PEFT_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
NEW_TOKENS = "new tokens: their embeddings and tokenizer are not exported to peft"
_PRODUCTS = (BlockFactors, ReplacedComponents)  # written as plain LoRAs
Update = LoRALayer | FactorModule | ExpertsUpdate
LOW_RANK_MODULES = (
    LoRALayer, DoRALayer, PiSSALayer, FrozenFactorLayer, InvokedLoRALayer, MinorComponents,
    *_PRODUCTS,
)  # fmt: skip
_KINDS: Mapping[type[nn.Module], Kind] = {
    **dict.fromkeys(LOW_RANK_MODULES, "LORA"),
    **dict.fromkeys((OutputScale, InputScale), "IA3"),
    **dict.fromkeys((PrefixKeyValues, SkippedPositions), "PREFIX_TUNING"),
    VirtualTokens: "PROMPT_TUNING",
    GatedPrompt: "ADAPTION_PROMPT",
    PartlyFrozenKeyValues: "CARTRIDGE",
    **PLAIN_MODULES,
}


def to_peft(source: ExportSource) -> PeftFiles:
    """Return the adapter as a peft checkpoint.

    Raises:
        MismatchError: peft cannot express it; lists every reason.
    """
    files, problems = try_peft(source)
    if problems:
        raise MismatchError(
            "the adapter cannot be exported to peft",
            offenders=shorten(problems),
            expected="LoRA or a variant, ia3, norms, a prompt or a prefix, optionally with a head",
            hint="adapter.save(...) saves everything",
        )
    return files


def try_peft(source: ExportSource) -> tuple[PeftFiles, list[str]]:
    """Return the adapter as a peft checkpoint, as far as possible, and unsupported features."""
    kinds = {_KINDS[type(p.module)] for p in source.parts if type(p.module) in _KINDS}
    kinds |= {"LORA"} if any(map(is_low_rank, source.parts)) else set()
    kinds -= {"PREFIX_TUNING"} if "CARTRIDGE" in kinds else set()  # its table is a prefix's
    kind: Kind = min(kinds, default="LN_TUNING")
    updates = _EXPORTERS[kind](source) if kinds else CheckpointPart()
    parameters = _trained_parameters(source, kind, updates.targets)
    head = _task_head(source, parameters.config.get("modules_to_save", []))
    checkpoint = _refused(source, kinds) + updates + parameters + head
    backbone = {
        "task_type": source.task_type,
        "base_model_name_or_path": source.backbone,
        "revision": source.revision,
    }
    config = {**neutral(kind), **checkpoint.config, **backbone, "peft_type": kind}
    files = PeftFiles(kind, config, checkpoint.tensors, tuple(source.ends))
    return files, list(checkpoint.problems)


def on_others(names: Iterable[str]) -> str:
    """Return the problem of an adapter that gets the outputs of others."""
    return f"it is on top of {', '.join(names)}: peft's files contain one adapter"


def _refused(source: ExportSource, kinds: set[Kind]) -> CheckpointPart:
    """List features that no kind of checkpoint supports, and combinations of kinds."""
    placed = [part for part in source.parts if part.site.kind != "weight"]
    unsupported = sorted({p.method.name for p in placed if type(p.module) not in _KINDS})
    problems = [f"{name}: peft has no such method" for name in unsupported]
    elsewhere = {
        f"{part.method.name} at {part.site.stack}.{part.site.role}"
        for part in placed
        if type(part.module) in LOW_RANK_MODULES and part.site.kind not in ("linear", "weight")
    }
    problems += [f"{place}: peft adapts projections only" for place in sorted(elsewhere)]
    held = {
        f"{part.method.name} at {part.site.stack}.{part.site.role}"
        for part in source.parts
        if part.site.held and not is_low_rank(part)
    }
    problems += [f"{place}: peft adapts such weights by LoRA only" for place in sorted(held)]
    problems += [
        f"{part.site.id}: the module around it reads its weight, where peft's update does nothing"
        for part in source.parts
        if part.site.inside
        and not isinstance(source.modules[part.site.host], nn.MultiheadAttention)
    ]
    problems += [
        f"{part.site.id}: peft adapts MultiheadAttention by LoRA only"
        for part in source.parts
        if part.site.kind == "linear"
        and isinstance(source.modules[part.site.host], nn.MultiheadAttention)
        and not is_low_rank(part)
    ]
    if source.tokens:
        problems.append(NEW_TOKENS)
    if source.below:
        problems.append(on_others(source.below))
    if source.pooling:
        problems.append(
            f"pooling={source.pooling}: peft leaves the head's input to the model's class "
            "(classification(pooling=model))"
        )
    if activation := activation_between(source.head):
        problems.append(
            f"a head of own layers ({activation}): peft saves that of the model's class"
        )
    if not source.parts:
        problems += _problems_without_method(source)
    if len(kinds) > 1:
        problems.append(f"a peft checkpoint contains only one of {', '.join(sorted(kinds))}")
    return CheckpointPart(problems=problems)


def _problems_without_method(source: ExportSource) -> list[str]:
    """Refuse an adapter of whole parameters, unless they are norms (LN_TUNING)."""
    holders = {_holder(path) for paths, _ in source.changed for path in paths}
    others = sorted(holder for holder in holders if not _is_norm(source.modules[holder]))
    if not holders:
        return ["peft has no method that trains only the task head"]
    if not others:
        return []
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [
        f"peft trains whole parameters only together with a method: {', '.join(others[:3])}{more}"
    ]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 1


def _trained_parameters(source: ExportSource, kind: Kind, targets: Sequence[str]) -> CheckpointPart:
    """Return backbone parameters that were trained whole: as biases, norms, or whole modules."""
    values = {path: value.detach() for paths, value in source.changed for path in paths}
    if not source.parts:
        holders = sorted({_holder(path) for path in values})
        return CheckpointPart(
            config={"target_modules": exact_names(holders, source.modules)} if holders else {},
            tensors=_whole_modules(source, holders, values, ".ln_tuning_layers"),
        )
    # With LoRA, peft can also train biases without the rest of their modules.
    whole = [path for path in values if kind != "LORA" or "bias" not in path.rpartition(".")[2]]
    holders = sorted({_holder(path) for path in whole})
    biases = {path: value for path, value in values.items() if _holder(path) not in holders}
    return _biases(biases, targets) + CheckpointPart(
        config={"modules_to_save": holders} if holders else {},
        tensors=_whole_modules(source, holders, values),
        problems=_updated_inside(holders, targets) + _ambiguous(source.modules, holders),
    )


def _holder(path: str) -> str:
    return path.rpartition(".")[0]


def _updated_inside(holders: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Refuse whole modules with adapted modules inside: peft skips those updates."""
    return [
        f"{holder}: both updated and trained whole"
        for holder in holders
        if any(f"{target}.".startswith(f"{holder}.") for target in targets)
    ]


def _biases(values: Mapping[str, Tensor], targets: Sequence[str]) -> CheckpointPart:
    """Return trained biases; biases of adapted modules belong to peft's `base_layer`.

    A module occurs in the targets once for each of its adapted parameters.
    """
    tensors = {}
    for path, value in values.items():
        module, _, name = path.rpartition(".")
        tensors[f"{module}{WRAPPER * targets.count(module)}.{name}"] = value
    return CheckpointPart(config={"bias": "all"} if values else {}, tensors=tensors)


def _whole_modules(
    source: ExportSource, holders: Sequence[str], values: Mapping[str, Tensor], suffix: str = ""
) -> dict[str, Tensor]:
    """Return all parameters of the modules, trained or not: peft saves modules whole."""
    return {
        f"{holder}{suffix}.{name}": values.get(f"{holder}.{name}", parameter.detach())
        for holder in holders
        for name, parameter in source.modules[holder].named_parameters(recurse=False)
    }


def _ambiguous(modules: Mapping[str, nn.Module], names: Sequence[str]) -> list[str]:
    """Refuse names for which peft would save other modules: it matches the ends of paths."""
    matches = {n: [p for p in modules if p.endswith(n) and p not in names] for n in names}
    shared = [n for n in names if sum(modules[p] is modules[n] for p in modules) > 1]
    return [f"{n}: peft would save {paths[0]} too" for n, paths in matches.items() if paths] + [
        f"{n}: used at several places of the model, peft replaces only one" for n in shared
    ]


def _task_head(source: ExportSource, saved: Sequence[str]) -> CheckpointPart:
    """Return the task head's modules, added to the modules that are already `saved`."""
    head = _head_modules(source)
    names = sorted(head)
    return CheckpointPart(
        config={"modules_to_save": [*saved, *names]} if names else {},
        tensors={
            f"{name}.{key}": value
            for name in names
            for key, value in head[name].state_dict().items()
        },
        problems=_ambiguous(source.modules, names),
    )


def _head_modules(source: ExportSource) -> dict[str, nn.Module]:
    """Return the modules of the head, and those that peft saves as if they were a head."""
    names = _PEFT_HEADS.get(source.task_type or "", ())
    return {p: m for p, m in source.modules.items() if p.endswith(names)} | dict(source.head)


@dataclass(frozen=True)
class ModuleUpdate:
    """The update of one module: tensors by peft's names, rank and scale."""

    tensors: Mapping[str, Tensor]
    rank: int
    scale: float


def export_low_rank(source: ExportSource) -> CheckpointPart:
    """Return the low-rank updates as one LORA checkpoint, with scale alpha / rank.

    Several of our updates on one module (q and v of a fused projection, or the initial factors that
    PiSSA subtracts) are stacked: B A + B' A' = [B B'] [A; A'].
    """
    updates, problems = low_rank_updates(source)
    parts = [part for part in source.parts if is_low_rank(part)]
    decomposed = {isinstance(part.module, DoRALayer) for part in parts}
    if len(decomposed) > 1:
        problems.append("peft uses DoRA for all updates of a checkpoint, or for none")
    invocations = {part.module.token_sets for part in parts}
    if len(invocations) > 1:
        problems.append("peft uses one invocation for all updates of a checkpoint, or none")
    tokens = next((tokens for sets in invocations for tokens in sets), None)
    if tokens is not None and not (tokens.ids and source.task_type == "CAUSAL_LM"):
        problems.append("peft invokes by the ids of tokens, in language models")
    hosts = dict.fromkeys(part.site.host for part in parts if not part.site.held)
    held = held_weights(source)
    rooted = all(isinstance(part.method, RsLoRA) for part in parts)
    dropout = max((getattr(part.method, "dropout", 0.0) for part in parts), default=0.0)
    return CheckpointPart(
        config=target_options(source, hosts)
        | pattern_options(updates, rooted)
        | {
            "target_parameters": parameter_names(list(held), source.modules) or None,
            "use_dora": True in decomposed,
            "lora_dropout": 0.0 if held else dropout,  # peft has none of the input of a parameter
            "bias": "none",
            "init_lora_weights": True,
            "alora_invocation_tokens": None if tokens is None else list(tokens.ids),
        },
        tensors=low_rank_tensors(source, updates),
        targets=sorted([*hosts, *(site.host for site in held.values())]),
        problems=problems,
    )


def held_weights(source: ExportSource) -> dict[str, Site]:
    """Map the paths of adapted parameters, which their modules multiply by themselves, to sites."""
    sites = [part.site for part in source.parts if part.site.held and is_low_rank(part)]
    return {parameter_path(site): site for site in sites}


def low_rank_tensors(
    source: ExportSource, updates: Mapping[str, ModuleUpdate], held: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of updates under the names of peft's files.

    `held`: include weights that their modules multiply by themselves.
    """
    sites = held_weights(source)
    wrapped = wrapped_names(sites, source.modules)
    tensors: dict[str, Tensor] = {}
    for path, update in updates.items():
        values = update.tensors
        if site := sites.get(path):
            if not held:
                continue
            low, high = (values[f"lora_{factor}.weight"] for factor in "AB")
            low, high = packed(site, source.modules[site.host], low, high)
            values = {"lora_A.weight": low, "lora_B.weight": high}
        tensors |= {f"{wrapped.get(path, path)}.{name}": tensor for name, tensor in values.items()}
    return tensors


def low_rank_updates(source: ExportSource) -> tuple[dict[str, ModuleUpdate], list[str]]:
    """Return the joined update of each module by its path, and updates that cannot be joined.

    Updates of parameters have the path of the parameter, and stacked factors for experts.
    """
    by_host: dict[str, list[tuple[Site, Update]]] = {}
    for part in source.parts:
        if is_low_rank(part) and isinstance(part.module, Update):
            by_host.setdefault(_wrapped(part.site), []).append((part.site, part.module))
    updates: dict[str, ModuleUpdate] = {}
    problems: list[str] = []
    for path, pieces in by_host.items():
        host = source.modules[pieces[0][0].host]
        if isinstance(host, CONVOLUTIONS) and not only_shifts(host):
            problems.append(f"{path}: {OTHER_KERNEL}")
        elif isinstance(host, nn.MultiheadAttention) and not host._qkv_same_embed_dim:
            problems.append(f"{path}: peft has no MultiheadAttention of several widths")
        elif isinstance(host, nn.MultiheadAttention) and any(
            isinstance(module, DoRALayer) for _, module in pieces
        ):
            problems.append(f"{path}: peft has no DoRA at MultiheadAttention")
        elif (update := joined_update(host, pieces)) is None:
            problems.append(f"{path}: two DoRA updates of one weight cannot be joined")
        else:
            updates[path] = update
    return _with_both(source, updates), problems


_OUTPUT = ".base_layer.out_proj"  # part of torch's attention, which peft wraps as a whole


def _wrapped(site: Site) -> str:
    """Return the path of the module or parameter that peft adapts for a site."""
    if site.held:
        return parameter_path(site)
    inside = site.matrix is not None and site.matrix.weight.startswith("out_proj.")
    return f"{site.host}{_OUTPUT}" if inside else site.host


def _with_both(
    source: ExportSource, updates: Mapping[str, ModuleUpdate]
) -> dict[str, ModuleUpdate]:
    """Make the updates of both weights of torch's attention equal in rank and scale, as in peft."""
    both = dict(updates)
    for path in {path.removesuffix(_OUTPUT) for path in updates}:
        if not isinstance(attention := source.modules.get(path), nn.MultiheadAttention):
            continue
        sizes = {path: 3 * attention.embed_dim, f"{path}{_OUTPUT}": attention.embed_dim}
        pair = {name: updates.get(name) for name in sizes}
        rank = max(each.rank for each in pair.values() if each)
        scale = next(each.scale for each in pair.values() if each)
        for name, size in sizes.items():
            low = torch.zeros(rank, attention.embed_dim)
            high = torch.zeros(size, rank)
            if (own := pair[name]) is not None:
                low[: own.rank] = own.tensors["lora_A.weight"]
                ratio = own.scale / scale / (TIMES_OUTPUT if name.endswith(_OUTPUT) else 1)
                high[:, : own.rank] = own.tensors["lora_B.weight"] * ratio
            both[name] = ModuleUpdate({"lora_A.weight": low, "lora_B.weight": high}, rank, scale)
    return both


def is_low_rank(part: ExportedModule) -> bool:
    """Return whether peft's LoRA supports the update of a module at its site."""
    if isinstance(part.module, ExpertsUpdate):
        return part.module.of in LOW_RANK_MODULES
    return type(part.module) in LOW_RANK_MODULES and part.site.kind in ("linear", "weight")


def joined_update(host: nn.Module, pieces: Sequence[tuple[Site, Update]]) -> ModuleUpdate | None:
    """Join all updates of one module; return None if DoRA makes that impossible."""
    decomposed = any(isinstance(module, DoRALayer) for _, module in pieces)
    # Parts of a fused projection have separate rows and so separate norms.
    separate = len({site.id for site, _ in pieces if site.part}) == len(pieces)
    if decomposed and len(pieces) > 1 and not separate:
        return None
    scale = _scale(pieces[0][1])
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    for site, module in pieces:
        for low, high in _factors(module, site):
            # Equal scales leave the factors bit-identical.
            high = high if _scale(module) == scale else high * (_scale(module) / scale)
            lows.append(low)
            highs.append(_full_rows(site, host, high))
    tensors = {
        "lora_A.weight": as_kernel(host, "A", torch.cat(lows, dim=-2)),
        "lora_B.weight": as_kernel(host, "B", torch.cat(highs, dim=-1)),
    }
    if isinstance(host, nn.Embedding):
        tensors = {
            name.replace("lora_", "lora_embedding_").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
        }
    if decomposed:
        magnitude = _magnitude(host, pieces)
        tensors["lora_magnitude_vector"] = as_kernel(host, "magnitude", magnitude)
    return ModuleUpdate(tensors, sum(low.shape[-2] for low in lows), scale)


def _scale(module: Update) -> float:
    one = module.module_of(0) if isinstance(module, ExpertsUpdate) else module
    return one.scale if isinstance(one, LoRALayer) else 1.0


def _factors(module: Update, site: Site) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of A and B, stacked for experts, whose products are added."""
    if isinstance(module, ExpertsUpdate):
        assert site.held is not None
        assert site.held.experts is not None
        each = [_factors(module.module_of(n), site) for n in range(module.experts or 1)]  # type: ignore[arg-type]
        return [stacked(pairs, site.held.experts) for pairs in zip(*each, strict=True)]
    if isinstance(module, FactorModule):
        left, right = module.factors()
        return [(right.detach(), left.detach())]
    factors = [(module.A.detach(), module.B.detach())]
    if isinstance(module, PiSSALayer):
        factors.append((module.A0, -module.B0))
    return factors


def _full_rows(site: Site, host: nn.Module, high: Tensor) -> Tensor:
    """Pad B of a part of a fused projection to all rows: (d_fused, rank)."""
    if site.matrix is not None:
        if site.matrix.rows is None:
            return high
        rows = len(host.get_parameter(site.matrix.weight))
        return site.matrix.within(high.new_zeros(rows, high.shape[1]), high)
    if site.part is None:
        return high
    rows = read_weight(host).shape[0]
    return site.part.write(high.new_zeros(high.shape[1], rows), high.T).T.contiguous()


def _magnitude(host: nn.Module, pieces: Sequence[tuple[Site, Update]]) -> Tensor:
    """Return DoRA's magnitudes of all rows; rows without an update keep their norms."""
    norms: Tensor | None = None
    for site, module in pieces:
        if isinstance(module, DoRALayer):
            if site.part is None:  # and not rows of packed weights, where peft lacks DoRA
                return module.magnitude.detach()
            if norms is None:
                norms = read_weight(host).detach().norm(dim=1)
            norms = site.part.write(norms, module.magnitude.detach())
    assert norms is not None
    return norms


def pattern_options(updates: Mapping[str, ModuleUpdate], rooted: bool) -> dict[str, Any]:
    """Return peft's rank and alpha, and patterns for modules that differ.

    `rooted`: the scale is alpha / sqrt(rank), as in rsLoRA.
    """
    if not updates:
        return {}
    ranks = {host: update.rank for host, update in updates.items()}
    alphas = {host: _alpha(update, rooted) for host, update in updates.items()}
    (rank, _), *_ = Counter(ranks.values()).most_common(1)
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rooted,
        "rank_pattern": {re.escape(h): r for h, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(h): a for h, a in alphas.items() if a != alpha},
    }


def _alpha(update: ModuleUpdate, rooted: bool) -> int | float:
    alpha = update.scale * (math.sqrt(update.rank) if rooted else update.rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


_EXPORTERS: Mapping[str, Callable[[ExportSource], CheckpointPart]] = {
    "LORA": export_low_rank,
    "IA3": export_ia3,
    "PROMPT_TUNING": export_prompt,
    "PREFIX_TUNING": export_prefix,
    "CARTRIDGE": export_prefix,
    "ADAPTION_PROMPT": export_adaption_prompt,
    **{kind: partial(export_plain, kind) for kind in PLAIN},
}
