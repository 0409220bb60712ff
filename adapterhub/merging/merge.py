"""Merge adapters into the weights of their backbone, and undo it.

Affine site modules are merged into the weight of their host (`adapterhub.merging.affine`), in fp32,
rounded once to the dtype of the weight. Parameters trained instead of the backbone's replace them
in every module that shares them, and the adapter's head replaces the model's head.

Quantized weights are dequantized, merged and, only with `requantize`, quantized again. This rounds
as coarsely as the first quantization, and may lose a small update.

Every merge is verified on a probe batch, before and after:

    max |logit difference| <= TOLERANCE[dtype] * max |logit|

The tolerances are defined in `adapterhub.backbones.compare`. An update smaller than the rounding
error of the weight is lost within the tolerance, so the difference is reported. After
requantization it is only reported, since the dtype does not give a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adapterhub.adapters.activation import with_foundations
from adapterhub.adapters.adapter import Adapter, AdapterHead, parameter_holders
from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.state import (
    ModelState,
    activated,
    backbone_fingerprint,
    find_state,
    get_state,
    refuse_in_route,
    refuse_routed,
    require_attached,
)
from adapterhub.anatomy.backbone import CHILD, Backbone, is_offloaded, parameter_at, storage_problem
from adapterhub.backbones.compare import SameNumbers, coarsest_dtype, same, tolerance_of
from adapterhub.backbones.end_tokens import with_stops
from adapterhub.backbones.probe import outputs_on, probe
from adapterhub.backbones.processor import TokenizerSnapshot
from adapterhub.backbones.quantized import can_requantize, requantized
from adapterhub.errors import AdapterhubError, AttachError, MergeError, one_line, warn_user
from adapterhub.hooks.composition import Composition, adapter_names
from adapterhub.hooks.head import activation_between
from adapterhub.hooks.new_tokens import VOCABULARY, NewTokenRows
from adapterhub.interrupts import deferred_interrupts
from adapterhub.merging.affine import merged_names, merged_parameters
from adapterhub.methods.beft import LoneBias
from adapterhub.patch import Patch

_RECORDS = "_adapterhub_merges"
_NOT_MERGEABLE = {
    "keyvalue": "it adds keys and values, which are not a weight of the backbone",
    "embed": "it adds tokens to the input, which are not a weight of the backbone",
    "states": "it changes states between modules, which are not a weight of the backbone",
    "mix": "it reads the outputs of several layers",
    "sublayer": "it adapts a whole sublayer, which is not linear",
    "layer": "it changes the states behind a whole layer, which is not linear",
    "norm": "it adapts a normalization, which is not linear",
    "linear": "its output is not linear in its input",
    "weight": "its output is not linear in its input",
}
_NO_BIAS = "it adds a bias to a projection that has none"
_AT_SOME_TOKENS = "it changes some tokens of a text only, and a weight applies to all"


class NewAttribute(NamedTuple):
    """The merged value of an attribute of the model, its config or a layer."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True, eq=False)
class MergedParameter:
    """The merged and the original parameter, and the modules that hold it.

    `attributes` are the layer's quantization state of a quantized parameter.
    """

    merged: nn.Parameter
    original: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    attributes: tuple[NewAttribute, ...] = ()


@dataclass(eq=False)
class Merge:
    """Adapters that were merged into a model, with the state to undo the merge.

    Attributes:
        adapters: the adapters, in the order of merging.
        expected: the outputs on the probe batch before the merge, by name.
        parameters: the merged parameters.
        attributes: the attributes that identify the model.
        head: the last adapter's head.
        templates: the adapters' chat template for each tokenizer.
        differences: the largest absolute difference of each output after the merge.
        tolerances: the largest accepted differences.
    """

    adapters: tuple[Adapter, ...]
    expected: dict[str, Tensor] = field(repr=False)
    parameters: tuple[MergedParameter, ...] = field(repr=False)
    attributes: tuple[NewAttribute, ...] = field(repr=False)
    head: AdapterHead | None = field(repr=False)
    templates: tuple[tuple[TokenizerSnapshot, str | None], ...] = field(default=(), repr=False)
    scope: object = field(default_factory=object, repr=False)  # the name of the values in outputs
    differences: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)
    patch: Patch = field(default_factory=Patch, repr=False)

    @property
    def difference(self) -> float:
        """The largest absolute difference of any output on the probe batch; nan without one."""
        return max(self.differences.values(), default=math.nan)

    def apply(self) -> None:
        """Set the merged weights and head on a model without adapters, until `patch.undo`."""
        for parameter in self.parameters:
            for module, name in parameter.holders:
                self.patch.put(module._parameters, name, parameter.merged)
        inner = [each for parameter in self.parameters for each in parameter.attributes]
        for owner, name, value in (*inner, *self.attributes):
            self.patch.set(owner, name, value)
        if self.head:
            self.patch.push(self.head.patch.undo)
            self.head.put_into(self.adapters[0].backbone)
        for tokenizer, template in self.templates:
            self.patch.push(partial(tokenizer.show, self.scope, None))
            tokenizer.show(self.scope, template)


def merge(
    model: nn.Module,
    *names: str,
    tolerance: float | None = None,
    requantize: bool = False,
    batch: Any = None,
) -> Merge:
    """Merge adapters into the weights of their backbone.

    Afterwards the model is a plain model to save, compile or serve. The original weights are kept
    for `unmerge`.

    Args:
        model: the model that the adapters are attached to.
        names: the adapters, in the order of merging; by default the active ones. The adapters below
            them are merged first.
        tolerance: the largest accepted difference of an output, relative to its largest value; by
            default the tolerance of the dtype, and any finite difference with `requantize`.
        requantize: quantize the merged weights again; required for a quantized backbone.
        batch: the input to verify the merge: a tensor, a tuple, or a mapping of arguments;
            generated by default for models of transformers with usual inputs. Other models are not
            compared without a batch.

    Raises:
        MergeError: an adapter is not a change of weights (lists all such parts), a backbone is
            quantized without `requantize` or the reverse, or outputs differ after the merge; the
            model is unchanged.
        AttachError: an adapter does not exist, other attached adapters depend on the weights, or a
            route is open.
    """
    state, adapters = _selected(model, names)
    refuse_in_route(state)
    refuse_routed(state, *state.adapters)
    refuse_unmergeable(adapters, requantize)
    _refuse_pooling(adapters)
    _refuse_own_layers(adapters)
    if requantize and tolerance is None:
        tolerance = math.inf
    (composition,) = state.compositions
    heads = [adapter.head.lowered() for adapter in adapters if adapter.head]
    without: dict[str, Tensor] = {}
    if requantize and not heads:  # a bare model has another head
        with STRUCTURE_LOCK, activated(state, ()):
            without = _expected(state.backbone, batch)
    with STRUCTURE_LOCK, activated(state, tuple(adapter.name for adapter in adapters)):
        parameters = _swaps(adapters)
        attributes = _identity(state.backbone, adapters) + _vocabulary(adapters)
        head = heads[-1] if heads else None
        templates = tuple(state.templates())
        expected = _expected(state.backbone, batch)
        record = Merge(adapters, expected, parameters, attributes, head, templates)
    with STRUCTURE_LOCK, _merged(state, record, composition):
        precision = tolerance or coarsest_dtype(state.model)
        outputs = _outputs(state.backbone, batch) if expected else {}
        compared = check_outputs(record.expected, outputs, precision)
        _warn_of_a_lost_update(outputs, record.expected, without)
        record.differences, record.tolerances = compared.differences, compared.tolerances
    return record


def _expected(backbone: Backbone, batch: Any) -> dict[str, Tensor]:
    """Return the outputs to compare with; {} with a warning if there are none.

    A batch cannot be generated for all models of transformers: some read videos, boxes or pairs.
    """
    if backbone.foreign and batch is None:
        return {}
    try:
        return _outputs(backbone, batch)
    except (AdapterhubError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of a model about unknown inputs
        if batch is not None:
            raise
        warn_user(
            "the merged weights were not compared with the outputs of the adapter: "
            f"{backbone.name} does not read a made batch ({one_line(str(error))}); "
            "merge(model, batch=inputs) compares",
            stacklevel=3,
        )
        return {}


def _outputs(backbone: Backbone, batch: Any) -> dict[str, Tensor]:
    """Return the outputs on a batch, by default on a generated one for models of transformers."""
    if batch is None:
        return probe(backbone.pretrained)
    return outputs_on(backbone.module, batch)


def _warn_of_a_lost_update(
    merged: dict[str, Tensor], adapted: dict[str, Tensor], without: dict[str, Tensor]
) -> None:
    """Warn if a merged model is closer to the backbone than to its adapter.

    The weights of a quantized backbone are indices of codes: an update smaller than half the
    distance of two codes is rounded away, and small updates everywhere are lost completely.
    """
    for name, bare in without.items():
        moved = (merged[name] - bare).norm().item()
        missed = (merged[name] - adapted[name]).norm().item()
        if moved < missed:
            warn_user(
                "the update was lost by quantizing again, as it is smaller than the distance of "
                f"two codes: {name} of the merged model differ by {missed:.3g} from those of the "
                f"adapter, and by {moved:.3g} from those of the backbone without it; keep the "
                "adapter, or merge into unquantized weights: --base-dtype bf16",
                stacklevel=3,
            )
            return


@contextmanager
def _merged(state: ModelState, record: Merge, composition: Composition) -> Iterator[None]:
    """Replace the adapters of a model by its merged weights, which stay unless an error occurs.

    The tokenizer keeps the additions of the adapters. On an error, the composition is active again.
    """
    model = state.model
    try:
        with deferred_interrupts():
            state.detach(*(adapter.name for adapter in record.adapters))
            record.apply()
            for adapter in record.adapters:
                adapter.lend()
        yield
        _set_records(model, [*_records(model), (state, record)])
    except BaseException:
        with deferred_interrupts():
            _set_records(model, [each for each in _records(model) if each[1] is not record])
            if find_state(model) is None:
                record.patch.undo()
                state.reattach(record.adapters, composition)
        raise


def _records(model: nn.Module) -> list[tuple[ModelState, Merge]]:
    return list(getattr(Backbone.of(model).module, _RECORDS, ()))


def _set_records(model: nn.Module, records: list[tuple[ModelState, Merge]]) -> None:
    attributes = vars(Backbone.of(model).module)
    if records:
        attributes[_RECORDS] = records
    else:
        attributes.pop(_RECORDS, None)


def unmerge(model: nn.Module) -> tuple[Adapter, ...]:
    """Undo the last merge: restore the original weights exactly, and reattach the adapters.

    Returns:
        The adapters, attached and active.

    Raises:
        MergeError: nothing is merged, or the model has since been converted to another dtype.
        AttachError: adapters were attached to the merged model.
    """
    records = _records(model)
    if not records:
        raise MergeError("nothing is merged into this model", hint="merge(model)")
    if attached := find_state(model):
        raise AttachError(
            "adapters were attached to the merged model, and depend on its weights",
            offenders=map(repr, attached.adapters),
            hint="detach(model) first",
        )
    _refuse_converted(records[-1][1])
    *others, (state, record) = records
    names = tuple(adapter.name for adapter in record.adapters)
    with STRUCTURE_LOCK, deferred_interrupts():
        try:
            record.patch.undo()
            state.reattach(record.adapters, names)
            _set_records(model, others)
        except BaseException:
            if state.adapters:
                state.detach(*state.adapters)
            record.apply()
            _set_records(model, records)
            raise
    return record.adapters


def _refuse_converted(record: Merge) -> None:
    for swap in record.parameters:
        if swap.merged.dtype != swap.original.dtype:
            dtype = str(swap.original.dtype)
            raise MergeError(
                f"the merged model was converted to {swap.merged.dtype}; the original weights are "
                f"in {dtype}",
                hint=f"model.to({dtype}) first",
            )


def _selected(model: nn.Module, names: Sequence[str]) -> tuple[ModelState, tuple[Adapter, ...]]:
    state = find_state(model)
    if state is None:
        raise AttachError("no adapter is attached to this model", hint='load(model, "out/polite")')
    active = [adapter.name for adapter in state.adapters.values() if adapter.active]
    require_attached(state, names)
    requested = with_foundations(state.adapters, tuple(names or active))
    selected = list(dict.fromkeys(adapter_names(requested)))
    if not selected:
        raise AttachError(
            "no adapter is active", hint=f"merge(model, {next(iter(state.adapters))!r})"
        )
    if others := [name for name in state.adapters if name not in selected]:
        raise AttachError(
            "other adapters are attached, and depend on the unmerged weights",
            offenders=map(repr, others),
            hint=f"detach(model, {others[0]!r}) first, or merge them too",
        )
    return state, tuple(state.adapters[name] for name in selected)


def refuse_unmergeable(adapters: Sequence[Adapter], requantize: bool = False) -> None:
    """Refuse adapters that are not a change of weights, and weights that cannot be replaced.

    Raises:
        MergeError: lists the parts of the adapters, or the weights.
    """
    if requantize and adapters[0].backbone.quantization is None:
        raise MergeError(
            "cannot requantize: this backbone is not quantized",
            hint="merge without requantize, or load the backbone quantized and the adapter on it",
        )
    parts = [line for adapter in adapters for line in blockers(adapter)]
    if parts:
        names = ", ".join(repr(adapter.name) for adapter in adapters)
        raise MergeError(
            f"{names} cannot be merged: these parts are not a change of weights",
            offenders=parts,
            expected="methods that are linear in the weights, such as lora, ia3, norms or full",
            hint="keep the adapter attached: model.generate and Trainer work with it",
        )
    problems = {line for adapter in adapters for line in _storage_problems(adapter, requantize)}
    if problems:
        raise MergeError(
            "cannot merge into the weights of this backbone",
            offenders=sorted(problems),
            expected="weights in fp32, bf16 or fp16 that no other module shares",
            hint="reload the backbone in bf16 or fp32 without quantization, load the adapter there "
            "and merge there: adapterhub merge ADAPTER --base-dtype bf16 --output OUT; or quantize "
            "merged weights again, which may lose much of the adapter: --requantize",
        )


def _refuse_pooling(adapters: Sequence[Adapter]) -> None:
    """Refuse heads whose input a plain checkpoint would pool differently."""
    if pooled := [adapter for adapter in adapters if adapter.pooling]:
        name = type(adapters[0].model).__name__
        raise MergeError(
            f"a plain {name} does not pool the head's input as these adapters do",
            offenders=[f"{a.name!r}: pooling={a.pooling.how}" for a in pooled if a.pooling],
            expected="adapters whose heads read what the model's class gives them",
            hint="adapterhub merge ADAPTER, which writes a sentence-transformers model; or "
            'train with --task "classification(pooling=model)"',
        )


def _refuse_own_layers(adapters: Sequence[Adapter]) -> None:
    """Refuse heads with layers that the class of the model lacks."""
    own = {a.name: activation_between(a.head.own) for a in adapters if a.head}
    if others := [f"{name!r}: {activation}" for name, activation in own.items() if activation]:
        raise MergeError(
            f"a plain {type(adapters[0].model).__name__} does not have the layers of these heads",
            offenders=[f"{line} between two layers, as `adapters` has them" for line in others],
            expected="adapters with the head of the model's class",
            hint="adapterhub predict ADAPTER, without a merge; or load(..., head=False)",
        )


def blockers(adapter: Adapter) -> list[str]:
    """Describe the parts of an adapter that cannot be merged; [] if all can."""
    reasons: dict[str, str] = {}
    for placed in adapter.placed:
        site = placed.site
        if site.kind not in ("linear", "weight") or not placed.module.affine:
            part = f"{placed.method.name} at {site.stack}.{site.role}"
            some = placed.module.token_sets
            reasons[part] = _AT_SOME_TOKENS if some else _NOT_MERGEABLE[site.kind]
            if isinstance(placed.module, LoneBias):
                reasons[part] = _NO_BIAS
    for changed in (c for c in adapter.changed if c.untied):
        reasons[changed.name] = "untied by the adapter, a merged checkpoint would be tied again"
    return [f"{part}: {reason}" for part, reason in reasons.items()]


def _storage_problems(adapter: Adapter, requantize: bool) -> Iterator[str]:
    """Yield the adapted weights that are offloaded, quantized or shared with other modules."""
    holders = parameter_holders(adapter.model)
    sites = [placed.site for placed in adapter.placed]
    for site in {(site.host, merged_names(site)): site for site in sites}.values():
        host = adapter.model.get_submodule(site.host)
        if is_offloaded(host):
            yield f"{site.host}: its weights are offloaded"
            continue
        for name in merged_names(site):
            parameter = parameter_at(host, name)
            if parameter is None and name.endswith("bias"):
                continue
            problem = storage_problem(parameter)
            if problem and not (requantize and name == "weight" and can_requantize(host)):
                yield f"{site.host}.{name}: {problem}"
            elif len(holders[id(parameter)]) > 1:
                yield f"{site.host}.{name}: other modules share it"
    for changed in adapter.changed:
        if problem := storage_problem(changed.own):
            yield f"{changed.name}: {problem}"


def _swaps(adapters: Sequence[Adapter]) -> tuple[MergedParameter, ...]:
    """Compute the merged parameters. The adapters must be active."""
    model = adapters[0].model
    swaps: dict[int, MergedParameter] = {}  # by the id of the parameter currently in the model
    for changed in (c for adapter in adapters for c in adapter.changed):
        tensor = changed.own.detach().to(changed.original.dtype)
        swaps[id(changed.own)] = _parameter_swap(tensor, changed.original, changed.holders)
    for path in dict.fromkeys(p.site.host for adapter in adapters for p in adapter.placed):
        host = model.get_submodule(path)
        for name, tensor in merged_parameters(host, host._modules[CHILD]).items():
            owner, _, leaf = name.rpartition(".")
            current = host.get_parameter(name)
            replaced = swaps.get(id(current))
            original = replaced.original if replaced else current
            make_swap = _requantized_swap if storage_problem(original) else _parameter_swap
            swaps[id(current)] = make_swap(tensor, original, ((host.get_submodule(owner), leaf),))
    for tokens in (adapter.new_tokens for adapter in adapters if adapter.new_tokens):
        _widen(tokens, swaps)
    return tuple(swaps.values())


def _widen(tokens: NewTokenRows, swaps: dict[int, MergedParameter]) -> None:
    """Put the rows of new tokens into the merged embedding and output layer.

    `swaps` are the merged parameters, by the id of the current ones; extended by these rows.
    """
    holders, done = parameter_holders(tokens.model), set[int]()
    for path, rows, scores in tokens.hosts():
        host = tokens.model.get_submodule(path)
        for name in ("weight", "bias") if scores else ("weight",):
            current = host._parameters.get(name)
            if current is None or id(current) in done:
                continue
            done.add(id(current))
            known = swaps.get(id(current))
            original, table = (known.original, known.merged) if known else (current, current)
            swap = _parameter_swap(
                tokens.table(rows, table.detach()), original, tuple(holders[id(current)])
            )
            attributes = tuple(
                NewAttribute(module, size, len(swap.merged))
                for module, _ in swap.holders
                for size in ("num_embeddings", "out_features")
                if name == "weight" and hasattr(module, size)
            )
            swaps[id(current)] = replace(swap, attributes=attributes)


def _vocabulary(adapters: Sequence[Adapter]) -> tuple[NewAttribute, ...]:
    """Return the size of the vocabulary with all new tokens, and the attributes of that size."""
    narrow: dict[str, Any] = {}
    for tokens in (adapter.new_tokens for adapter in adapters if adapter.new_tokens):
        narrow = tokens.originals | narrow
    sizes, model = [], adapters[0].model
    if narrow.pop(VOCABULARY, None):
        config = adapters[0].backbone.text_config
        sizes = [NewAttribute(config, "vocab_size", config.vocab_size)]
    wide = (NewAttribute(model, name, model._buffers[name]) for name in narrow)
    return (*sizes, *wide)


def _parameter_swap(
    tensor: Tensor, original: nn.Parameter, holders: tuple[tuple[nn.Module, str], ...]
) -> MergedParameter:
    values = tensor.to(original.dtype).contiguous()
    merged = nn.Parameter(values, requires_grad=original.requires_grad)
    return MergedParameter(merged, original, holders)


def _requantized_swap(
    tensor: Tensor, original: nn.Parameter, holders: tuple[tuple[nn.Module, str], ...]
) -> MergedParameter:
    host, _ = holders[0]
    merged, layer_state = requantized(host, tensor)
    attributes = tuple(NewAttribute(host, name, value) for name, value in layer_state.items())
    return MergedParameter(merged, original, holders, attributes)


def _identity(backbone: Backbone, adapters: Sequence[Adapter]) -> tuple[NewAttribute, ...]:
    """Rename the merged model, since it is a different backbone, without new parameters."""
    model, config = backbone.module, backbone.config
    base, _ = backbone.name_and_revision(lambda: backbone_fingerprint(model))
    model_name = "--with-".join([base, *(adapter.name for adapter in adapters)])
    values: list[tuple[Any, str, Any]] = [
        (config, "_name_or_path", model_name),
        (config, "_commit_hash", None),
        (model, Backbone.fresh.attribute, frozenset()),
        (model, Backbone.folder.attribute, None),
    ]
    stops = [i for adapter in adapters for i in adapter.written_stops]
    if stops and (generation := getattr(model, "generation_config", None)) is not None:
        own = get_state(model).own_ends  # the adapters are active here
        ends = NewAttribute(generation, "eos_token_id", with_stops(own, stops))
        return (ends, *_swapped(values))
    return _swapped(values)


def _swapped(values: Sequence[tuple[Any, str, Any]]) -> tuple[NewAttribute, ...]:
    return tuple(NewAttribute(*each) for each in values if hasattr(*each[:2]))


def check_outputs(
    expected: dict[str, Tensor], outputs: dict[str, Tensor], precision: torch.dtype | float
) -> SameNumbers:
    """Compare the outputs of a merged model with the expected ones, on the probe batch.

    `precision` is the dtype of the model, or the largest accepted difference, relative to the
    largest value of an output.

    Raises:
        MergeError: a difference is above its tolerance, or not finite.
    """
    compared = same(expected, outputs, precision)
    if not compared:
        raise MergeError(
            "the merged model does not compute the same outputs as the model with its adapter",
            offenders=compared.problems,
            expected=f"differences of at most {tolerance_of(precision):g} times the largest value",
            hint="merge in fp32 (--base-dtype fp32), accept more (tolerance=0.3, --tolerance 0.3), "
            "or keep the adapter attached",
        )
    return compared
