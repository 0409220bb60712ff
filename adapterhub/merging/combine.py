"""Several adapters become one new adapter: their task vectors are combined, parameter by parameter.

The task vector of an adapter is what merging it would add to each parameter of the backbone, so all
that can be merged can be combined, whatever the methods. The result is kept as

    a projection's weight   a low-rank update (`lora`) at the sites of the adapters. It is exact, of
                            the sum of their ranks, where all are low-rank and the combination is
                            linear; else the nearest of the rank asked for. Without a rank the
                            weight is kept as it is
    all else                the parameter itself (biases, norms, whole weights)

The head, with its labels, and backbone parameters that the checkpoint lacks are those of the first
adapter: heads that trained apart have no common start to be compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.adapters.activate import activate, activate_per_row
from adapterhub.adapters.adapter import Adapter, AdapterMetadata
from adapterhub.adapters.attach import place
from adapterhub.adapters.state import attachments, known_names, state_of
from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.weights import as_stored, read_bias, read_weight
from adapterhub.errors import AttachError, ConfigError, unknown
from adapterhub.hooks.projection import OutputSlot
from adapterhub.merging.affine import merged_weight_and_bias
from adapterhub.merging.merge import refuse_unmergeable
from adapterhub.merging.task_vectors import COMBINE, low_rank
from adapterhub.methods._base import Method
from adapterhub.methods._ops import skip_init
from adapterhub.methods.lora import LoRA
from adapterhub.methods.staged import Staged


@dataclass(frozen=True)
class Rule:
    """How task vectors are combined; see `adapterhub.merging.task_vectors`."""

    how: str
    weights: tuple[float, ...]
    density: float
    rank: int | None
    seed: int

    def __call__(self, taus: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """One task vector out of several."""
        return COMBINE[self.how](taus, self.weights, self.density, generator)


@dataclass
class CombinedUpdates:
    """What the new adapter holds: low-rank updates by site, changes of whole parameters by path,
    and the share of each update that its rank could not hold."""

    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    deltas: dict[str, Tensor] = field(default_factory=dict)
    lost: list[float] = field(default_factory=list)


def combine(
    model: PreTrainedModel,
    names: Sequence[str],
    *,
    how: str = "linear",
    weights: Sequence[float] | None = None,
    density: float = 1.0,
    rank: int | None = None,
    seed: int = 0,
    name: str = "combined",
) -> Adapter:
    """Put a new adapter on a model, combined of others that are on it, and make it the active one.

    `how` is linear (a weighted sum), ties, dare or dare-ties; `weights` are 1 each by default, for
    a linear combination 1 / n. A negative weight takes a task away. `density` is the share of each
    task vector that ties and dare keep. `rank` bounds the updates of projections. `seed` is for
    what dare drops.

    Raises:
        ConfigError: an unknown rule, or options out of range.
        AttachError: a name that is not on the model.
        MergeError: an adapter that is no change of weights.
    """
    adapters = _known(model, names)
    rule = _rule(how, weights, density, rank, seed, len(adapters))
    refuse_unmergeable(adapters)
    state = state_of(model)
    before = state.rows
    try:
        result = _combined(adapters, rule)
    finally:
        activate_per_row(state, before)
    with skip_init():
        made = place(
            model,
            _methods(adapters, result),
            name,
            prepare=lambda adapter: _fill(adapter, adapters[0], result),
        )
    made.notes = _notes(adapters, rule, result)
    return made


def _known(model: PreTrainedModel, names: Sequence[str]) -> tuple[Adapter, ...]:
    state = attachments(model)
    if state is None or not names:
        raise AttachError("there is nothing to combine", hint='load(model, "out/polite") first')
    known_names(state, names)
    return tuple(state.adapters[name] for name in names)


def _rule(
    how: str, weights: Sequence[float] | None, density: float, rank: int | None, seed: int, n: int
) -> Rule:
    if how not in COMBINE:
        raise unknown("rule for combining adapters", how, COMBINE)
    usual = 1 / n if how in ("linear", "dare") else 1.0
    rule = Rule(how, tuple(weights or [usual] * n), density, rank, seed)
    wrong = [] if len(rule.weights) == n else [f"{len(rule.weights)} weights for {n} adapters"]
    wrong += [] if 0 < density <= 1 else [f"density {density}, not in (0, 1]"]
    wrong += [] if rank is None or rank > 0 else [f"rank {rank}, not above 0"]
    if wrong:
        raise ConfigError("options of combine are out of range", offenders=wrong)
    return rule


def _combined(adapters: Sequence[Adapter], rule: Rule) -> CombinedUpdates:
    """All task vectors combined, one projection or parameter at a time."""
    result, generator = CombinedUpdates(), torch.Generator().manual_seed(rule.seed)
    hosts: dict[str, dict[str, Site]] = {}
    for placed in (p for adapter in adapters for p in adapter.placed):
        hosts.setdefault(placed.site.host, {})[placed.site.id] = placed.site
    known: set[str] = set()
    for host, sites in hosts.items():
        if exact := _concatenated(adapters, host, rule):
            result.factors |= exact
            continue
        taus = _projection(adapters, host)
        known |= {f"{host}.{name}" for name in taus}
        if any(tau.any() for tau in taus.get("bias", ())):
            result.deltas[f"{host}.bias"] = rule(taus["bias"], generator)
        whole = [site for site in sites.values() if site.part is None]
        rows = {
            site: rule([_rows(site, tau) for tau in taus["weight"]], generator)
            for site in whole[:1] or sites.values()
        }
        _keep(result, adapters[0].model, rows, rule.rank)
    for path, original in _others(adapters, known):
        own = [{id(c.original): c.own for c in adapter.changed} for adapter in adapters]
        taus_here = [each.get(id(original), original).float() - original.float() for each in own]
        result.deltas[path] = rule(taus_here, generator)
    return result


def _projection(adapters: Sequence[Adapter], path: str) -> dict[str, list[Tensor]]:
    """The task vectors of a projection, W in its own layout (d_out, d_in), each in fp32."""
    model = adapters[0].model
    host = model.get_submodule(path)
    slot = host._modules[CHILD]
    assert isinstance(slot, OutputSlot)
    weights, biases = [], []
    for names in ((), *((adapter.name,) for adapter in adapters)):
        activate(model, *names)
        weight, bias = merged_weight_and_bias(host, slot)
        weights.append(weight)
        biases.append(read_bias(host) if bias is None else bias)
    found = {"weight": weights, "bias": [b.float() for b in biases if b is not None]}
    return {name: [v - all_[0] for v in all_[1:]] for name, all_ in found.items() if all_}


def _others(adapters: Sequence[Adapter], known: set[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """The other parameters that any of the adapters changes, by path, as the backbone has them."""
    model, anatomy = adapters[0].model, adapters[0].anatomy
    changed = {id(c.original) for adapter in adapters for c in adapter.changed}
    fresh = newly_initialized(model)
    activate(model)
    for path, parameter in anatomy.parameters().items():
        if id(parameter) in changed and path not in known | fresh:
            yield path, parameter


def _concatenated(
    adapters: Sequence[Adapter], host: str, rule: Rule
) -> dict[str, tuple[Tensor, Tensor]]:
    """By site, the weighted sum of low-rank updates as one of the sum of their ranks; {} where
    there are other changes too, or it has more than the rank asked for."""
    weight = adapters[0].model.get_submodule(host).get_parameter("weight")
    whole = any(c.own is weight or c.original is weight for a in adapters for c in a.changed)
    here = [
        (share, placed)
        for share, adapter in zip(rule.weights, adapters, strict=True)
        for placed in adapter.placed
        if placed.site.host == host
    ]
    low = all(getattr(placed.module, "factors", None) for _, placed in here)
    if rule.how != "linear" or whole or not low:
        return {}
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for share, placed in here:
        left, right = placed.module.factors()  # type: ignore[operator]
        pieces.setdefault(placed.site.id, []).append((share * left.detach(), right.detach()))
    found = {
        site: (torch.cat([left for left, _ in each], 1), torch.cat([right for _, right in each]))
        for site, each in pieces.items()
    }
    ranks = [len(right) for _, right in found.values()]
    return found if rule.rank is None or max(ranks) <= rule.rank else {}


def _rows(site: Site, matrix: Tensor) -> Tensor:
    """The rows of W, (d_out, d_in), that a site owns."""
    return matrix if site.part is None else site.part.read(matrix.T).T


def _keep(
    result: CombinedUpdates, model: PreTrainedModel, rows: Mapping[Site, Tensor], rank: int | None
) -> None:
    """Keep the change of one projection, given by the rows of W of each site: as a low-rank update
    of each, or as the whole weight."""
    if rank is not None:
        for site, change in rows.items():
            left, right = low_rank(change, rank)
            result.factors[site.id] = (left, right)
            lost = (change - left @ right).norm() / change.norm().clamp(min=1e-30)
            result.lost.append(lost.item())
        return
    host = next(site.host for site in rows)
    module = model.get_submodule(host)
    delta = torch.zeros_like(read_weight(module))
    for site, change in rows.items():
        delta = change if site.part is None else site.part.write(delta.T, change.T).T
    result.deltas[f"{host}.weight"] = as_stored(module, delta)


def _methods(adapters: Sequence[Adapter], result: CombinedUpdates) -> tuple[Method, ...]:
    """The methods that hold the result."""
    first, anatomy = adapters[0], adapters[0].anatomy
    alike = all(a.methods == first.methods and not a.placed for a in adapters)
    if alike:
        return first.methods
    found: list[Method] = []
    if result.factors:
        ranks = {site: len(right) for site, (_, right) in result.factors.items()}
        rank = max(ranks.values())
        others = {site: r for site, r in ranks.items() if r != rank}
        found.append(LoRA(rank=rank, alpha=float(rank), sites=tuple(ranks), ranks=others))
    if result.deltas:
        found.append(Staged(groups=(" + ".join(map(anatomy.key, result.deltas)),)))
    return tuple(found)


def _fill(adapter: Adapter, first: Adapter, result: CombinedUpdates) -> None:
    """Give the new adapter its numbers, and the head and labels of the first one."""
    paths = {id(p): path for path, p in adapter.anatomy.parameters().items()}
    own = {id(c.original): c.own for c in first.changed}
    with torch.no_grad():
        for placed in adapter.placed:
            left, right = result.factors[placed.site.id]
            placed.module.get_parameter("A").copy_(right)
            placed.module.get_parameter("B").copy_(left / float(placed.module.scale))  # type: ignore[arg-type]
        for changed in adapter.changed:
            path = paths[id(changed.original)]
            if path in result.deltas:
                changed.own.copy_(changed.original.float() + result.deltas[path])
            else:  # it is new to the checkpoint
                changed.own.copy_(own[id(changed.original)])
    if adapter.head and first.head:
        adapter.head.own = copy.deepcopy(first.head.own)
        adapter.head.labels = copy.deepcopy(first.head.labels)


def _notes(adapters: Sequence[Adapter], rule: Rule, result: CombinedUpdates) -> AdapterMetadata:
    """What the first adapter's notes say, and what was combined how."""
    facts = {
        "how": rule.how,
        "adapters": [adapter.name for adapter in adapters],
        "weights": list(rule.weights),
        "density": rule.density,
        "rank": rule.rank,
        "seed": rule.seed,
        "lost": max(result.lost, default=0.0),
    }
    first = adapters[0].notes
    training = {**first.training, "combined": facts}
    return AdapterMetadata(first.task, first.tokenizer, first.chat_template, training)
