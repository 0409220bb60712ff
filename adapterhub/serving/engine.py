"""The serving engine: requests in, futures out, and one compute thread.

Only this thread computes with the models and changes them. When it is free it takes the oldest
request and those that fit it (`choose_batch`), without waiting for more. Inputs are read and
encoded in the threads that submit them, and another thread loads adapters. The compute thread has
no other work.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from adapterhub.errors import AdapterhubError, ConfigError, one_line
from adapterhub.inference.inputs import EmptyInputError, read_example
from adapterhub.inference.open import AdapterSource
from adapterhub.serving.adapter_cache import (
    BareBackbone,
    ModelUse,
    ServedAdapters,
    ServedModels,
    Source,
)
from adapterhub.serving.generation.batched import TextRequest, is_out_of_memory
from adapterhub.serving.generation.detokenize import TextPieces
from adapterhub.serving.generation.prompt import Prompt, encode_prompt
from adapterhub.serving.generation.request import GenerationOptions, TextGeneration
from adapterhub.serving.generation.sampling import NextToken
from adapterhub.serving.generation.scheduler import TextGenerators
from adapterhub.serving.shared_backbone import (
    Answer,
    ClassModel,
    EncodedInput,
    Progress,
    RequestSize,
    ServedAdapter,
    choose_batch,
)
from adapterhub.tasks.common.base import NoPrediction
from adapterhub.tasks.common.language_models import Writing
from adapterhub.web.errors import (
    DeadlineError,
    OverloadedError,
    StoppedError,
    TooLargeError,
    TooLongError,
)

T = TypeVar("T")
LOOKED_AT = 512  # the oldest waiting requests from which a batch is chosen
_SLOWER = 0.1  # weight of a new batch in the measured rate
_CHARACTERS = 4  # approximate characters of a token, in texts not encoded yet


class ServedFuture(Future[dict[str, Any]]):
    """The answer to one request.

    Attributes:
        reference: the adapter that answers, with its version, once it is resolved.
        digest: the sha256 of its manifest.
        tokens: the number of tokens computed for it.
        lost: the number of tokens cut from its input.
    """

    reference: str = ""
    digest: str = ""
    tokens: int = 0
    lost: int = 0


@dataclass(frozen=True)
class ComputedBatch:
    """The cost of a batch: its rows, tokens, positions with padding, and seconds."""

    rows: int
    tokens: int
    positions: int
    seconds: float


@dataclass(eq=False)
class _Request:
    """A request whose adapter is loaded, and whose input is encoded."""

    future: ServedFuture
    served: ServedAdapter
    encoded: EncodedInput
    size: RequestSize
    deadline: float | None


@dataclass(eq=False)
class _PendingRequest:
    """A request for an adapter that may have to be loaded first.

    `size` is its approximate number of tokens. `queue` queues it once the adapter is loaded, and
    `fail` reports to the client that it is not computed.
    """

    source: Source
    size: int
    queue: Callable[[ServedAdapter], None]
    fail: Callable[[BaseException], object]


class ServingEngine:
    """Answers requests for any adapters of one or more backbones, in shared batches.

        with Engine("sentence-transformers/all-MiniLM-L6-v2") as engine:
            future = engine.submit("polite@v2", "could you please")
            print(future.result())

    A result is the object that `adapterhub predict --json` prints. Adapters are loaded on their
    first request, and verified as by `ah.load`.

    Args:
        backbone: the source of the backbone for all adapters; by default the source that each
            adapter records. Its fingerprint must match. `submit(None, ...)` uses this backbone
            alone.
        registry: the registry, if not the user's own.
        among: the id or fingerprint of the backbone that registry names are resolved for, where
            several backbones have an adapter of one name.
        signed: require a signature by a trusted key, even where the configuration does not.
        batch_tokens: the most positions computed at once, with padding; by default the fastest
            number, which is measured when a backbone is loaded.
        queue_tokens: the most tokens that wait.
        adapter_memory: the bytes of adapters to keep; the least recently used ones are evicted,
            except for pinned adapters and those in use.
        dtype: the dtype of all backbones, if not the one of each adapter's training.
        quantize: the quantization of all backbones, likewise.
        cache_tokens: the most tokens of texts whose keys and values are kept; further texts wait.
        max_length: the longest input, in tokens; by default the number of positions of each
            backbone.
    """

    def __init__(
        self,
        backbone: str | None = None,
        *,
        registry: str | Path | None = None,
        among: str | None = None,
        signed: bool = False,
        batch_tokens: int | None = None,
        queue_tokens: int = 1 << 17,
        adapter_memory: int = 2 << 30,
        dtype: str | None = None,
        quantize: str | None = None,
        cache_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        self.batch_tokens = batch_tokens
        self.queue_tokens = queue_tokens
        self.counts: Counter[str] = Counter()
        """Counts of requests, answers, batches, rows, tokens, positions, expired requests, ..."""
        self.on_batch: Callable[[ComputedBatch], None] = lambda batch: None
        """Called in the compute thread after each batch."""
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._pending: set[_PendingRequest] = set()  # requests whose adapter is being loaded
        self._generators = TextGenerators(
            batch_tokens, cache_tokens, self._between_steps, self.counts
        )
        self._queued = 0  # tokens
        self._rate = 0.0  # tokens per second, 0: unknown
        self._computing = False
        self._progress = Progress()
        self._closing = False
        self._stopped: StoppedError | None = None  # why computing has stopped
        self.adapters = ServedAdapters(
            ServedModels(backbone, dtype, quantize, batch_tokens, max_length),
            registry,
            among,
            signed,
            adapter_memory,
            self._between_batches,
            self._generators.forget,
        )
        self._thread = threading.Thread(target=self._run, name="adapterhub-compute", daemon=True)
        self._thread.start()

    def __enter__(self) -> ServingEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed: the thread is alive and the engine is open."""
        return not self._closing and self._stopped is None and self._thread.is_alive()

    @property
    def problem(self) -> StoppedError | None:
        """The reason why computing has stopped; None while it continues."""
        return self._stopped

    def busy_seconds(self) -> float:
        """Return the seconds since the thread last made progress; 0 while it waits.

        Progress is a batch, a generation step, or a pass of a model that generates a text.
        """
        return time.monotonic() - self._progress.time if self._computing else 0.0

    @property
    def queued_tokens(self) -> int:
        """The tokens of the waiting requests."""
        return self._queued

    @property
    def queued_requests(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting) + len(self._pending)

    def expected_wait(self) -> float:
        """Return the seconds until the current queue is computed, at the measured rate."""
        return self._queued / self._rate if self._rate else 0.0

    def submit(
        self,
        adapter: str | AdapterSource | None,
        value: Any,
        deadline: float | None = None,
        *,
        truncate: bool = True,
        keep_empty: bool = False,
    ) -> ServedFuture:
        """Submit one input to an adapter.

        A future that is cancelled before its batch begins is not computed. Its error is an adapter
        error such as `RegistryError`, an input error (`DataError`), or a `ServingError`.

        Args:
            adapter: a reference, a folder, or one of their heads; None: the embedding of the
                backbone without an adapter.
            value: one input, as `Predictor.predict` takes it: a text, a tuple of texts, or a row.
            deadline: the seconds from now after which the answer is useless.
            truncate: cut an input that exceeds the adapter's longest input; otherwise it is an
                error.
            keep_empty: answer an input without a text with `{"empty": true}`; otherwise it is an
                error.

        Raises:
            OverloadedError: the queue is full.
            StoppedError: the engine was closed, or its thread died.
        """
        future = ServedFuture()
        ends = None if deadline is None else time.monotonic() + deadline

        def queue(served: ServedAdapter) -> None:
            try:
                encoded = served.model.encode(value, served)
            except EmptyInputError:
                if not keep_empty:
                    raise
                _answer_empty(future, served, value)
                return
            request = _Request(future, served, encoded, encoded.size, ends)
            future.reference, future.digest = served.reference, served.digest
            future.tokens, future.lost = request.size.tokens, encoded.lost
            if encoded.lost and not truncate:
                raise TooLongError(encoded.lost, served.predictor.max_length)
            self._queue(request.size.tokens, lambda: self._waiting.append(request))

        self._admit(deadline)
        source = _source(adapter, BareBackbone.VECTORS)
        self._accept(
            _PendingRequest(source, _about(value), queue, lambda error: _fail(future, error))
        )
        return future

    def generate(
        self,
        adapter: str | AdapterSource | None,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        deadline: float | None = None,
        generation_time: float | None = None,
    ) -> TextGeneration:
        """Generate a text with an adapter.

        Texts of any adapters are generated together. Errors are raised as by `submit`.

        Args:
            adapter: as in `submit`; None: the backbone without an adapter.
            prompt: a text to continue, or a chat as a list of messages, formatted as in the
                training of the adapter.
            options: the generation options.
            deadline: the seconds from now after which the text is useless.
            generation_time: the most seconds from the first token to the end of the text. From the
                first token on, it replaces the deadline. None: the deadline always applies.

        Raises:
            OverloadedError: the queue is full.
            StoppedError: the engine was closed, or its thread died.
        """
        generation, chosen = TextGeneration(), options or GenerationOptions()
        ends = None if deadline is None else time.monotonic() + deadline
        seed = secrets.randbits(63) if chosen.seed is None else chosen.seed

        def queue(served: ServedAdapter) -> None:
            request = self._text_request(
                generation, served, prompt, NextToken(chosen, seed, 0), ends
            )
            request.generation_time = generation_time
            generation.reference, generation.digest = served.reference, served.digest

            def append() -> None:
                request.ahead = self._queued
                self._generators.waiting.append(request)
                self._generators.unfinished.add(request)

            self._queue(len(request.prompt.ids), append)

        self._admit(deadline)
        source = _source(adapter, BareBackbone.TEXTS)
        self._accept(_PendingRequest(source, _about(prompt), queue, generation.finish))
        return generation

    def _text_request(
        self,
        generation: TextGeneration,
        served: ServedAdapter,
        prompt: Prompt,
        first: NextToken,
        deadline: float | None,
    ) -> TextRequest:
        model, options = served.model, first.options
        if not isinstance(model, ClassModel):
            served.predictor.writing(Writing())  # raises if it does not generate texts
            raise ConfigError(f"{served.reference} writes no texts")
        with model.encoding:
            encoded = encode_prompt(prompt, served, options)
        before = encoded.ids if encoded.continues else []
        pieces = TextPieces(
            self._generators.decoder(model), before, (*options.stop, *encoded.stops)
        )
        return TextRequest(
            generation,
            served,
            encoded,
            first,
            pieces,
            deadline,
            self._begun,
            self._left,
            encoded.limit,
        )

    def _admit(self, deadline: float | None) -> None:
        """Count a request.

        Raises:
            OverloadedError: the queue is full.
            StoppedError: the engine was closed, or its thread died.
        """
        with self._changed:
            self._refuse_stopped()
            self.refuse_full(deadline)
            self.counts["requests"] += 1

    def refuse_full(self, deadline: float | None = None) -> None:
        """Refuse a request while the queue is full; servers call this before they read an input.

        The suggested wait is at most `deadline`: by then the whole current queue has ended.

        Raises:
            OverloadedError: the queue is full.
        """
        if self._queued >= self.queue_tokens:
            with self._changed:
                self.counts["refused"] += 1
            wait = self.expected_wait()
            if deadline is not None:
                wait = min(wait, max(deadline, 0.0))
            raise OverloadedError(self._queued, self.queue_tokens, wait)

    def _queue(self, tokens: int, append: Callable[[], None]) -> None:
        with self._changed:
            if self._stopped is not None:
                raise self._stopped
            append()
            self._queued += tokens
            self._changed.notify_all()

    def pin(self, *adapters: str | AdapterSource | BareBackbone | None) -> None:
        """Load adapters, and keep them in memory.

        None is the backbone without an adapter, for vectors; `BareBackbone.TEXTS` for texts.

        Raises:
            AdapterhubError: one cannot be loaded.
        """
        for each in adapters:
            self.adapters.pin(_source(each, BareBackbone.VECTORS))

    def find(self, source: Source) -> Future[ServedAdapter]:
        """Return the adapter of a reference, loaded or being loaded."""
        return self.adapters.find(source)

    def refresh(self) -> int:
        """Resolve references again, and load new versions.

        New requests use the new version. Requests that wait or are computed keep their version. A
        version that cannot be loaded changes nothing: there is a warning, and
        `adapters.counts["failed_refreshes"]` grows.

        Returns:
            The number of references that have moved.
        """
        return self.adapters.refresh()

    @property
    def running_texts(self) -> int:
        """The number of texts that are being generated or wait."""
        return len(self._generators.unfinished)

    def cache_use(self) -> tuple[int, int]:
        """Return the number of text tokens whose keys and values are cached, and the capacity."""
        return self._generators.cache_use()

    def models(self) -> list[ModelUse]:
        """List the adapters that share a model, and why others do not."""
        return self.adapters.uses()

    def close(self, drain_seconds: float = 30.0) -> None:
        """Refuse new requests, finish the waiting ones, and stop.

        Requests that are unfinished after `drain_seconds` fail with a `StoppedError`.
        """
        with self._changed:
            self._closing = True
            self._changed.wait_for(self._is_drained, drain_seconds)
        self.adapters.close()
        self._stop(StoppedError("the engine was closed before the request was computed"))
        if threading.current_thread() is not self._thread:
            self._thread.join(drain_seconds)

    def _is_drained(self) -> bool:
        left = self._waiting or self._pending or self._computing or self._generators.unfinished
        return self._stopped is not None or not left

    def _refuse_stopped(self) -> None:
        if self._closing:
            raise StoppedError("the engine is closed", hint="another Engine")
        if self._stopped is not None:
            raise self._stopped

    # In the threads that submit, and in the one that loads

    def _accept(self, request: _PendingRequest) -> None:
        """Queue a request now, or once its adapter is loaded."""
        loading = self.adapters.find(request.source)
        if loading.done():
            self._with_adapter(loading, request)
            return
        with self._changed:
            self._pending.add(request)
            self._queued += request.size

        def loaded(loading: Future[ServedAdapter]) -> None:
            try:
                self._with_adapter(loading, request)
            finally:
                with self._changed:
                    self._pending.discard(request)
                    self._queued -= request.size
                    self._changed.notify_all()

        loading.add_done_callback(loaded)

    def _with_adapter(self, loading: Future[ServedAdapter], request: _PendingRequest) -> None:
        try:
            served = loading.result()
            if not self.adapters.begin_use(served):  # it was just evicted
                self._accept(request)
                return
        except CancelledError:  # the load of its adapter was cancelled
            request.fail(self._stopped or StoppedError("the engine is closed"))
            return
        except BaseException as error:  # an error of the adapter
            request.fail(error)
            return
        try:
            request.queue(served)
        except BaseException as error:
            self.adapters.end_use(served)
            request.fail(error)

    def _between_batches(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._stopped is not None:
                future.set_exception(self._stopped)
                return future
            self._jobs.append((function, future))
            self._changed.notify_all()
        return future

    # In the thread that computes

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            self._stop(_dead(error))
        else:
            self._stop(StoppedError("the engine is closed"))
        finally:
            self._generators.close()

    def _step(self) -> bool:
        """Change a model or compute a batch; return False at the end."""
        with self._changed:
            self._computing = False
            self._changed.notify_all()  # wakes `close`
            self._changed.wait_for(self._has_work)
            jobs, self._jobs = self._jobs, deque()
            batch = [] if jobs else self._take()
            generates = self._generators.busy
            if not (jobs or batch or self._waiting or generates) and self._ends():
                return False
            self._progress.note()
            self._computing = True
        for function, future in jobs:
            _run_job(function, future)
        if batch:
            self._answer(batch)
        if generates and not jobs:
            self._generators.step()
        return True

    def _has_work(self) -> bool:
        return bool(self._jobs or self._waiting or self._generators.busy or self._ends())

    def _between_steps(self) -> None:
        """Compute a batch and a generation step of models that are not computing now."""
        self._progress.note()
        with self._changed:
            batch = self._take()
        if batch:
            self._answer(batch)
        self._generators.step()

    def _begun(self, request: TextRequest) -> None:
        """Remove the prompt of a text from the count of waiting tokens."""
        tokens = len(request.prompt.ids)
        self.counts["prompt_tokens"] += tokens
        with self._changed:
            self._queued -= tokens
            self._measure(request.ahead, time.monotonic() - request.queued)

    def _left(self, request: TextRequest) -> None:
        """Count a text that has ended."""
        self.counts[request.generation.outcome] += 1
        self.adapters.end_use(request.served)
        with self._changed:
            self._generators.unfinished.discard(request)
            self._changed.notify_all()

    def _ends(self) -> bool:
        done = not (self._waiting or self._pending or self._generators.busy)
        return self._stopped is not None or (self._closing and done)

    def _take(self) -> list[_Request]:
        """Remove the requests of the next batch from the queue."""
        self._drop_expired()
        first = islice(self._waiting, LOOKED_AT)
        looked_at = [r for r in first if r.served.model not in self._generators.computing]
        if not looked_at:
            return []
        oldest = looked_at[0]
        key = oldest.served.model.batch_key(oldest.served)
        fitting = [r for r in looked_at if r.served.model.batch_key(r.served) == key]
        limits = oldest.served.model.limits
        chosen = [fitting[n] for n in choose_batch([r.size for r in fitting], limits)]
        self._remove(chosen)
        return [each for each in chosen if self._begins(each)]

    def _drop_expired(self) -> None:
        now = time.monotonic()
        dropped = [
            r
            for r in self._waiting
            if r.future.cancelled() or (r.deadline is not None and r.deadline < now)
        ]
        if not dropped:
            return
        self._remove(dropped)
        for each in dropped:
            if self._begins(each):
                self.counts["expired"] += 1
                each.future.set_exception(DeadlineError(now - (each.deadline or now)))
                self.adapters.end_use(each.served)

    def _remove(self, requests: Iterable[_Request]) -> None:
        gone = set(map(id, requests))
        self._waiting = deque(each for each in self._waiting if id(each) not in gone)
        self._queued -= sum(each.size.tokens for each in requests)

    def _begins(self, request: _Request) -> bool:
        """Return whether a request is still wanted; from then on its future cannot be cancelled."""
        if request.future.set_running_or_notify_cancel():
            return True
        self.counts["cancelled"] += 1
        self.adapters.end_use(request.served)
        return False

    def _answer(self, batch: Sequence[_Request]) -> None:
        """Compute a batch, and set the results of its futures."""
        start = time.monotonic()
        answers: list[Answer] = []
        try:
            answers = self._computed(batch)
        except BaseException as error:  # the thread ends, so the futures must not stay pending
            answers = [_dead(error)] * len(batch)
            raise
        finally:
            self._count(batch, time.monotonic() - start)
            for request, answer in zip(batch, answers, strict=True):
                self.adapters.end_use(request.served)
                if isinstance(answer, Exception):
                    self.counts["errors"] += 1
                    request.future.set_exception(answer)
                else:
                    self.counts["answers"] += 1
                    request.future.set_result(answer)

    def _computed(self, batch: Sequence[_Request]) -> list[Answer]:
        """Return an answer for each request; a batch that fails is retried in halves."""
        model = batch[0].served.model
        hook = model.model.register_forward_pre_hook(self._progress.note)
        try:
            return model.compute([(r.served, r.encoded) for r in batch])
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            failed: Answer = _too_large(batch[0], error) if out_of_memory else error
        finally:
            hook.remove()
        if out_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(batch) == 1:
            return [failed]
        self.counts["halved"] += 1
        half = len(batch) // 2
        return [*self._computed(batch[:half]), *self._computed(batch[half:])]

    def _count(self, batch: Sequence[_Request], seconds: float) -> None:
        rows = sum(each.size.rows for each in batch)
        tokens = sum(each.size.tokens for each in batch)
        positions = rows * max(each.size.longest for each in batch)
        self.counts["batches"] += 1
        self.counts["rows"] += rows
        self.counts["tokens"] += tokens
        self.counts["positions"] += positions
        self.on_batch(ComputedBatch(rows, tokens, positions, seconds))
        self._measure(tokens, seconds)

    def _measure(self, tokens: int, seconds: float) -> None:
        """Measure the rate at which tokens leave the queue."""
        if tokens:
            rate = tokens / max(seconds, 1e-6)
            self._rate = rate if not self._rate else (1 - _SLOWER) * self._rate + _SLOWER * rate

    def _stop(self, error: StoppedError) -> None:
        """Stop computing, and fail all waiting requests."""
        with self._changed:
            self._stopped = self._stopped or error
            requests, jobs, pending = self._waiting, self._jobs, set(self._pending)
            self._waiting, self._jobs = deque(), deque()
            self._queued -= sum(each.size.tokens for each in requests)
            self._changed.notify_all()
        for request in requests:
            self.adapters.end_use(request.served)
            _fail(request.future, error)
        for each in pending:
            each.fail(error)
        self._generators.fail(error)
        for _, job in jobs:
            _fail(job, error)


def _source(adapter: str | Source | None, bare: BareBackbone) -> Source:
    if adapter is None:
        return bare
    return AdapterSource(adapter) if isinstance(adapter, str) else adapter


def _about(value: Any) -> int:
    """Return the approximate number of tokens of an input that is not encoded yet."""
    return len(str(value)) // _CHARACTERS + 2


def _run_job(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def _answer_empty(future: ServedFuture, served: ServedAdapter, value: Any) -> None:
    """Answer an input without a text."""
    example = read_example(value, served.predictor.task, served.predictor.data)
    future.reference, future.digest = served.reference, served.digest
    if future.set_running_or_notify_cancel():
        future.set_result(served.predictor.task.printed(example, NoPrediction()))


def _fail(future: Future[Any], error: BaseException) -> None:
    """Fail a future that is not computed, unless it was cancelled or has a result."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


def _dead(error: BaseException) -> StoppedError:
    return StoppedError(
        "the thread that computes has died",
        offenders=[one_line(f"{type(error).__name__}: {error}")],
        hint="another Engine; the reason is above",
    )


def _too_large(request: _Request, error: Exception) -> AdapterhubError:
    return TooLargeError(
        f"an input of {request.size.tokens:,} tokens does not fit into memory alone",
        offenders=[one_line(str(error))],
        hint="a shorter input, or another device",
    )
