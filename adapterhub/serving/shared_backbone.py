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

The waiting requests that are computed together are the oldest, and others of about its length. A
pass takes some time however little it computes, and then a time for each position. So more rows
make a batch cheaper, and so does less padding. A batch has the rows with which most tokens are
computed in a unit of time.

A request is an input, encoded as its adapter's task does, and the outputs that are read for it.

A task predicts by calling a model on rows. Here the rows of several requests were computed
together, so each task gets an object that gives back the outputs for its own rows, in place of a
model. What is predicted of them is then what the task predicts anywhere.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.route import activate, route
from adapterhub.adapters.state import find_state
from adapterhub.backbones.same import same
from adapterhub.errors import (
    AdapterhubError,
    DataError,
    MismatchError,
    ServingError,
)
from adapterhub.inference.inputs import empty_error, empty_inputs, examples_of
from adapterhub.inference.open import Predictor
from adapterhub.serving.errors import ComputationError
from adapterhub.tasks import Encoded
from adapterhub.tasks.common.encoding import Row, pad
from adapterhub.tasks.common.forward import CPU_TOKENS, on_device, without_gradients
from adapterhub.tasks.common.infer_task import lost_of_each
from adapterhub.tasks.common.losses import model_inputs
from adapterhub.tasks.common.shared_prefix import PrefixStore, keeping_prefix

PADDING = 0.25  # of the positions that a batch computes
_SECONDS = 1.0  # that a measurement takes, at most
_AGAIN, _LENGTH = 8, 16  # how often a size is measured once more, and the tokens of its rows
_AS_CHEAP = 1.03  # a position that costs no more than the cheapest one times this
_ENOUGH = 10  # positions that are computed at once, for each one of the fixed part
_CHEAPER = 1.05  # larger batches are tried while a position costs less than before times this


class RequestSize(NamedTuple):
    """How large a request is: its rows, the longest of them, and the tokens of all."""

    rows: int
    longest: int
    tokens: int


class BatchLimits(NamedTuple):
    """What is computed at once.

    Attributes:
        tokens: the most positions.
        fixed: how many positions take as long as what each pass takes besides its positions.
    """

    tokens: int
    fixed: float

    @classmethod
    def of_tokens(cls, tokens: int) -> BatchLimits:
        """Return limits that were not measured."""
        return cls(tokens, tokens / 8)


def measure_limits(
    run: Callable[[int, int], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> BatchLimits:
    """Measure how many positions make a pass cheap for each of them.

    These are as many as take ten times as long as what a pass costs besides, or fewer where so many
    are dearer: larger batches gain little, and their answers come later.

    Args:
        run: computes a batch, and returns when it is computed: (rows, tokens of each).
        most: the most positions.
        clock: returns the seconds.
    """

    def timed(positions: int) -> float:
        start = clock()
        run(positions // _LENGTH, _LENGTH)
        return clock() - start

    timed(_LENGTH)  # the first pass is slower
    start, measured = clock(), dict(_growing(timed, most))
    for _ in range(_AGAIN):  # in turns, so that what disturbs one disturbs others too
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
    """Yield numbers of positions and their seconds, until more are no cheaper or take too long."""
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
    """Return the part of the time that does not depend on the positions, in positions.

    It is that of the line a + b n that is nearest to the seconds, each as a share of what was
    measured: otherwise a disturbance of the largest sizes would decide.
    """
    positions, seconds = np.array([*measured.items()], dtype=np.float64).T
    a, b = np.linalg.lstsq(np.stack([1 / seconds, positions / seconds], 1), np.ones(len(seconds)))[
        0
    ]
    return max(float(a / b), 0.0) if b > 0 else float(max(measured))


def choose_batch(
    waiting: Sequence[RequestSize], limits: BatchLimits, padding: float = PADDING
) -> list[int]:
    """Choose what is computed next, of the requests that may share a batch.

    The oldest request is always chosen, so that none waits forever. With it come those that are
    next to it in length, the older ones first, as many as make the batch the fastest one for each
    of its tokens, where

     - the share of padding among the computed positions, rows times the longest row, stays below
       `padding`, and
     - there are at most `limits.tokens` computed positions.

    A request that has more padding by itself, or more positions, is alone in its batch.

    Args:
        waiting: the requests, the oldest one first.
        limits: the most positions that are computed at once, and what a pass costs.
        padding: the share of padding that a batch stays below.

    Returns:
        The numbers of the chosen ones, 0 first.
    """
    length = waiting[0].longest
    # By length, the older ones of one length nearer to the oldest request.
    ordered = sorted(
        range(len(waiting)),
        key=lambda i: (waiting[i].longest, i if waiting[i].longest >= length else -i),
    )
    oldest = ordered.index(0)
    sizes = np.array([waiting[n] for n in ordered], dtype=np.int64)
    # Of the requests before each one: all runs from one at or before the oldest (in a column) to
    # one at or after it (in a row) are differences of these.
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
_PROMPTS = 16  # prompts share batches with those of lengths up to the same multiple of this
UNMEASURED, _OTHER_TOKENS = 192, 16384  # positions of a batch; the most, not on a CPU
_STATES = frozenset({"last_hidden_state"})
Answer = dict[str, Any] | Exception


class NotSharedError(MismatchError):
    """An adapter that cannot share the body, which only attaching it has shown."""


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
    _prefix: tuple[Any, PrefixStore] | None = None  # of the adapter that was computed last

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
        if self._prefix is None or self._prefix[0] is not served:
            self._prefix = served, PrefixStore()
        with keeping_prefix(self._prefix[1]):
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
        self._prefix = None
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


MASK = "attention_mask"


def read_example(given: Any, predictor: Predictor) -> Any:
    """Return one input as an example of the task.

    Raises:
        DataError: it is of another form, lacks a column or a text, or there are several.
    """
    refuse_half_characters(given)
    examples, single = examples_of(given, predictor.task, predictor.data)
    if not single:
        raise DataError(
            f"a list of {len(examples)} inputs",
            expected="one input for each request: a text, a tuple of texts, or a row",
            hint="submit each of them; they are computed together",
        )
    return examples[0]


def refuse_half_characters(given: Any) -> None:
    """Refuse texts with a part of a character, which no tokenizer takes.

    Raises:
        DataError: there is one.
    """
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text with half a character, U+{ord(given[error.start]):04X}",
                expected="text of whole characters",
            ) from None
    elif isinstance(given, Mapping):
        refuse_half_characters([*given, *given.values()])
    elif isinstance(given, list | tuple):
        for each in given:
            refuse_half_characters(each)


@dataclass(frozen=True)
class EncodedInput:
    """An example, its rows for the task, and for each of these the rows that a model reads.

    `batches` has the inputs of each row of the task, `rows` the same without padding. `virtual` is
    how many tokens the adapter puts in front of each row: with one of 20, all are computed for each
    row of its batch. `lost` is how many tokens were cut.
    """

    example: Any
    encoded: Encoded
    batches: tuple[dict[str, Tensor], ...] = ()
    rows: tuple[tuple[Row, ...], ...] = ()
    virtual: int = 0
    lost: int = 0

    @property
    def size(self) -> RequestSize:
        """How large the request is."""
        if not self.rows:
            lengths = self.encoded.lengths or [1]
            return RequestSize(len(lengths), max(lengths), sum(lengths))
        lengths = [self.virtual + len(row[MASK]) for rows in self.rows for row in rows]
        return RequestSize(len(lengths), max(lengths), sum(lengths))


def encode_input(example: Any, predictor: Predictor) -> EncodedInput:
    """Encode an example for its task alone.

    Raises:
        EmptyInputError: it has no text.
    """
    if empty_inputs(predictor.task, [example], predictor.tokenizer):
        raise empty_error([0], ["the input"], 1)
    encoded = predictor.task.encode([example], predictor.setting, labelled=False)
    return EncodedInput(example, encoded, lost=sum(lost_of_each(encoded)))


def encode_rows(example: Any, predictor: Predictor, virtual: int = 0) -> EncodedInput:
    """Encode an example, and list its rows, for a batch with those of other tasks.

    `virtual` is how many tokens its adapter puts in front of each row.

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


@dataclass
class RowOutputs:
    """The outputs for the rows of one request, in place of a model that a task calls.

    Attributes:
        fields: the outputs of a batch by name, (rows, ...).
        rows: for each row of the task, the rows of the batch that are its own.
        by_token: the names of outputs whose second dimension is that of tokens.
        left: whether rows are padded on the left.
        asked: the rows that the task has just collated.
    """

    fields: Mapping[str, Tensor]
    rows: Sequence[Sequence[int]]
    by_token: frozenset[str]
    left: bool
    asked: list[int] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def eval(self) -> None:
        """Do nothing: it has been computed."""

    def __call__(self, **inputs: Tensor) -> OutputFields:
        """Return the outputs for the rows that were collated last, as wide as these inputs."""
        own = [row for number in self.asked for row in self.rows[number]]
        width = inputs[MASK].shape[1]
        return OutputFields({name: self._cut(name, own, width) for name in self.fields})

    def _cut(self, name: str, rows: list[int], width: int) -> Tensor:
        whole = self.fields[name]
        first = rows[0]
        consecutive = rows == list(range(first, first + len(rows)))
        own = whole[first : first + len(rows)] if consecutive else whole[rows]
        if name not in self.by_token:
            return own
        return own[:, -width:] if self.left else own[:, :width]


class OutputFields(dict[str, Any]):
    """The outputs of a model, by name or as attributes."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class _ComputedRows(Encoded):
    """Encoded rows that are collated already, and tell the outputs which of them are asked for."""

    batches: tuple[dict[str, Tensor], ...] = ()
    outputs: RowOutputs | None = None

    def batch(self, indices: Sequence[int], epoch: int = 0) -> dict[str, Tensor]:
        assert self.outputs is not None
        self.outputs.asked = list(indices)
        return self.batches[indices[0]] if len(indices) == 1 else super().batch(indices, epoch)


def predict_from(outputs: RowOutputs, request: EncodedInput, predictor: Predictor) -> Any:
    """Return the prediction of a task for the outputs that were computed for a request."""
    given = request.encoded
    parts = (given.task, given.setting, given.examples, given.rows, given.owners)
    computed = _ComputedRows(*parts, batches=request.batches, outputs=outputs)
    model: Any = outputs
    return predictor.task.predict(model, computed, len(given.rows))[0]
