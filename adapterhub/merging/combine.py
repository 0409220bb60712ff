"""Combine several adapters into a new one, through their task vectors, parameter by parameter.

The task vector of an adapter is the change that merging it would add to each parameter of the
backbone, so every adapter that can be merged can be combined, whatever its methods. The result is
stored as

    a projection's weight   a low-rank update (`lora`) at the sites of the adapters: exact, with the
                            sum of their ranks, if all are low-rank and the combination is linear;
                            else the closest of the given rank, or of the least rank with the given
                            share of energy. Without these, the whole weight
    all others              the parameter itself (biases, norms, whole weights)

The head with its labels, and newly initialized backbone parameters, come from one adapter, since
separately trained heads lack a common start. It is the first adapter if all have the same labels;
otherwise `head` must name one.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from adapterhub.adapters.adapter import Adapter, AdapterMetadata, PlacedModule
from adapterhub.adapters.attach import build_adapter
from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.route import activate
from adapterhub.adapters.state import activated, bare, find_state, get_state, require_attached
from adapterhub.anatomy.backbone import CHILD, Backbone
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import as_stored, read_bias, read_weight
from adapterhub.errors import AttachError, ConfigError, MergeError, unknown
from adapterhub.hooks.slot import OutputSlot
from adapterhub.merging.affine import merged_weight_and_bias
from adapterhub.merging.merge import refuse_unmergeable
from adapterhub.methods.common.base import Method
from adapterhub.methods.common.site_module import OutputModule, skip_init
from adapterhub.methods.lora import LoRA, LoRALayer
from adapterhub.methods.pissa import largest_components
from adapterhub.methods.staged import Staged

_LARGE, _ITERATIONS, _FIRST = 512, 8, 32  # iterations of a randomized singular value decomposition
_NAMED = 5  # parameters listed in an error
RULES = ("linear", "ties", "dare", "dare-ties")


@dataclass(frozen=True)
class Cut:
    """Selection of the singular values of an update: all, a number, or the largest of a share.

    Attributes:
        rank: the largest number of kept values.
        energy: the share of the sum of squares to keep, with the fewest values.
    """

    rank: int | None = None
    energy: float | None = None

    def __bool__(self) -> bool:
        """Return whether any value may be dropped."""
        return self.rank is not None or self.energy is not None

    def size(self, values: Tensor, total: Tensor) -> int:
        """Return the number of kept values, the largest first; at least one.

        `total` is the sum of the squares of all values.
        """
        size = len(values)
        if self.energy is not None:
            kept = values.double().square().cumsum(0)
            most = torch.maximum(total, kept[-1])  # both are rounded
            size = int((kept < self.energy * most).sum()) + 1
        return max(min(size, self.rank or size, len(values)), 1)


@dataclass(frozen=True)
class Rule:
    """A rule to combine task vectors; see `adapterhub.merging.combine`."""

    how: str
    weights: tuple[float, ...]
    density: float
    seed: int
    cut: Cut

    def __call__(self, taus: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """Combine task vectors of one parameter."""
        return combine_vectors(self.how, taus, self.weights, self.density, generator)


@dataclass(frozen=True)
class CombinedUpdates:
    """The tensors of the new adapter.

    `factors` are low-rank updates by site, `deltas` changes of whole parameters by path, `lost` the
    share of each update that its rank could not represent.
    """

    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    deltas: dict[str, Tensor] = field(default_factory=dict)
    lost: tuple[float, ...] = ()

    def __add__(self, other: CombinedUpdates) -> CombinedUpdates:
        return CombinedUpdates(
            self.factors | other.factors, self.deltas | other.deltas, self.lost + other.lost
        )


@dataclass(frozen=True)
class ProjectionUpdates:
    """The changes of the adapters at one projection."""

    adapters: Sequence[Adapter]
    path: str

    @property
    def host(self) -> nn.Module:
        """The projection."""
        return self.adapters[0].model.get_submodule(self.path)

    def placed(self, adapter: Adapter) -> list[PlacedModule]:
        """List the modules of an adapter here."""
        return [placed for placed in adapter.placed if placed.site.host == self.path]

    def sites(self) -> list[Site]:
        """List the sites for updates: the whole projection if it is a site, or its slices."""
        placed = [placed for adapter in self.adapters for placed in self.placed(adapter)]
        sites = list({p.site.id: p.site for p in placed}.values())
        whole = [site for site in sites if site.part is None]
        return whole[:1] or sites

    def combine(self, rule: Rule, generator: torch.Generator) -> CombinedUpdates:
        """Combine the adapters' updates of the weight and the bias."""
        taus = self.task_vectors()
        biases: dict[str, Tensor] = {}
        if any(tau.any() for tau in taus.get("bias", ())):
            biases[f"{self.path}.bias"] = rule(taus["bias"], generator)
        slices = {
            site: rule([_slice(site, tau) for tau in taus["weight"]], generator)
            for site in self.sites()
        }
        return CombinedUpdates(deltas=biases) + self._stored(slices, rule.cut)

    def concatenated(self, rule: Rule) -> CombinedUpdates | None:
        """Write the weighted sum of low-rank updates as one of the sum of their ranks, or less.

        Returns: None if there are other changes.
        """
        if rule.how != "linear" or self._weight_is_replaced():
            return None
        left: dict[str, list[Tensor]] = {}
        right: dict[str, list[Tensor]] = {}
        for weight, adapter in zip(rule.weights, self.adapters, strict=True):
            for placed in self.placed(adapter):
                module = placed.module
                factors = module.factors() if isinstance(module, OutputModule) else None
                if factors is None:
                    return None
                left.setdefault(placed.site.id, []).append(weight * factors[0].detach())
                right.setdefault(placed.site.id, []).append(factors[1].detach())
        joined = {site: (torch.cat(left[site], 1), torch.cat(right[site])) for site in left}
        kept = {site: cut_product(*factors, rule.cut) for site, factors in joined.items()}
        return CombinedUpdates(
            factors={site: (left, right) for site, (left, right, _) in kept.items()},
            lost=tuple(lost for *_, lost in kept.values()),
        )

    def _weight_is_replaced(self) -> bool:
        weight = self.host.get_parameter("weight")
        changed = (changed for adapter in self.adapters for changed in adapter.changed)
        return any(weight is c.own or weight is c.original for c in changed)

    def task_vectors(self) -> dict[str, list[Tensor]]:
        """Compute the task vectors of weight, (d_out, d_in), and bias, in fp32.

        Each adapter is active alone in turn; the last one stays active.
        """
        host = self.host
        slot = host._modules[CHILD]
        assert isinstance(slot, OutputSlot)
        weights, biases = [], []
        for names in ((), *((adapter.name,) for adapter in self.adapters)):
            activate(self.adapters[0].model, *names)
            weight, bias = merged_weight_and_bias(host, slot)
            weights.append(weight)
            biases.append(read_bias(host) if bias is None else bias)
        taus = {"weight": [weight - weights[0] for weight in weights[1:]]}
        with_bias = [bias.float() for bias in biases if bias is not None]
        if with_bias:
            taus["bias"] = [bias - with_bias[0] for bias in with_bias[1:]]
        return taus

    def _stored(self, slices: Mapping[Site, Tensor], cut: Cut) -> CombinedUpdates:
        """Store the changes of the weight's rows: as low-rank updates, or as the whole weight."""
        if cut:
            factors = {site.id: low_rank(change, cut) for site, change in slices.items()}
            lost = [_lost(change, *factors[site.id]) for site, change in slices.items()]
            return CombinedUpdates(factors=factors, lost=tuple(lost))
        delta = torch.zeros_like(read_weight(self.host))
        for site, change in slices.items():
            delta = change if site.part is None else site.part.write(delta.T, change.T).T
        return CombinedUpdates(deltas={f"{self.path}.weight": as_stored(self.host, delta)})


def combine(
    model: nn.Module,
    names: Sequence[str],
    *,
    how: str = "linear",
    weights: Sequence[float] | None = None,
    density: float = 1.0,
    rank: int | None = None,
    energy: float | None = None,
    seed: int = 0,
    name: str = "combined",
    head: str | None = None,
) -> Adapter:
    """Attach a new adapter that combines attached ones, and make it the active one.

    Args:
        model: the model that they are attached to.
        names: the adapters to combine.
        how: linear (a weighted sum), ties, dare or dare-ties.
        weights: one for each adapter; by default 1, or 1 / n for a linear combination. A negative
            weight removes a task.
        density: the share of each task vector that ties and dare keep.
        rank: the largest rank of the updates of projections.
        energy: the share of the squared singular values of each update to keep, with the least
            sufficient rank; 1 keeps all of them.
        seed: the seed for the entries that dare drops.
        name: the new adapter's name.
        head: the adapter whose task, head and labels the new one gets; by default the first one,
            if all have the same labels.

    Raises:
        ConfigError: an unknown rule, or options out of range.
        AttachError: a name is not attached.
        MergeError: an adapter cannot be expressed as a change of weights or is on top of others, or
            heads differ.
    """
    adapters = _attached(model, names)
    owner = _owner_of_head(adapters, head)
    rule = _rule(how, weights, density, Cut(rank, energy), seed, len(adapters))
    return _attached_new(model, adapters, owner, rule, name)


def to_lora(
    model: nn.Module,
    name: str,
    *,
    rank: int | None = None,
    energy: float | None = None,
    new_name: str = "converted",
) -> Adapter:
    """Attach a LoRA with the outputs of an attached adapter, and make it the active one.

        B A = dW

    dW is the change that the adapter adds to the weight of a projection. Where its modules are
    already low-rank products, B and A are their factors; otherwise, and for a smaller rank, they
    are the nearest ones. `metadata.training["combined"]["lost"]` is the largest lost share of an
    update. This also changes the rank of a LoRA.

    Args:
        model: the model with the adapter.
        name: the adapter.
        rank: the largest rank.
        energy: as in `combine`.
        new_name: the name of the LoRA.

    Raises:
        ConfigError: a rank or an energy is out of range.
        AttachError: the name is not attached.
        MergeError: the adapter is not a change of weights, changes more than the weights of
            projections, or lacks its own rank and `rank` is missing.
    """
    adapters = _attached(model, [name])
    rule = _rule("linear", None, 1.0, Cut(rank, energy), 0, 1)
    return _attached_new(model, adapters, adapters[0], rule, new_name, only_lora=True)


@dataclass(frozen=True)
class UpdateRanks:
    """The share of an adapter's update that each rank keeps.

    Attributes:
        values: the singular values of the update of each site, the largest first.
    """

    values: Mapping[str, Tensor]

    @property
    def rank(self) -> int:
        """The largest rank of a site."""
        return len(self._shares)

    def kept(self, rank: int) -> float:
        """Return the share of the squared Frobenius norm, over all sites, that a rank keeps."""
        return self._shares[min(rank, self.rank) - 1]

    def least(self, share: float) -> int:
        """Return the least rank that keeps a share of the update."""
        return next((r for r in range(1, self.rank) if self.kept(r) >= share), self.rank)

    @cached_property
    def _shares(self) -> list[float]:
        """The kept share by rank, from 1."""
        columns = itertools.zip_longest(*(v.tolist() for v in self.values.values()), fillvalue=0.0)
        kept = list(itertools.accumulate(sum(x * x for x in column) for column in columns))
        return [each / kept[-1] for each in kept]


def update_ranks(adapter: Adapter) -> UpdateRanks | None:
    """Compute the share of an adapter's update that each rank keeps, without the whole matrices.

    Returns: None if `to_lora` cannot give the adapter another rank: a site's update is not a
    product, or the adapter changes other parameters. Also None if the update is 0 or not finite.
    """
    if adapter.on or adapter.changed:
        return None
    values = {}
    for site, module in ((placed.site, placed.module) for placed in adapter.placed):
        product = module.factors() if isinstance(module, OutputModule) else None
        if product is None or site.held or site.matrix:
            return None
        left, right = (factor.detach().float().cpu() for factor in product)
        core = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.T, mode="r").R.T
        if not core.isfinite().all():
            return None
        values[site.id] = torch.linalg.svdvals(core)
    return UpdateRanks(values) if any(each.any() for each in values.values()) else None


def _attached_new(
    model: nn.Module,
    adapters: Sequence[Adapter],
    owner: Adapter,
    rule: Rule,
    name: str,
    only_lora: bool = False,
) -> Adapter:
    """Attach the combination of adapters, with the head of one of them."""
    refuse_unmergeable(adapters)
    with STRUCTURE_LOCK, activated(get_state(model), ()):
        updates = _combined(adapters, rule)
    if only_lora:
        _refuse_other_changes(adapters[0], updates)
    with STRUCTURE_LOCK, bare(model) as state, skip_init():
        pooling = owner.pooling.how if owner.pooling else None
        adapter = build_adapter(state, _methods(adapters, updates), name, pooling=pooling)
        _fill(adapter, owner, updates)
        adapter.metadata = _metadata(adapters, owner, rule, updates)
        state.add(adapter)
    return adapter


def _refuse_other_changes(adapter: Adapter, updates: CombinedUpdates) -> None:
    """Refuse an adapter that is not equivalent to a LoRA."""
    weights = {f"{placed.site.host}.weight" for placed in adapter.placed}
    if others := sorted(updates.deltas.keys() - weights):
        raise MergeError(
            f"{adapter.name!r} changes more than the weights of projections",
            offenders=others[:_NAMED],
            expected="changes that a LoRA can have",
            hint=f"combine(model, [{adapter.name!r}]), which keeps them, or adapterhub combine",
        )
    if not weights:
        raise MergeError(
            f"{adapter.name!r} changes no weights of projections",
            expected="an adapter with modules at projections",
        )
    if updates.deltas:
        raise MergeError(
            f"{adapter.name!r} has updates without a rank of their own",
            offenders=sorted(updates.deltas)[:_NAMED],
            expected="a rank for the LoRA",
            hint="energy=0.99, or rank=16; --energy, --rank",
        )


def _attached(model: nn.Module, names: Sequence[str]) -> tuple[Adapter, ...]:
    state = find_state(model)
    if state is None or not names:
        raise AttachError("no adapters to combine", hint='load(model, "out/polite") first')
    require_attached(state, names)
    adapters = tuple(state.adapters[name] for name in names)
    if on := [adapter for adapter in adapters if adapter.on]:
        raise MergeError(
            "adapters that are on top of others cannot be combined",
            offenders=[f"{a.name!r} is on {', '.join(repr(b.name) for b in a.on)}" for a in on],
            expected="adapters of the bare backbone, which are changes of its weights",
            hint="activate(model, Average([...])) averages their outputs",
        )
    sites = [placed.site for adapter in adapters for placed in adapter.placed]
    if held := {f"{site.stack}.{site.role}" for site in sites if site.held or site.matrix}:
        raise MergeError(
            "adapters of weights that are not projections cannot be combined",
            offenders=sorted(held),
            expected="adapters at projections, or whole weights",
            hint="activate(model, Average([...])) averages their updates",
        )
    return adapters


def _owner_of_head(adapters: Sequence[Adapter], head: str | None) -> Adapter:
    """Return the adapter that provides the head of the result."""
    if head is not None:
        chosen = next((adapter for adapter in adapters if adapter.name == head), None)
        if chosen is None:
            raise AttachError(
                f"the head should come from {head!r}, which is not combined",
                expected=f"one of {', '.join(adapter.name for adapter in adapters)}",
            )
        return chosen
    with_head = [adapter for adapter in adapters if adapter.head]
    if len({(adapter.labels, adapter.problem_type) for adapter in with_head}) > 1:
        raise MergeError(
            "the adapters have different heads, and the new one can have only one",
            offenders=[
                f"{a.name}: {', '.join(a.labels) or 'a number'} ({a.problem_type})"
                for a in with_head
            ],
            expected="adapters with the same labels, or a choice",
            hint=f"combine(..., head={adapters[0].name!r}), or --head ADAPTER",
        )
    return next(iter(with_head), adapters[0])


def _rule(
    how: str, weights: Sequence[float] | None, density: float, cut: Cut, seed: int, n: int
) -> Rule:
    if how not in RULES:
        raise unknown("rule for combining adapters", how, RULES)
    default = 1 / n if how in ("linear", "dare") else 1.0
    rule = Rule(how, tuple(weights or [default] * n), density, seed, cut)
    problems = [] if len(rule.weights) == n else [f"{len(rule.weights)} weights for {n} adapters"]
    problems += [] if 0 < density <= 1 else [f"density {density}, not in (0, 1]"]
    problems += [] if cut.rank is None or cut.rank > 0 else [f"rank {cut.rank}, not above 0"]
    problems += (
        [] if cut.energy is None or 0 < cut.energy <= 1 else [f"energy {cut.energy}, not in (0, 1]"]
    )
    if problems:
        raise ConfigError("options of combine are out of range", offenders=problems)
    return rule


def _combined(adapters: Sequence[Adapter], rule: Rule) -> CombinedUpdates:
    """Combine all task vectors, one projection or parameter at a time."""
    generator = torch.Generator().manual_seed(rule.seed)
    hosts = dict.fromkeys(p.site.host for adapter in adapters for p in adapter.placed)
    updates, combined = CombinedUpdates(), set[str]()
    for host in hosts:
        projection = ProjectionUpdates(adapters, host)
        if products := projection.concatenated(rule):
            updates += products
        else:
            updates += projection.combine(rule, generator)
            combined |= {f"{host}.weight", f"{host}.bias"}
    deltas = {}
    for path, original in _other_parameters(adapters, combined):
        owned = [{id(c.original): c.own for c in adapter.changed} for adapter in adapters]
        values = [each.get(id(original), original).float() for each in owned]
        deltas[path] = rule([value - original.float() for value in values], generator)
    return updates + CombinedUpdates(deltas=deltas)


def _other_parameters(
    adapters: Sequence[Adapter], combined: set[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the backbone's other parameters that any adapter replaces, with their paths."""
    model, anatomy = adapters[0].model, adapters[0].anatomy
    changed = {id(c.original) for adapter in adapters for c in adapter.changed}
    new = Backbone.of(model).fresh
    activate(model)
    for path, parameter in anatomy.parameters().items():
        if id(parameter) in changed and path not in combined | new:
            yield path, parameter


def _slice(site: Site, matrix: Tensor) -> Tensor:
    """Return the rows of W, (d_out, d_in), that a site owns."""
    return matrix if site.part is None else site.part.read(matrix.T).T


def _lost(change: Tensor, left: Tensor, right: Tensor) -> float:
    """Compute ||change - left right|| / ||change||."""
    share = (change - left @ right).norm() / change.norm().clamp(min=1e-30)
    return float(share)


def _methods(adapters: Sequence[Adapter], updates: CombinedUpdates) -> tuple[Method, ...]:
    """Return the methods for the parameters of the result."""
    first, anatomy = adapters[0], adapters[0].anatomy
    if all(a.methods == first.methods and not a.placed for a in adapters):
        return first.methods
    methods: list[Method] = []
    if updates.factors:
        ranks = {site: len(right) for site, (_, right) in updates.factors.items()}
        rank = max(ranks.values())
        smaller = {site: r for site, r in ranks.items() if r != rank}
        methods.append(LoRA(rank=rank, alpha=float(rank), sites=tuple(ranks), ranks=smaller))
    if updates.deltas:
        methods.append(Staged(groups=(" + ".join(map(anatomy.key, updates.deltas)),)))
    return tuple(methods)


def _fill(adapter: Adapter, owner: Adapter, updates: CombinedUpdates) -> None:
    """Copy the updates into the new adapter, and the head and labels of their owner."""
    paths = {id(p): path for path, p in adapter.anatomy.parameters().items()}
    owned = {id(c.original): c.own for c in owner.changed}
    with torch.no_grad():
        for placed in adapter.placed:
            assert isinstance(placed.module, LoRALayer)
            left, right = updates.factors[placed.site.id]
            placed.module.A.copy_(right)
            placed.module.B.copy_(left / placed.module.scale)
        for changed in adapter.changed:
            path = paths[id(changed.original)]
            if path in updates.deltas:
                changed.own.copy_(changed.original.float() + updates.deltas[path])
            else:  # newly initialized
                changed.own.copy_(owned[id(changed.original)])
    if adapter.head and owner.head:
        adapter.head.own = copy.deepcopy(owner.head.own)
        adapter.head.labels = copy.deepcopy(owner.head.labels)


def _metadata(
    adapters: Sequence[Adapter], owner: Adapter, rule: Rule, updates: CombinedUpdates
) -> AdapterMetadata:
    """Extend the metadata of the head's owner by the combined adapters and the rule."""
    record = {
        "how": rule.how,
        "adapters": [adapter.name for adapter in adapters],
        "weights": list(rule.weights),
        "density": rule.density,
        "rank": rule.cut.rank,
        **({} if rule.cut.energy is None else {"energy": rule.cut.energy}),
        "seed": rule.seed,
        "head": owner.name,
        "lost": max(updates.lost, default=0.0),
    }
    of = owner.metadata
    training = {**of.training, "combined": record}
    return AdapterMetadata(
        of.task, of.tokenizer, of.chat_template, training, processor=of.processor
    )


def trim(tau: Tensor, density: float) -> Tensor:
    """Set all entries to 0 except the share `density` with the largest magnitudes."""
    count = int(density * tau.numel())
    mask = torch.zeros_like(tau).flatten()
    mask[tau.abs().flatten().topk(count).indices] = 1
    return tau * mask.view_as(tau)


def drop(tau: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Set entries to 0 with probability 1 - density, and rescale the others.

    The expected value does not change.
    """
    mask = torch.rand(tau.shape, generator=generator) < density
    return tau * mask.to(tau.device) / density


def weighted_sum(taus: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute sum_i w_i tau_i."""
    return sum((w * tau for w, tau in zip(weights, taus, strict=True)), torch.zeros_like(taus[0]))


def elect_and_merge(taus: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute the mean of the weighted entries that have the same sign as the sum of all.

    A sum of 0 counts as positive; entries of 0 have no sign.
    """
    positive = sum(taus, torch.zeros_like(taus[0])) >= 0
    agree = [torch.where(positive, tau > 0, tau < 0) for tau in taus]
    total = weighted_sum([tau * mask for tau, mask in zip(taus, agree, strict=True)], weights)
    return total / torch.stack(agree).sum(0).clamp(min=1)


def combine_vectors(
    how: str,
    taus: Sequence[Tensor],
    weights: Sequence[float],
    density: float,
    generator: torch.Generator,
) -> Tensor:
    """Combine the task vectors of one parameter, tau_i = theta_i - theta_0, with weights w_i.

    With k the density:

        linear      tau = sum_i w_i tau_i                         Ilharco et al. 2023, section 2
        ties        trim:   tau_i keeps its k largest magnitudes, the rest is 0
                    elect:  g = sign(sum_i tau_i), elementwise
                    merge:  tau = mean over {i: sign(tau_i) = g} of w_i tau_i
                                                                  Yadav et al. 2023, algorithm 1
        dare        tau_i = m * tau_i / k,  m ~ Bernoulli(k);  then linear
        dare-ties   the same drop and rescale; then elect and merge    Yu et al. 2024, section 3

    With linear, weights (1, 1) add two tasks, and (-1) forgets one. Each parameter is trimmed
    separately, as in peft and mergekit; the paper trims the whole model's task vector.

    Ilharco et al., "Editing Models with Task Arithmetic", https://arxiv.org/abs/2212.04089.
    Yadav et al., "TIES-Merging: Resolving Interference When Merging Models",
    https://arxiv.org/abs/2306.01708. Yu et al., "Language Models are Super Mario: Absorbing
    Abilities from Homologous Models as a Free Lunch", https://arxiv.org/abs/2311.03099.
    """
    if how.startswith("dare"):
        taus = [drop(tau, density, generator) for tau in taus]
    elif how == "ties":
        taus = [trim(tau, density) for tau in taus]
    return (elect_and_merge if how.endswith("ties") else weighted_sum)(taus, weights)


def low_rank(delta: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Approximate a matrix by the nearest one of a rank, as a product (d_out, rank) (rank, d_in).

    These are the first singular components (Eckart & Young 1936); each factor gets the square root
    of the singular values. For few components of a large matrix, a randomized method is nearly as
    close in a fraction of the time.
    """
    total = delta.double().square().sum()
    most = min(cut.rank or len(delta), *delta.shape)
    count = min(cut.rank or _FIRST, most)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        while True:
            large = min(delta.shape) >= max(_LARGE, 8 * count)
            u, s, vh = largest_components(
                delta, count if large else most, _ITERATIONS if large else 0
            )
            enough = cut.energy is None or s.double().square().sum() >= cut.energy * total
            if enough or len(s) >= most:
                return _factors(u, s, vh, cut, total)
            count = min(2 * count, most)


def cut_product(left: Tensor, right: Tensor, cut: Cut) -> tuple[Tensor, Tensor, float]:
    """Reduce a product B A to the kept rank, without computing it.

    left: (d_out, r), right: (r, d_in).

    Returns:
        The factors, and the lost share of the product.
    """
    if not cut or (cut.energy is None and len(right) <= (cut.rank or 0)):
        return left, right, 0.0
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    b, a = _factors(q_left @ u, s, vh @ q_right.T, cut, s.double().square().sum())
    return b, a, float(s[len(a) :].norm() / s.norm().clamp(min=1e-30))


def _factors(u: Tensor, s: Tensor, vh: Tensor, cut: Cut, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the kept components of a matrix with this energy."""
    size, root = cut.size(s, total), s.sqrt()
    return (u * root)[:, :size], (root[:, None] * vh)[:size]
