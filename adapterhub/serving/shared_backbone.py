"""Models shared by adapters: one body for tasks that read its states, other models by class.

The **body** is the backbone without a head, loaded once. All adapters attach their modules to it.
A batch passes through it once, and each row uses its own adapter. Each head belongs to a model of
the task's class, but only the head of that model is computed: the class's own `forward` runs with
the states of the body instead of computing its own. The input of a head therefore follows from
the classes of transformers, and no class is named here. A class is first tried on two small
batches. If its outputs differ from the outputs of the whole model, its adapters get a separate
model.

Everything else gets a **model of its class**: tasks that generate or fill masks, adapters that
train parameters of the backbone, and adapters that must be alone on their model. These adapters
are activated one after the other, and a batch holds the requests of one adapter.

Equal tensors at the same place in several models share their storage.

A batch holds the oldest waiting request and others of similar length. A pass has a fixed cost and
a cost for each position. Both more rows and less padding therefore make a batch cheaper. The rows
of a batch are chosen to compute the most tokens per unit of time.

A request is an input, encoded as its adapter's task does, together with its outputs.

A task predicts by calling a model on rows. Here the rows of several requests are computed together,
so each task gets an object that returns the outputs for its own rows instead of a model. The task
then predicts as it does anywhere else.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.route import activate, disabled, route
from adapterhub.adapters.state import find_state
from adapterhub.backbones.compare import same
from adapterhub.errors import (
    AdapterhubError,
    DataError,
    MismatchError,
    ServingError,
)
from adapterhub.inference.inputs import encoded_example, read_example
from adapterhub.inference.open import Predictor
from adapterhub.tasks import Encoded
from adapterhub.tasks.common.base import RowOutputs, predict_computed
from adapterhub.tasks.common.batches import (
    CPU_TOKENS,
    Row,
    model_inputs,
    on_device,
    pad,
    without_gradients,
)
from adapterhub.tasks.common.shared_prefix import PrefixStore, keeping_prefix
from adapterhub.web.errors import ComputationError

PADDING = 0.25  # share of the positions in a batch
_SECONDS = 1.0  # the longest time a measurement may take
_AGAIN, _LENGTH = 8, 16  # how often a size is measured again, and the tokens of its rows
_AS_CHEAP = 1.03  # a position is cheap if it costs at most this factor more than the cheapest one
_ENOUGH = 10  # positions computed at once for each position of the fixed cost
_CHEAPER = 1.05  # try larger batches while a position costs less than before times this


class RequestSize(NamedTuple):
    """The size of a request: its rows, the longest row, and the tokens of all rows."""

    rows: int
    longest: int
    tokens: int


class BatchLimits(NamedTuple):
    """Limits on one pass.

    Attributes:
        tokens: the most positions.
        fixed: the fixed cost of a pass, in positions.
    """

    tokens: int
    fixed: float

    @classmethod
    def of_tokens(cls, tokens: int) -> BatchLimits:
        """Return limits without a measurement."""
        return cls(tokens, tokens / 8)


def measure_limits(
    run: Callable[[int, int], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> BatchLimits:
    """Measure how many positions make each position of a pass cheap.

    The result is the number that takes ten times as long as the fixed cost of a pass, or fewer
    where so many positions cost more each. Larger batches gain little and delay their answers.

    Args:
        run: computes a batch of (rows, tokens of each) and returns when it is complete.
        most: the most positions.
        clock: returns the time in seconds.
    """

    def timed(positions: int) -> float:
        start = clock()
        run(positions // _LENGTH, _LENGTH)
        return clock() - start

    timed(_LENGTH)  # the first pass is slower
    start, measured = clock(), dict(_growing(timed, most))
    for _ in range(_AGAIN):  # in turns, so that a disturbance affects all sizes
        for n, known in measured.items():
            if clock() - start + known < _SECONDS:
                measured[n] = min(known, timed(n))
    each = {positions: seconds / positions for positions, seconds in measured.items()}
    cheapest = min(each.values())
    largest = max(n for n, cost in each.items() if cost <= _AS_CHEAP * cheapest)
    if largest == _LENGTH:
        return BatchLimits.of_tokens(largest)
    fixed = _fixed({n: seconds for n, seconds in measured.items() if n <= largest})
    return BatchLimits(max(min(largest, round(_ENOUGH * fixed)), _LENGTH), fixed)


def _growing(timed: Callable[[int], float], most: int) -> Iterator[tuple[int, float]]:
    """Yield numbers of positions and their seconds until more gain nothing or take too long."""
    before, positions, left = math.inf, _LENGTH, _SECONDS
    while True:
        seconds = timed(positions)
        yield positions, seconds
        left -= seconds
        cheaper = seconds / positions < _CHEAPER * before
        if not cheaper or 2 * positions > most or left < 2 * seconds:
            return
        before, positions = seconds / positions, 2 * positions


def _fixed(measured: dict[int, float]) -> float:
    """Return the fixed part of the time, expressed in positions.

    It comes from the line a + b n nearest to the measured seconds. Errors are relative to the
    measurements, so that a disturbance of the largest sizes does not decide.
    """
    positions, seconds = np.array([*measured.items()], dtype=np.float64).T
    a, b = np.linalg.lstsq(np.stack([1 / seconds, positions / seconds], 1), np.ones(len(seconds)))[
        0
    ]
    return max(float(a / b), 0.0) if b > 0 else float(max(measured))


def choose_batch(
    waiting: Sequence[RequestSize], limits: BatchLimits, padding: float = PADDING
) -> list[int]:
    """Choose the next batch from the requests that may share one.

    The oldest request is always chosen, so that no request waits forever. The requests nearest to
    it in length join it, older ones first. Their number minimizes the time per token, while

     - the share of padding among the computed positions, rows times the longest row, stays below
       `padding`, and
     - there are at most `limits.tokens` computed positions.

    A request that exceeds a limit on its own is alone in its batch.

    Args:
        waiting: the requests, the oldest one first.
        limits: the most positions computed at once, and the fixed cost of a pass.
        padding: the share of padding that a batch stays below.

    Returns:
        The indices of the chosen requests, 0 first.
    """
    length = waiting[0].longest
    # Sort by length; among equal lengths, older requests are nearer to the oldest one.
    ordered = sorted(
        range(len(waiting)),
        key=lambda i: (waiting[i].longest, i if waiting[i].longest >= length else -i),
    )
    oldest = ordered.index(0)
    sizes = np.array([waiting[n] for n in ordered], dtype=np.int64)
    # Cumulative sums over the requests: a run from one at or before the oldest (in a column) to one
    # at or after it (in a row) is a difference of two sums.
    before = np.concatenate([np.zeros((1, 3), np.int64), sizes.cumsum(axis=0)])
    rows, _, tokens = (before[oldest + 1 :, None] - before[None, : oldest + 1]).transpose(2, 0, 1)
    computed = rows * sizes[oldest:, None, 1]
    fits = (computed <= limits.tokens) & (computed - tokens < padding * computed)
    rates = np.where(fits, tokens / (limits.fixed + computed), 0.0)
    if not rates.any():
        return [0]
    more, first = np.unravel_index(rates.argmax(), rates.shape)
    return [0, *sorted(n for n in ordered[first : oldest + int(more) + 1] if n)]


_TRIED = ("a b", "a b c d e f g")  # texts of different lengths
_PROMPTS = 16  # prompts share batches with lengths that round up to the same multiple of this
UNMEASURED, _OTHER_TOKENS = 192, 16384  # positions of a batch; the most on devices other than a CPU
_STATES = frozenset({"last_hidden_state"})
Answer = dict[str, Any] | Exception


class Progress:
    """The time at which the compute thread last made progress."""

    def __init__(self) -> None:
        self.time = 0.0

    def note(self, *_: Any) -> None:
        """Record progress; also a forward hook."""
        self.time = time.monotonic()


class NotSharedError(MismatchError):
    """An adapter cannot share the body; detected when it is attached."""


class ServedModel(Protocol):
    """A model shared by adapters; a thread that uses its tokenizer holds `encoding`."""

    model: PreTrainedModel
    encoding: Any
    limits: BatchLimits

    def measure(self) -> None:
        """Measure the limits unless they are known. Called between batches."""

    def encode(self, value: Any, served: ServedAdapter) -> EncodedInput:
        """Encode one input."""

    def batch_key(self, served: ServedAdapter) -> Hashable:
        """Return the key shared by requests that may be in one batch."""

    def compute(self, requests: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        """Return an answer for each request, or the error of that request."""

    def detach(self, served: ServedAdapter) -> None:
        """Remove an adapter."""


@dataclass(eq=False)
class ServedAdapter:
    """An adapter in memory.

    Attributes:
        reference: its source, with its version; "" for the bare backbone.
        digest: the sha256 of its manifest.
        model: the model that computes it.
        predictor: its task, with the columns and the longest input of its training.
        name: its name on its models.
        row: its name in a route of the body; None if it has no modules there.
        reason: why it does not share the body; "" if it does.
        head: its task head on the states of the body.
        bytes: the size of its tensors.
        virtual: the number of tokens it adds in front of each row.
        ends: the tokens that end its texts, in addition to the end tokens of its task.
        kinds: the properties its modules share with other adapters, see `Adapter.hold`.
        users: the number of requests that use it.
        used: the time of its last use.
        pinned: whether it stays in memory.
        alone: whether its model can hold no other adapter.
        stale: whether no reference resolves to it any more.
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
        """Return the object that `predict --json` prints."""
        return self.predictor.task.printed(request.example, prediction)


class SharedTensors:
    """The tensors of one backbone, shared by models of several classes."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}

    def share(self, model: PreTrainedModel) -> None:
        """Replace the backbone tensors of a model with equal tensors stored earlier."""
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
    """The `forward` of a base model that returns a stored output."""

    output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        return self.output


class StateHead:
    """A model of a task's class whose head alone is computed, on the states of a body.

    `problem` is the reason why this is impossible, if it was tried.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.given = GivenStates()
        self.by_token: frozenset[str] | None = None  # None while it still computes its own states
        self.problem = ""

    def replace_states(self, body: SharedBody) -> None:
        """Compute only the head from now on.

        Raises:
            NotSharedError: its outputs would differ from the outputs of the whole model.
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
            results = [self(model(**batch), batch) for batch in batches]
        for own, whole in zip(results, expected, strict=True):
            tensors = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
            compared = same(tensors, own, model.dtype)
            if own.keys() != tensors.keys() or not compared:
                raise MismatchError(
                    "its outputs differ from the outputs of the whole model",
                    offenders=compared.problems,
                )
        short, long = (batch[MASK].shape[1] for batch in batches)
        self.by_token = frozenset(
            name
            for name, value in results[1].items()
            if value.ndim > 1 and (results[0][name].shape[1], value.shape[1]) == (short, long)
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
    """A backbone without a head, and the task heads on its states.

    `limits` are the limits of a batch, still to be measured unless `measured` is true. `trained_on`
    holds the backbone records that were compared with it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limits: BatchLimits
    measured: bool
    heads: dict[Hashable, StateHead] = field(default_factory=dict)
    trained_on: set[str] = field(default_factory=set)
    encoding: Any = field(default_factory=threading.Lock)  # fast tokenizers are not shared

    def measure(self) -> None:
        """Measure the limits unless they are known."""
        if self.measured:
            return
        device = self.model.device
        on_cpu = device.type == "cpu"

        def run(rows: int, tokens: int) -> float:
            ones = torch.ones(rows, tokens, dtype=torch.long, device=device)
            states = self.model(input_ids=ones, attention_mask=ones).last_hidden_state
            return float(states[0, 0, 0])  # waits for the device

        with without_gradients():
            if on_cpu:  # CPU time of this thread: other threads may be computing too
                self.limits = measure_limits(run, CPU_TOKENS, time.thread_time)
            else:
                self.limits = measure_limits(run, _OTHER_TOKENS)
        self.measured = True

    def encode(self, value: Any, served: ServedAdapter) -> EncodedInput:
        """Encode one input."""
        example = read_example(value, served.predictor.task, served.predictor.data)
        with self.encoding:
            return encode_rows(example, served.predictor, served.virtual)

    def batch_key(self, served: ServedAdapter) -> Hashable:
        """Return one key for adapters of the body without virtual tokens, others for prompts.

        A row without virtual tokens is padded by the virtual tokens of other rows in its batch,
        whatever the length of its text.
        """
        return id(self), -(-served.virtual // _PROMPTS)

    def compute(self, requests: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        """Compute the rows of all requests at once, then each head on its rows."""
        order = by_kind([served.kinds for served, _ in requests])
        answers = self._computed([requests[number] for number in order])
        return [answers[order.index(number)] for number in range(len(requests))]

    def _computed(self, requests: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        own = [[row for rows in request.rows for row in rows] for _, request in requests]
        names = [s.row for (s, _), rows in zip(requests, own, strict=True) for _ in rows]
        inputs = pad(list(chain(*own)), self.tokenizer, self.tokenizer.padding_side)
        batch = on_device(inputs, self.model, self.model.device)
        ends = list(accumulate(map(len, own)))
        by_head: dict[StateHead | None, list[int]] = {}
        for number, (served, _) in enumerate(requests):
            by_head.setdefault(served.head, []).append(number)
        answers: dict[int, Answer] = {}
        with without_gradients():
            with self._routed(names):
                states = self.model(**batch)
            for head, numbers in by_head.items():
                rows = [n for i in numbers for n in range(ends[i] - len(own[i]), ends[i])]
                some = [requests[i] for i in numbers]
                of_head = self._answers(head, some, *_rows_of_output(states, batch, rows))
                answers |= dict(zip(numbers, of_head, strict=True))
        return [answers[number] for number in range(len(requests))]

    def _answers(
        self,
        head: StateHead | None,
        requests: Sequence[tuple[ServedAdapter, EncodedInput]],
        states: Any,
        inputs: Mapping[str, Tensor],
    ) -> Iterator[Answer]:
        """Yield the answers to the requests of one head, given their rows."""
        counts = [sum(map(len, request.rows)) for _, request in requests]
        names = [s.name for (s, _), rows in zip(requests, counts, strict=True) for _ in range(rows)]
        fields, classes = _head_outputs(head, states, inputs, names)
        by_token = (head.by_token or frozenset()) if head else _STATES
        left, first = self.tokenizer.padding_side == "left", 0
        for (served, request), rows in zip(requests, counts, strict=True):
            mine = {name: value[first : first + rows] for name, value in fields.items()}
            if classes[first] is not None and "logits" in mine:
                mine["logits"] = mine["logits"][..., : classes[first]]
            at = list(accumulate(map(len, request.rows), initial=0))
            places = [range(start, end) for start, end in pairwise(at)]
            yield _answered(served, request, RowOutputs(mine, places, by_token, left))
            first += rows

    def _routed(self, names: Sequence[str | None]) -> AbstractContextManager[Any]:
        is_bare = all(name is None for name in names)
        return disabled(self.model) if is_bare else route(self.model, names)

    def detach(self, served: ServedAdapter) -> None:
        """Remove an adapter's modules and head."""
        _detach(self.model, served.name)
        if served.head is not None:
            _detach(served.head.model, served.name)


def by_kind(kinds: Sequence[frozenset[Any]]) -> list[int]:
    """Return an order that places rows with common modules side by side."""
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
    """Return the states and the inputs of the given rows."""
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
        return served.answer(
            request,
            predict_computed(served.predictor.task, outputs, request.encoded, request.batches),
        )
    except Exception as error:  # an error of this request alone
        return error


def _is_finite(outputs: RowOutputs, name: str, request: EncodedInput) -> bool:
    """Return whether an output of a request is finite; padding is ignored."""
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
    """A model of a task's class whose adapters are activated one after the other.

    `trained_on` holds the backbone records that were compared with it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limits: BatchLimits
    trained_on: set[str] = field(default_factory=set)
    encoding: Any = field(default_factory=threading.Lock)
    _own_processor: Any = None  # used by the compute thread, so that submitting threads do not wait
    _prefix: tuple[Any, PrefixStore] | None = None  # of the adapter computed last

    def measure(self) -> None:
        """Do nothing: the cost of a batch depends on the task."""

    def encode(self, value: Any, served: ServedAdapter) -> EncodedInput:
        """Encode one input."""
        example = read_example(value, served.predictor.task, served.predictor.data)
        with self.encoding:
            return encode_input(example, served.predictor)

    def batch_key(self, served: ServedAdapter) -> Hashable:
        """Return a key for each adapter."""
        return id(served)

    def compute(self, requests: Sequence[tuple[ServedAdapter, EncodedInput]]) -> list[Answer]:
        """Activate the adapter, and predict."""
        served = requests[0][0]
        activate(self.model, served.name)
        examples = [request.example for _, request in requests]
        if self._prefix is None or self._prefix[0] is not served:
            self._prefix = served, PrefixStore()
        with keeping_prefix(self._prefix[1]):
            predictions = self._predictor(served).predict_examples(examples, len(examples))
        answers: list[Answer] = []
        for (each, request), prediction in zip(requests, predictions, strict=True):
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
        self._prefix = None
        _detach(self.model, served.name)


def _numbers_are_finite(value: Any) -> Iterator[bool]:
    """Yield whether each number in an answer is finite."""
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


MASK = "attention_mask"


@dataclass(frozen=True)
class EncodedInput:
    """An example, its rows for the task, and the model rows of each of them.

    `batches` holds the inputs of each task row, and `rows` the same without padding. `virtual` is
    the number of tokens that the adapter adds in front of each row; all rows of its batch then
    compute as many. `lost` is the number of tokens that were cut.
    """

    example: Any
    encoded: Encoded
    batches: tuple[dict[str, Tensor], ...] = ()
    rows: tuple[tuple[Row, ...], ...] = ()
    virtual: int = 0
    lost: int = 0

    @property
    def size(self) -> RequestSize:
        """The size of the request."""
        if not self.rows:
            lengths = self.encoded.lengths or [1]
            return RequestSize(len(lengths), max(lengths), sum(lengths))
        lengths = [self.virtual + len(row[MASK]) for rows in self.rows for row in rows]
        return RequestSize(len(lengths), max(lengths), sum(lengths))


def encode_input(example: Any, predictor: Predictor) -> EncodedInput:
    """Encode an example for its own task only.

    Raises:
        EmptyInputError: it has no text.
    """
    encoded = encoded_example(example, predictor.task, predictor.setting)
    return EncodedInput(example, encoded, lost=sum(encoded.lost))


def encode_rows(example: Any, predictor: Predictor, virtual: int = 0) -> EncodedInput:
    """Encode an example and list its rows, for a batch shared with other tasks.

    `virtual` is the number of tokens that its adapter adds in front of each row.

    Raises:
        DataError: a row has no tokens.
        ServingError: the inputs of the task are not rows of tokens with a mask.
    """
    whole = encode_input(example, predictor)
    batches = tuple(whole.encoded.batch([number]) for number in range(len(whole.encoded.rows)))
    rows = tuple(map(_rows_of, batches))
    if not all(row[MASK] for own in rows for row in own):
        raise DataError(
            "a text without tokens: it is empty, or the tokenizer leaves all of it out",
            expected="a text of one token or more",
        )
    return replace(whole, batches=batches, rows=rows, virtual=virtual)


def _rows_of(batch: Mapping[str, Tensor]) -> tuple[Row, ...]:
    """Return the inputs of a model as rows of different lengths."""
    inputs = model_inputs(batch)
    mask = inputs.get(MASK)
    if mask is None or any(each.shape != mask.shape for each in inputs.values()):
        shapes = [f"{name}: {list(each.shape)}" for name, each in inputs.items()]
        raise ServingError(
            "this input cannot share a batch with others",
            offenders=shapes,
            expected="rows of tokens, with an attention_mask",
        )
    lists = {name: each.tolist() for name, each in inputs.items()}
    kept = [[i for i, real in enumerate(row) if real] for row in lists[MASK]]
    return tuple(
        {name: [values[n][i] for i in places] for name, values in lists.items()}
        for n, places in enumerate(kept)
    )
