"""Models that adapters share: one body for all tasks that read its states, and one for each class.

The **body** is the backbone without a head, loaded once. All adapters have their modules there, and
a batch goes through it once, each row by its own adapter. Heads are in models of the task's class
of which only the head is computed: the class's own `forward` runs with the states of the body in
place of those that it would compute. So the classes of transformers decide what a head reads, and
none is named here. Before a class is used like this it is tried on two small batches: its outputs
are those of the whole model, or its adapters get a model of their own.

What cannot share the body has a **model of its class**: tasks that generate or fill masks, adapters
that train parameters of the backbone, and those of which a model can have one only. They are
activated one after the other, and a batch has the requests of one adapter.

Tensors with the same values in the same place of several models share their storage.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.activation import changes_shared_state
from adapterhub.adapters.adapter import Adapter, HeldModules
from adapterhub.adapters.route import activate, route
from adapterhub.adapters.state import find_state
from adapterhub.backbones.end_tokens import end_tokens, with_stops
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.pooling import vector_length
from adapterhub.backbones.same import same
from adapterhub.backbones.task_models import TASK_MODELS, TEXT_TO_IMAGE
from adapterhub.data.options import DataOptions
from adapterhub.errors import (
    AdapterhubError,
    BackboneError,
    ConfigError,
    MismatchError,
    ServingError,
)
from adapterhub.files.heads import ONE_HEAD
from adapterhub.inference.open import Predictor, PulledAdapter, predictor_of
from adapterhub.inference.record import TrainingRecord, task_and_kind
from adapterhub.methods.common.site_module import EmbeddingModule
from adapterhub.methods.common.spec import restore_methods
from adapterhub.serving.batches import BatchLimits, measure_limits
from adapterhub.serving.refusals import ComputationError
from adapterhub.serving.requests import (
    MASK,
    EncodedInput,
    RowOutputs,
    encode_input,
    encode_rows,
    predict_from,
    read_example,
)
from adapterhub.tasks._forward import CPU_TOKENS, on_device, without_gradients
from adapterhub.tasks._rows import pad
from adapterhub.training.loading import make_ready

_FEATURES, _EMBEDDING = "features", "embedding"  # kinds of models without a head
_FRESH = ".fresh."  # in the names of tensors: parameters that the checkpoint of a backbone lacks
_TRIED = ("a b", "a b c d e f g")  # texts of different lengths
_PROMPTS = 16  # prompts share batches with those of lengths up to the same multiple of this
_UNMEASURED, _OTHER_TOKENS = 192, 16384  # positions of a batch; the most, not on a CPU
_STATES = frozenset({"last_hidden_state"})
Answer = dict[str, Any] | Exception


class ServedModel(Protocol):
    """A model that adapters share; `encoding` is held by a thread that uses its tokenizer."""

    model: PreTrainedModel
    encoding: Any
    limits: BatchLimits

    def measure(self) -> None:
        """Measure the limits, unless they are known. Called between batches."""

    def encode(self, given: Any, served: ServedAdapter) -> EncodedInput:
        """Encode one input."""

    def batch_key(self, served: ServedAdapter) -> Hashable:
        """Return what requests that may share a batch have in common."""

    def compute(self, asked: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        """Return an answer for each request, or the error that is its own."""

    def detach(self, served: ServedAdapter) -> None:
        """Remove an adapter."""


@dataclass(eq=False)
class ServedAdapter:
    """An adapter in memory.

    Attributes:
        reference: where it was found, with its version; "" for the bare backbone.
        digest: the sha256 of its manifest.
        model: the model that computes it.
        predictor: its task, with the columns and the longest input of its training.
        name: its name on its models.
        row: its name in a route of the body; None: it has no modules there.
        reason: why it does not share the body; "" if it does.
        head: its task head, on the body's states.
        bytes: the size of its tensors.
        virtual: how many tokens it puts in front of each row.
        ends: the tokens at which its texts end, besides those of its task.
        kinds: what its modules have in common with those of other adapters, see `Adapter.hold`.
        users: how many requests use it.
        used: when it was used last.
        pinned: whether it stays in memory.
        alone: whether no other adapter may be on its model.
        stale: whether no reference means it any more.
        gone: whether it was removed.
    """

    reference: str
    digest: str
    model: ServedModel
    predictor: Predictor
    name: str = ""
    row: str | None = None
    reason: str = ""
    head: StateHead | None = None
    bytes: int = 0
    virtual: int = 0
    ends: tuple[int, ...] = ()
    kinds: frozenset[Any] = frozenset()
    users: int = 0
    used: float = 0.0
    pinned: bool = False
    alone: bool = False
    stale: bool = False
    gone: bool = False

    @property
    def task(self) -> str:
        """The name of its task."""
        return self.predictor.task.name

    def answer(self, request: EncodedInput, prediction: Any) -> dict[str, Any]:
        """Return what `predict --json` prints."""
        return self.predictor.task.printed(request.example, prediction)


class SharedTensors:
    """The tensors of one backbone, which models of several classes share."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}

    def share(self, model: PreTrainedModel) -> None:
        """Let the backbone of a model use the storage of equal tensors that are known already."""
        base = model.base_model
        for name, tensor in chain(base.named_parameters(), base.named_buffers()):
            if type(tensor) not in (Tensor, nn.Parameter):
                continue
            known = self.known.setdefault(name, tensor.data)
            if known is not tensor.data and _equal(known, tensor.data):
                tensor.data = known


def _equal(some: Tensor, other: Tensor) -> bool:
    facts = [(each.shape, each.dtype, each.device, each.stride()) for each in (some, other)]
    return facts[0] == facts[1] and torch.equal(some, other)


class GivenStates:
    """The `forward` of a base model whose output is given."""

    output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        return self.output


class StateHead:
    """A model of a task's class, of which the head alone is computed, on the states of a body.

    `problem` says why that cannot be, if it was tried.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.given = GivenStates()
        self.by_token: frozenset[str] | None = None  # None: it computes its own states still
        self.problem = ""

    def replace_states(self, body: SharedBody) -> None:
        """Compute the head alone from now on.

        Raises:
            NotSharedError: its outputs would not be those of the whole model.
        """
        if self.by_token is not None:
            return
        try:
            self._try(body)
        except (AdapterhubError, ValueError, TypeError, RuntimeError, LookupError) as error:
            self.problem = f"{type(self.model).__name__} computes more than a head on the states"
            raise NotSharedError(self.problem, offenders=[str(error)]) from error

    def _try(self, body: SharedBody) -> None:
        model = body.model
        batches = [
            on_device(body.tokenizer(list(texts), padding=True, return_tensors="pt"), model,
                      model.device)
            for texts in (_TRIED[:1], _TRIED)
        ]  # fmt: skip
        base: Any = self.model.base_model
        with without_gradients():
            expected = [self.model(**batch) for batch in batches]
            base.forward = self.given
            found = [self(model(**batch), batch) for batch in batches]
        for own, whole in zip(found, expected, strict=True):
            tensors = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
            compared = same(tensors, own, model.dtype)
            if own.keys() != tensors.keys() or not compared:
                raise MismatchError(
                    "its outputs differ from those of the whole model", offenders=compared.problems
                )
        short, long = (batch[MASK].shape[1] for batch in batches)
        self.by_token = frozenset(
            name
            for name, value in found[1].items()
            if value.ndim > 1 and (found[0][name].shape[1], value.shape[1]) == (short, long)
        )

    def __call__(self, states: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the head, by name."""
        self.given.output = type(states)(**states)  # a copy: pooling exchanges its entries
        try:
            output = self.model(**inputs)
        finally:
            self.given.output = None
        return {name: value for name, value in output.items() if isinstance(value, Tensor)}


@dataclass(eq=False)
class SharedBody:
    """A backbone without a head, and the heads of the tasks on its states.

    `limits` are those of a batch, which are to be measured unless they are `measured`. `trained_on`
    are the records of backbones that were compared with it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limits: BatchLimits
    measured: bool
    heads: dict[Hashable, StateHead] = field(default_factory=dict)
    trained_on: set[str] = field(default_factory=set)
    encoding: Any = field(default_factory=threading.Lock)  # fast tokenizers are not shared

    def measure(self) -> None:
        """Measure the limits, unless they are known."""
        if self.measured:
            return
        device = self.model.device
        on_cpu = device.type == "cpu"

        def run(rows: int, tokens: int) -> float:
            ones = torch.ones(rows, tokens, dtype=torch.long, device=device)
            states = self.model(input_ids=ones, attention_mask=ones).last_hidden_state
            return float(states[0, 0, 0])  # waits for the device

        with without_gradients():
            if on_cpu:  # in time of this thread: others may compute something else now
                self.limits = measure_limits(run, CPU_TOKENS, time.thread_time)
            else:
                self.limits = measure_limits(run, _OTHER_TOKENS)
        self.measured = True

    def encode(self, given: Any, served: ServedAdapter) -> EncodedInput:
        """Encode one input."""
        example = read_example(given, served.predictor)
        with self.encoding:
            return encode_rows(example, served.predictor, served.virtual)

    def batch_key(self, served: ServedAdapter) -> Hashable:
        """Return one key for all adapters of the body, but others for those with prompts.

        A row without virtual tokens is padded to as many as others of its batch have, whatever the
        length of its text.
        """
        return id(self), -(-served.virtual // _PROMPTS)

    def compute(self, asked: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        """Compute the rows of all requests at once, then the rows of each head."""
        order = by_kind([served.kinds for served, _ in asked])
        answers = self._computed([asked[number] for number in order])
        return [answers[order.index(number)] for number in range(len(asked))]

    def _computed(self, asked: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        own = [[row for rows in request.rows for row in rows] for _, request in asked]
        names = [s.row for (s, _), rows in zip(asked, own, strict=True) for _ in rows]
        inputs = pad(list(chain(*own)), self.tokenizer, self.tokenizer.padding_side)
        batch = on_device(inputs, self.model, self.model.device)
        ends = list(accumulate(map(len, own)))
        by_head: dict[StateHead | None, list[int]] = {}
        for number, (served, _) in enumerate(asked):
            by_head.setdefault(served.head, []).append(number)
        answers: dict[int, Answer] = {}
        with without_gradients():
            with self._routed(names):
                states = self.model(**batch)
            for head, numbers in by_head.items():
                rows = [n for i in numbers for n in range(ends[i] - len(own[i]), ends[i])]
                some = [asked[i] for i in numbers]
                of_head = self._answers(head, some, *_rows_of_output(states, batch, rows))
                answers |= dict(zip(numbers, of_head, strict=True))
        return [answers[number] for number in range(len(asked))]

    def _answers(
        self,
        head: StateHead | None,
        asked: Sequence[tuple[ServedAdapter, EncodedInput]],
        states: Any,
        inputs: Mapping[str, Tensor],
    ) -> Iterator[Answer]:
        """Yield the answers to requests of one head, whose rows these are."""
        counts = [sum(map(len, request.rows)) for _, request in asked]
        names = [s.name for (s, _), rows in zip(asked, counts, strict=True) for _ in range(rows)]
        fields, classes = _head_outputs(head, states, inputs, names)
        by_token = (head.by_token or frozenset()) if head else _STATES
        left, first = self.tokenizer.padding_side == "left", 0
        for (served, request), rows in zip(asked, counts, strict=True):
            mine = {name: value[first : first + rows] for name, value in fields.items()}
            if classes[first] is not None and "logits" in mine:
                mine["logits"] = mine["logits"][..., : classes[first]]
            at = list(accumulate(map(len, request.rows), initial=0))
            places = [range(start, end) for start, end in pairwise(at)]
            yield _answered(served, request, RowOutputs(mine, places, by_token, left))
            first += rows

    def _routed(self, names: Sequence[str | None]) -> AbstractContextManager[Any]:
        return route(self.model, names) if find_state(self.model) else nullcontext()

    def detach(self, served: ServedAdapter) -> None:
        """Remove an adapter's modules and head."""
        _detach(self.model, served.name)
        if served.head is not None:
            _detach(served.head.model, served.name)


def by_kind(kinds: Sequence[frozenset[Any]]) -> list[int]:
    """Return an order in which rows that are computed together are side by side."""
    left = dict.fromkeys(kinds)
    order: list[frozenset[Any]] = []
    while left:
        last = order[-1] if order else frozenset()
        order.append(max(left, key=lambda each: len(each & last)))
        del left[order[-1]]
    places = {each: place for place, each in enumerate(order)}
    return sorted(range(len(kinds)), key=lambda number: places[kinds[number]])


def _rows_of_output(
    states: Any, batch: Mapping[str, Tensor], chosen: list[int]
) -> tuple[Any, dict[str, Tensor]]:
    """Return the states and the inputs of some rows."""
    rows = len(batch[MASK])
    tensors = {n: v for n, v in states.items() if isinstance(v, Tensor) and len(v) == rows}
    if chosen == list(range(rows)):
        return type(states)(**tensors), dict(batch)
    index = torch.tensor(chosen, device=batch[MASK].device)
    part = {name: value.index_select(0, index) for name, value in tensors.items()}
    return type(states)(**part), {n: v.index_select(0, index) for n, v in batch.items()}


def _head_outputs(
    head: StateHead | None, states: Any, inputs: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[dict[str, Tensor], tuple[int | None, ...]]:
    """Return the outputs of a head on the host, and the number of classes of each row."""
    if head is None:
        return {"last_hidden_state": states.last_hidden_state.cpu()}, (None,) * len(names)
    with route(head.model, names) as routed:
        outputs = head(states, inputs)
    return {name: value.cpu() for name, value in outputs.items()}, routed.classes


def _answered(served: ServedAdapter, request: EncodedInput, outputs: RowOutputs) -> Answer:
    try:
        if not all(_is_finite(outputs, name, request) for name in outputs.fields):
            raise numbers_not_finite(served)
        return served.answer(request, predict_from(outputs, request, served.predictor))
    except Exception as error:  # of this request alone
        return error


def _is_finite(outputs: RowOutputs, name: str, request: EncodedInput) -> bool:
    """Return whether an output of a request is; what was computed for padding is not looked at."""
    value = outputs.fields[name]
    if bool(value.isfinite().all()):
        return True
    if name not in outputs.by_token:
        return False
    rows = (row for rows in request.rows for row in rows)
    lengths = [len(row[MASK]) for row in rows]
    real = [v[-n:] if outputs.left else v[:n] for v, n in zip(value, lengths, strict=True)]
    return all(bool(each.isfinite().all()) for each in real)


def numbers_not_finite(served: ServedAdapter) -> ComputationError:
    """Return the error for an adapter whose outputs are NaN or infinite."""
    return ComputationError(
        f"{served.reference} has computed NaN or infinite numbers for this input",
        expected="finite numbers",
        hint="another version of the adapter, or fp32",
    )


@dataclass(eq=False)
class ClassModel:
    """A model of a task's class, with adapters that are activated one after the other.

    `trained_on` are the records of backbones that were compared with it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limits: BatchLimits
    trained_on: set[str] = field(default_factory=set)
    encoding: Any = field(default_factory=threading.Lock)
    _own_processor: Any = None  # of the thread that computes: nobody who submits waits for it

    def measure(self) -> None:
        """Do nothing: what a batch costs depends on the task."""

    def encode(self, given: Any, served: ServedAdapter) -> EncodedInput:
        """Encode one input."""
        example = read_example(given, served.predictor)
        with self.encoding:
            return encode_input(example, served.predictor)

    def batch_key(self, served: ServedAdapter) -> Hashable:
        """Return a key for each adapter."""
        return id(served)

    def compute(self, asked: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        """Activate the adapter, and predict."""
        served = asked[0][0]
        activate(self.model, served.name)
        examples = [request.example for _, request in asked]
        predictions = self._predictor(served).predict_examples(examples, len(examples))
        answers: list[Answer] = []
        for (each, request), prediction in zip(asked, predictions, strict=True):
            answer = each.answer(request, prediction)
            answers.append(answer if all(_numbers_are_finite(answer)) else numbers_not_finite(each))
        return answers

    def _predictor(self, served: ServedAdapter) -> Predictor:
        setting = served.predictor.setting
        if self._own_processor is None:
            with self.encoding:
                self._own_processor = copy.deepcopy(setting.processor)
        return replace(served.predictor, setting=replace(setting, processor=self._own_processor))

    def detach(self, served: ServedAdapter) -> None:
        """Remove an adapter."""
        _detach(self.model, served.name)


def _numbers_are_finite(value: Any) -> Iterator[bool]:
    """Yield for each number in an answer whether it is finite."""
    if isinstance(value, float):
        yield abs(value) < float("inf")
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_numbers_are_finite, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_numbers_are_finite, value))


def _detach(model: PreTrainedModel, name: str) -> None:
    state = find_state(model)
    if state is not None and name in state.adapters:
        state.detach(name)


class NotSharedError(MismatchError):
    """An adapter that cannot share the body, which only attaching it has shown."""


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter whose models are loaded; `attach` puts it on them.

    `name` is its name there. `reason` says why it does not share the body.
    """

    pulled: PulledAdapter
    name: str
    model: SharedBody | ClassModel
    reason: str = ""
    head: StateHead | None = None
    max_length: int | None = None
    held: list[HeldModules] = field(default_factory=list)

    def attach(self) -> ServedAdapter:
        """Attach the adapter, inactive. Called between batches.

        Raises:
            NotSharedError: it cannot share the body.
            MismatchError: it does not fit the backbone.
        """
        if isinstance(self.model, ClassModel):
            adapter = self._inactive(self.model.model)
            return self._served([adapter], adapter.labels)
        attached: list[Adapter] = []
        try:
            if self.head is not None:
                self.head.replace_states(self.model)
                attached.append(self._inactive(self.head.model, modules=False))
            labels = attached[0].labels if attached else ()
            if has_modules(self.pulled):
                attached.append(self._inactive(self.model.model, head=False))
                if changes_shared_state(attached[-1]):
                    raise NotSharedError("it changes what all rows of a batch share")
            return self._served(attached, labels)
        except BaseException:
            for each in attached:
                each.detach()
            raise

    def _inactive(self, model: PreTrainedModel, **part: bool) -> Adapter:
        """Attach a part of the adapter, and leave the model bare where no route is open.

        Weights are compared once with each record of a backbone: nothing changes them here, and the
        models of a body have the same ones.
        """
        trained_on = repr(self.pulled.manifest.backbone)
        known = self.model.trained_on
        any_backbone = trained_on in known
        adapter = self.pulled.attach_to(model, self.name, any_backbone=any_backbone, **part)
        activate(model)
        if isinstance(self.model, SharedBody):
            self.held.append(adapter.hold())
        known.add(trained_on)
        return adapter

    def _served(self, attached: Sequence[Adapter], labels: tuple[str, ...]) -> ServedAdapter:
        model = self.head.model if self.head else self.model.model
        on_model = any(each.model is self.model.model for each in attached)
        return ServedAdapter(
            reference=self.pulled.reference,
            digest=self.pulled.digest or "",
            model=self.model,
            predictor=predictor_of(
                model,
                labels,
                self.model.tokenizer,
                self.pulled.record,
                attached,
                self.max_length,
            ),
            name=self.name,
            row=self.name if on_model else None,
            reason=self.reason,
            head=self.head,
            bytes=sum(t.nbytes for a in attached for t in a.tensors().values())
            + sum(each.bytes for each in self.held),
            kinds=frozenset().union(*(each.kinds for each in self.held)),
            virtual=sum(map(_virtual_tokens, attached)),
            ends=_ends(model, attached),
            alone=bool(self.pulled.needs_own_model),
        )


@torch.no_grad()
def _virtual_tokens(adapter: Adapter) -> int:
    placed = (each.module for each in adapter.placed if isinstance(each.module, EmbeddingModule))
    return sum(len(module()) for module in placed)


def _ends(model: PreTrainedModel, attached: Sequence[Adapter]) -> tuple[int, ...]:
    """Return the tokens at which generation stops while adapters apply."""
    state = find_state(model)
    own = end_tokens(model) if state is None else state.own_ends
    return tuple(with_stops(own, [stop for each in attached for stop in each.stops]))


def has_modules(pulled: PulledAdapter) -> bool:
    """Return whether an adapter has more than a head."""
    return any(not name.startswith(ONE_HEAD) for name in pulled.manifest.tensors)


class ServedModels:
    """All models that are loaded, and how an adapter is placed on them.

    `backbone` is where all adapters' backbone is loaded from, if not from where they record;
    `dtype` and `quantize` are those of all models, if not those of each adapter's training.
    `batch_tokens` is the most that is computed at once; None: as measured. `max_length` is the
    longest input; None: what each backbone reads.
    """

    def __init__(
        self,
        backbone: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        self.max_length = max_length
        self.backbone, self.dtype, self.quantize = backbone, dtype, quantize
        self.measured = batch_tokens is not None
        self.limits = BatchLimits.of_tokens(batch_tokens or _UNMEASURED)
        self.fingerprints: set[str] = set()  # of the backbones of all planned adapters
        self.bodies: dict[Hashable, SharedBody | str] = {}  # a text: why there is none
        self.classes: dict[tuple[Hashable, ...], ClassModel] = {}
        self.tensors: dict[Hashable, SharedTensors] = {}

    def plan(self, pulled: PulledAdapter, name: str) -> PlannedAdapter:
        """Load the models that an adapter needs, unless they are loaded.

        Raises:
            BackboneError: its backbone cannot be loaded, and no other one is served.
            MismatchError: its backbone cannot be loaded, and another one is served.
            ServingError: it makes pictures.
        """
        backbone = pulled.manifest.backbone
        try:
            planned = self._planned(pulled, name)
        except BackboneError as error:
            if not self.fingerprints or backbone.fingerprint in self.fingerprints:
                raise
            raise MismatchError(
                f"{pulled.reference} was trained on a backbone that this server does not have",
                offenders=[f"served: {each}" for each in sorted(self.fingerprints)],
                expected=f"{backbone.id}, {backbone.fingerprint}",
                hint="a server of its own for that backbone",
            ) from error
        self.fingerprints.add(backbone.fingerprint)
        return planned

    def _planned(self, pulled: PulledAdapter, name: str) -> PlannedAdapter:
        if pulled.record.kind == TEXT_TO_IMAGE:
            raise ServingError(
                f"{pulled.reference} makes pictures, which this server does not answer with",
                hint='adapterhub predict ADAPTER "a prompt" --output picture.png',
            )
        if reason := _apart(pulled):
            return self.plan_apart(pulled, name, reason)
        body = self._body(pulled)
        if isinstance(body, str):
            return self.plan_apart(pulled, name, body)
        head = self._head(body, pulled)
        if isinstance(head, str):
            return self.plan_apart(pulled, name, head)
        return PlannedAdapter(pulled, name, body, head=head, max_length=self.max_length)

    def plan_apart(self, pulled: PulledAdapter, name: str, reason: str) -> PlannedAdapter:
        """Load a model of the adapter's class, unless it is loaded.

        Raises:
            BackboneError: it cannot be loaded.
        """
        alone = name if pulled.needs_own_model else None
        auto, *form = pulled.model_class
        key = (pulled.location, auto, tuple(form), alone)
        if key not in self.classes:
            model, tokenizer = self._loaded(pulled)
            self._tensors(self._form(pulled)).share(model)
            self.classes[key] = ClassModel(model, tokenizer, self.limits)
        own = self.classes[key]
        return PlannedAdapter(pulled, name, own, reason, max_length=self.max_length)

    def forget(self, served: ServedAdapter) -> None:
        """Let go of a model that an adapter had for itself, once it was removed."""
        if served.alone:
            self.classes = {k: m for k, m in self.classes.items() if m is not served.model}

    def bare(self) -> ServedAdapter:
        """Return the backbone without an adapter, which gives the vectors of texts.

        Raises:
            ConfigError: there is no backbone of all adapters.
            BackboneError: it cannot be loaded.
        """
        backbone = self._named_backbone()
        form = ((backbone, None), *self._stored_form(None, None))
        if form not in self.bodies:
            model, tokenizer = load_backbone(
                backbone, task=_FEATURES, dtype=self.dtype, quantize=self.quantize
            )
            make_ready(model)
            self.bodies[form] = self._new_body(form, model, tokenizer)
        body = self.bodies[form]
        if isinstance(body, str):
            raise ConfigError(f"{backbone} does not give vectors: {body}")
        task, kind = task_and_kind(_FEATURES)
        length = vector_length(body.model, body.tokenizer)
        record = TrainingRecord(task, DataOptions(), length, kind=kind)
        predictor = predictor_of(body.model, (), body.tokenizer, record, (), length)
        return ServedAdapter("", "", body, predictor, pinned=True)

    def bare_writer(self) -> ServedAdapter:
        """Return the backbone without an adapter, which writes texts.

        Raises:
            ConfigError: there is no backbone of all adapters.
            BackboneError: it cannot be loaded, or writes no texts.
        """
        backbone = self._named_backbone()
        location = (backbone, None)
        for kind in _WRITERS:
            auto = TASK_MODELS[kind].auto
            for (place, name, _, alone), known in self.classes.items():
                if (place, name, alone) == (location, auto, None):
                    return _bare(known, kind)
        form: Any = {"dtype": self.dtype, "quantize": self.quantize}
        try:
            kind, loaded = _WRITERS[0], load_backbone(backbone, task=_WRITERS[0], **form)
        except BackboneError:
            kind, loaded = _WRITERS[1], load_backbone(backbone, task=_WRITERS[1], **form)
        model, tokenizer = loaded
        make_ready(model)
        self._tensors((location, *self._stored_form(None, None))).share(model)
        task, _ = task_and_kind(kind)
        key = (location, TASK_MODELS[kind].auto, (task.pooling, None, None), None)
        self.classes[key] = ClassModel(model, tokenizer, self.limits)
        return _bare(self.classes[key], kind)

    def _named_backbone(self) -> str:
        if self.backbone is None:
            raise ConfigError(
                "the backbone without an adapter, and none is named",
                hint='Engine("sentence-transformers/all-MiniLM-L6-v2")',
            )
        return self.backbone

    def _body(self, pulled: PulledAdapter) -> SharedBody | str:
        form = self._form(pulled)
        if form not in self.bodies:
            model, tokenizer = self._loaded(pulled, _FEATURES)
            if newly_initialized(model):  # a pooler: without it, no row computes a random one
                model, tokenizer = self._loaded(pulled, _EMBEDDING)
            self.bodies[form] = self._new_body(form, model, tokenizer)
        return self.bodies[form]

    def _new_body(self, form: Hashable, model: Any, tokenizer: Any) -> SharedBody | str:
        if model.config.is_encoder_decoder:
            return "an encoder-decoder has no states of the text alone"
        if newly_initialized(model):
            return "its checkpoint lacks parameters of the backbone"
        self._tensors(form).share(model)
        return SharedBody(model, tokenizer, self.limits, self.measured)

    def _head(self, body: SharedBody, pulled: PulledAdapter) -> StateHead | str | None:
        if pulled.manifest.head is None:
            return None
        auto = TASK_MODELS[pulled.record.kind].auto
        if auto not in body.heads:
            model, _ = self._loaded(pulled)
            self._tensors(self._form(pulled)).share(model)
            body.heads[auto] = StateHead(model)
        head = body.heads[auto]
        return head.problem or head

    def _loaded(self, pulled: PulledAdapter, kind: str | None = None) -> tuple[Any, Any]:
        return pulled.load_model(self.backbone, kind, self.dtype, self.quantize)

    def _form(self, pulled: PulledAdapter) -> Hashable:
        """Return what identifies the weights of a backbone: its place, dtype and quantization."""
        return (pulled.location, *self._stored_form(*pulled.stored_form))

    def _stored_form(self, dtype: str | None, quantize: str | None) -> tuple[Any, Any]:
        """Return a dtype and a quantization, after those of all models."""
        if self.dtype or self.quantize:
            dtype, quantize = self.dtype, self.quantize
        return dtype or (None if quantize else "fp32"), quantize

    def _tensors(self, form: Hashable) -> SharedTensors:
        return self.tensors.setdefault(form, SharedTensors())


def _bare(model: ClassModel, kind: str) -> ServedAdapter:
    """Return a model without an adapter, which writes texts."""
    task, kind = task_and_kind(kind)
    record = TrainingRecord(task, DataOptions(), kind=kind)
    predictor = predictor_of(model.model, (), model.tokenizer, record)
    return ServedAdapter("", "", model, predictor, ends=_ends(model.model, ()), pinned=True)


_WRITERS = ("causal-lm", "seq2seq")  # kinds of models that write texts


def _apart(pulled: PulledAdapter) -> str:
    """Return why an adapter cannot share the body, as far as its files show; "" if it can."""
    kind = pulled.record.kind
    if reason := pulled.needs_own_model:
        return reason
    if not TASK_MODELS[kind].reads_states:
        return f"{kind} needs more than the states of a text"
    methods = restore_methods(pulled.manifest.methods, f"the adapter {pulled.manifest.name!r}")
    if any(part.trains_backbone for method in methods for part in method.parts()):
        return "it trains parameters of the backbone"
    if any(_FRESH in name for name in pulled.manifest.tensors):
        return "it has parameters that the checkpoint of the backbone lacks"
    if not TASK_MODELS[kind].has_head and not has_modules(pulled):
        return "it has no tensors"
    return ""
