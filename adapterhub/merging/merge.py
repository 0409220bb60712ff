"""Merge adapters into the weights of their backbone, and take the merge back.

A site module that is affine goes into the weight of its host (`adapterhub.merging.affine`). All is
computed in fp32 and rounded once, to the dtype of the weight. Adapters that hold backbone
parameters of their own leave these in their place, in every module that shares them, and a task
head becomes the model's own.

A weight that is quantized is read as the numbers that it computes with, and takes a merge only when
that is asked for: they are quantized once more, which rounds as coarsely as the first time, and may
round a small update away.

Every merge is verified: the outputs on a probe batch, before and after, may differ by

    max |logit difference| <= TOLERANCE[dtype] * max |logit|

A weight is rounded with a relative error of up to u = 2^-24 (fp32), 2^-11 (fp16) or 2^-8 (bf16),
and so is each product before and after; over the layers such errors add up like a random walk. The
tolerances are some 25 u for the two short formats, and wide enough for any order of summation in
fp32. An update that is smaller than the rounding of the weight under it is lost within them, which
is why the difference is reported. Where weights are quantized again it is reported alone: no bound
follows from the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.parts import AdapterHead, parameter_holders
from adapterhub.adapters.state import ModelState, activated, find_state, require_attached
from adapterhub.anatomy.sites import CHILD
from adapterhub.backbones.identity import ORIGIN, name_and_revision
from adapterhub.backbones.newly_initialized import NEWLY_INITIALIZED
from adapterhub.backbones.probe import probe
from adapterhub.backbones.quantized_weights import can_requantize, requantized
from adapterhub.backbones.weights import as_stored, is_offloaded, storage_problem
from adapterhub.errors import AttachError, MergeError
from adapterhub.hooks.projection import OutputSlot
from adapterhub.merging.affine import merged_weight_and_bias

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}
_RECORD = "_adapterhub_merges"
_NO_WEIGHT = {
    "keyvalue": "it adds keys and values, which no weight of the backbone holds",
    "embed": "it adds tokens to the input, which no weight of the backbone holds",
    "mix": "it reads the outputs of several layers",
    "sublayer": "it sits beside a whole sublayer, which is not linear",
    "norm": "it sits at a normalization, which is not linear",
    "linear": "what it computes is not linear in its input",
}


@dataclass(eq=False)
class Named:
    """An attribute of the merged model or of a layer, and the backbone's own."""

    owner: Any
    name: str
    new: Any
    old: Any

    def put(self, on: bool) -> None:
        """Put the new one in place, or the old one back."""
        setattr(self.owner, self.name, self.new if on else self.old)


@dataclass(eq=False)
class Swap:
    """The merged model's parameter, the backbone's own one, the modules that hold it, and what a
    quantized layer keeps `beside` it."""

    new: nn.Parameter
    old: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    beside: tuple[Named, ...] = ()

    def put(self, on: bool) -> None:
        """Put the new one in place, or the old one back."""
        for module, attribute in self.holders:
            module._parameters[attribute] = self.new if on else self.old
        for named in self.beside:
            named.put(on)


@dataclass(eq=False)
class Merge:
    """Adapters that became a part of a model's own weights, and the way back.

    `expected` is what the model computed on the probe batch with the adapters on it, by output;
    `differences` the largest absolute differences from it after the merge, and `tolerances` what
    they may be.
    """

    adapters: tuple[Adapter, ...]
    expected: dict[str, Tensor] = field(repr=False)
    swaps: tuple[Swap, ...] = field(repr=False)
    identity: tuple[Named, ...] = field(repr=False)
    head: AdapterHead | None = field(repr=False)
    differences: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)

    @property
    def difference(self) -> float:
        """max |logit difference| on the probe batch."""
        return max(self.differences.values())

    def put(self, on: bool) -> None:
        """Give the bare model the merged weights and head, or its own back."""
        for swap in self.swaps:
            swap.put(on)
        for attribute in self.identity:
            attribute.put(on)
        if self.head:
            self.head.swap(self.adapters[0].model, on)


def merge(
    model: PreTrainedModel, *names: str, tolerance: float | None = None, requantize: bool = False
) -> Merge:
    """Put adapters into the weights of their backbone, in this order; without names, the active
    ones. The model is a plain one afterwards, to save, compile or serve as any other.

    The weights of the backbone are kept, for `unmerge`. `tolerance` is the largest difference that
    you accept, as a part of the largest logit; by default that of the dtype. On a quantized
    backbone `requantize` is needed: merged weights are rounded to its codes again, and whatever
    finite difference this makes is accepted, if you give no `tolerance`.

    Raises:
        MergeError: no weights can express an adapter (all its parts that cannot are listed), its
            weights are quantized and `requantize` was not asked for (or the other way about), or
            the merged model would compute something else; the model is as it was.
        AttachError: no such adapter, or others are on the model: they were made for its weights.
    """
    state, adapters = _chosen(model, names)
    refuse_unmergeable(adapters, requantize)
    if requantize and tolerance is None:
        tolerance = math.inf
    before = state.compositions
    heads = [adapter.head.lowered() for adapter in adapters if adapter.head]
    with activated(state, (tuple(adapter.name for adapter in adapters),)):
        swaps, identity = _swaps(adapters), _identity(model, adapters)
        made = Merge(adapters, probe(model), swaps, identity, heads[-1] if heads else None)
    state.activate(((),))
    for adapter in adapters:
        adapter.detach()
    made.put(on=True)
    try:
        made.differences, made.tolerances = compare(made.expected, model, tolerance)
    except BaseException:
        made.put(on=False)
        state.reattach(adapters, before)
        raise
    setattr(model, _RECORD, [*getattr(model, _RECORD, ()), (state, made)])
    return made


def unmerge(model: PreTrainedModel) -> tuple[Adapter, ...]:
    """Take the last merge back: the backbone has its own weights again, bit by bit, and the
    adapters are on it and active.

    Raises:
        MergeError: nothing is merged.
        AttachError: adapters were put on the merged model.
    """
    record = getattr(model, _RECORD, None)
    if not record:
        raise MergeError("nothing is merged into this model", hint="merge(model)")
    if attached := find_state(model):
        raise AttachError(
            "adapters were attached to the merged model, and depend on its weights",
            offenders=map(repr, attached.adapters),
            hint="detach(model) first",
        )
    state, made = record.pop()
    if not record:
        delattr(model, _RECORD)
    made.put(on=False)
    adapters: tuple[Adapter, ...] = made.adapters
    state.reattach(adapters, (tuple(adapter.name for adapter in adapters),))
    return adapters


def _chosen(model: PreTrainedModel, names: Sequence[str]) -> tuple[ModelState, tuple[Adapter, ...]]:
    state = find_state(model)
    if state is None:
        raise AttachError("no adapter is attached to this model", hint='load(model, "out/polite")')
    active = [adapter.name for adapter in state.adapters.values() if adapter.active]
    chosen = list(dict.fromkeys(names or active))
    require_attached(state, chosen)
    if not chosen:
        raise AttachError(
            "no adapter is active", hint=f"merge(model, {next(iter(state.adapters))!r})"
        )
    if others := [name for name in state.adapters if name not in chosen]:
        raise AttachError(
            "other adapters are attached, and were trained on the weights as they are now",
            offenders=map(repr, others),
            hint=f"detach(model, {others[0]!r}) first, or merge them too",
        )
    return state, tuple(state.adapters[name] for name in chosen)


def refuse_unmergeable(adapters: Sequence[Adapter], requantize: bool = False) -> None:
    """Refuse adapters that weights cannot express, and weights that cannot be replaced."""
    model = adapters[0].model
    if requantize and getattr(model.config, "quantization_config", None) is None:
        raise MergeError(
            "requantize was asked for, and this backbone is not quantized",
            hint="merge without it; or load the backbone quantized, and the adapter on it",
        )
    parts = [line for adapter in adapters for line in blockers(adapter)]
    if parts:
        names = ", ".join(repr(adapter.name) for adapter in adapters)
        raise MergeError(
            f"{names} cannot be merged: these parts are no change of weights",
            offenders=parts,
            expected="methods that are linear in the weights, such as lora, ia3, norms or full",
            hint="keep the adapter on the model: model.generate and Trainer work with it",
        )
    stored = sorted(
        {line for adapter in adapters for line in _storage_problems(adapter, requantize)}
    )
    if stored:
        raise MergeError(
            "the weights of this backbone cannot take a merge",
            offenders=stored,
            expected="weights of their own, in fp32, bf16 or fp16",
            hint="reload the backbone in bf16 or fp32 without quantization, load the adapter there "
            "and merge there: adapterhub merge ADAPTER --base-dtype bf16 --output OUT; or quantize "
            "merged weights again, which may lose much of the adapter: --requantize",
        )


def blockers(adapter: Adapter) -> list[str]:
    """The parts of an adapter that no weights can express, and why; [] if it can be merged."""
    found: dict[str, str] = {}
    for placed in adapter.placed:
        site = placed.site
        if site.kind != "linear" or not placed.module.affine:
            part = f"{placed.method.name} at {site.stack}.{site.role}"
            found[part] = _NO_WEIGHT[site.kind]
    return [f"{part}: {reason}" for part, reason in found.items()]


def _storage_problems(adapter: Adapter, requantize: bool) -> Iterator[str]:
    """Weights that are quantized and may not be so again, or that modules share of which only one
    is adapted."""
    holders = parameter_holders(adapter.model)
    for site in {placed.site.host: placed.site for placed in adapter.placed}.values():
        host = adapter.model.get_submodule(site.host)
        if is_offloaded(host):
            yield f"{site.host}: its weights are offloaded"
            continue
        for name in ("weight", "bias"):
            parameter = getattr(host, name, None)
            if parameter is None and name == "bias":
                continue
            problem = storage_problem(parameter)
            if problem and not (requantize and name == "weight" and can_requantize(host)):
                yield f"{site.host}.{name}: {problem}"
            elif len(holders[id(parameter)]) > 1:
                yield f"{site.host}.{name}: other modules share it"
    for changed in adapter.changed:
        if problem := storage_problem(changed.own):
            yield f"{changed.name}: {problem}"


def _swaps(adapters: Sequence[Adapter]) -> tuple[Swap, ...]:
    """The merged parameters of all that the adapters change. They are active."""
    model = adapters[0].model
    swaps: dict[int, Swap] = {}
    for changed in (c for adapter in adapters for c in adapter.changed):
        new = changed.own.detach().to(changed.original.dtype)
        swaps[id(changed.own)] = _swap(new, changed.original, changed.holders)
    for path in dict.fromkeys(p.site.host for adapter in adapters for p in adapter.placed):
        host = model.get_submodule(path)
        slot = host._modules[CHILD]
        assert isinstance(slot, OutputSlot)
        weight, bias = merged_weight_and_bias(host, slot)
        found = {"weight": as_stored(host, weight)} | ({} if bias is None else {"bias": bias})
        for name, tensor in found.items():
            live = host.get_parameter(name)
            own = swaps.get(id(live))
            old = own.old if own else live
            made = _requantized if storage_problem(old) else _swap
            swaps[id(live)] = made(tensor, old, ((host, name),))
    return tuple(swaps.values())


def _swap(tensor: Tensor, old: nn.Parameter, holders: tuple[tuple[nn.Module, str], ...]) -> Swap:
    new = nn.Parameter(tensor.to(old.dtype).contiguous(), requires_grad=old.requires_grad)
    return Swap(new, old, holders)


def _requantized(
    tensor: Tensor, old: nn.Parameter, holders: tuple[tuple[nn.Module, str], ...]
) -> Swap:
    host, _ = holders[0]
    new, beside = requantized(host, tensor)
    named = tuple(Named(host, n, value, getattr(host, n)) for n, value in beside.items())
    return Swap(new, old, holders, named)


def _identity(model: PreTrainedModel, adapters: Sequence[Adapter]) -> tuple[Named, ...]:
    """The merged model is another backbone, by its name; none of its parameters is new to it."""
    name = "-with-".join([name_and_revision(model)[0], *(adapter.name for adapter in adapters)])
    known: list[tuple[Any, str, Any]] = [
        (model.config, "_name_or_path", name),
        (model.config, "_commit_hash", None),
        (model, NEWLY_INITIALIZED, frozenset()),
        (model, ORIGIN, None),
    ]
    return tuple(Named(o, n, new, getattr(o, n)) for o, n, new in known if hasattr(o, n))


def compare(
    expected: dict[str, Tensor], model: PreTrainedModel, tolerance: float | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest absolute differences of what a model computes on the probe batch from what is
    expected, by output, and what they may be: `tolerance`, or that of the dtype, times the largest
    value.

    Raises:
        MergeError: a difference above its tolerance, or one that is not finite.
    """
    found = probe(model)
    relative = tolerance or max(TOLERANCE.get(p.dtype, 0.0) for p in model.parameters())
    differences = {n: (found[n] - value).abs().max().item() for n, value in expected.items()}
    tolerances = {n: relative * _largest(value) for n, value in expected.items()}
    wrong = [
        f"{name}: max |difference| {differences[name]:.3g}, tolerance {tolerances[name]:.3g}"
        for name in expected
        if not differences[name] <= tolerances[name]  # NaN is not
    ]
    if wrong:
        raise MergeError(
            "the merged model does not compute what the model with its adapter does",
            offenders=wrong,
            expected=f"differences of at most {relative:g} times the largest value",
            hint="merge in fp32 (--base-dtype fp32), accept more (tolerance=0.3, --tolerance 0.3), "
            "or keep the adapter on the model",
        )
    return differences, tolerances


def _largest(value: Tensor) -> float:
    return max(value.abs().max().item(), torch.finfo(torch.float32).tiny)
