"""Building blocks of client APIs: the shared `Service`, and the `Call` that an endpoint answers.

An endpoint reads `call.body`, calls `call.predict` or `call.generate`, and returns the response.
Access to adapters, limits, deadlines and versions are the same for all endpoints.

The compute thread passes its results to the waiting event loop. It wakes the loop once for all
results since the loop's last run.

All calls share the `Service`: the engine, the allowed adapters, limits, tokens and metrics.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.responses import Response

from adapterhub.data.media import MediaFile
from adapterhub.errors import (
    AdapterhubError,
    AttachError,
    ConfigError,
    DataError,
    NotPublishedError,
    SiteError,
    warn_user,
)
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.store import is_name
from adapterhub.serving.adapter_cache import BareBackbone
from adapterhub.serving.engine import ServedFuture, ServingEngine
from adapterhub.serving.generation.request import GeneratedText, Piece, TextGeneration
from adapterhub.serving.http.access import (
    AllowedAdapters,
    kind_of_pattern,
    may_ask_for,
)
from adapterhub.serving.http.metrics import ServerMetrics
from adapterhub.serving.shared_backbone import ServedAdapter
from adapterhub.web.errors import (
    ComputationError,
    DeadlineError,
    LimitError,
    OverloadedError,
    RateError,
    RequestError,
    UnknownAdapterError,
    UnservableError,
)
from adapterhub.web.frame import Endpoint, WebCall
from adapterhub.web.tokens import AccessToken, TokenFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from adapterhub.inference.open import Predictor
    from adapterhub.serving.engine import ServedFuture
    from adapterhub.serving.generation.prompt import Prompt
    from adapterhub.serving.generation.request import GenerationOptions, TextGeneration
    from adapterhub.serving.shared_backbone import ServedAdapter
    from adapterhub.web.tokens import AccessToken


STUCK_SECONDS = 120.0  # that the compute thread may take for one batch


@dataclass(frozen=True)
class RequestLimits:
    """Limits on the size and duration of one request.

    Attributes:
        body: maximum size of the body, in bytes.
        inputs: maximum number of inputs.
        deadline: seconds until the result, or the first token of a text, must be computed.
        generation_time: seconds that a text may take after its first token.
        per_minute: maximum requests of one token per minute; 0: unlimited.
    """

    body: int = 4 << 20
    inputs: int = 1024
    deadline: float = 30.0
    generation_time: float = 300.0
    per_minute: int = 0


@dataclass
class RequestRate:
    """Rate limit for the requests of each token.

    Each token starts with `per_minute` requests and regains one every 60/`per_minute` seconds.
    """

    per_minute: int
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, name: str) -> None:
        """Count a request.

        Raises:
            RateError: the token has made too many requests.
        """
        if not self.per_minute:
            return
        now, speed = time.monotonic(), self.per_minute / 60
        left, since = self._left.get(name, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - since) * speed)
        if left < 1:
            raise RateError(self.per_minute, (1 - left) / speed)
        self._left[name] = (left - 1, now)


class Service:
    """State shared by all calls.

    Args:
        engine: the engine that computes the results.
        allowed: the adapters that clients may request.
        backbone: the name of the backbone without an adapter; "" if it is not served.
        limits: the limits of each request.
        tokens: the accepted tokens; None: local clients need no token.
        metric_adapters: the number of adapters with separate metrics.
        origins: the origins of web pages that may send requests.

    Attributes:
        endpoints: all endpoints.
        is_ready: whether all adapters are loaded and warm, and the server is not shutting down.
        is_leaving: whether the server is shutting down. It still answers the requests it has read,
            then closes their connections.
        encoders: the threads that parse bodies and encode inputs.
    """

    def __init__(
        self,
        engine: ServingEngine,
        allowed: AllowedAdapters,
        *,
        backbone: str = "",
        limits: RequestLimits | None = None,
        tokens: TokenFile | None = None,
        metric_adapters: int = 100,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self.origins = origins
        self.engine, self.allowed, self.backbone = engine, allowed, backbone
        self.limits, self.tokens = limits or RequestLimits(), tokens
        self.metrics = ServerMetrics(engine, metric_adapters)
        self.rate = RequestRate(self.limits.per_minute)
        self.endpoints: tuple[Endpoint, ...] = ()
        self.is_ready = True
        self.is_leaving = False
        self.encoders = ThreadPoolExecutor(4, "adapterhub-encode")
        self._refreshing = threading.Lock()

    @property
    def computes(self) -> bool:
        """Whether the compute thread is alive."""
        return self.engine.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether the compute thread is alive and not stuck."""
        return self.computes and self.engine.busy_seconds() < STUCK_SECONDS

    def leave(self) -> None:
        """Stop being ready. Requests already read are answered, unless the server was starting."""
        self.is_leaving = self.is_leaving or self.is_ready
        self.is_ready = False

    def refresh(self) -> int:
        """Look up new versions of loaded adapters, and new names; return the number of updates.

        Nothing changes while the registry cannot be read.
        """
        with self._refreshing:
            if self.tokens is not None:
                self.tokens.note_uses()
            try:
                self.list_published()
            except AdapterhubError as error:
                warn_user(f"the registry is not read: {error.problem}")
            return self.engine.refresh()

    def list_published(self) -> None:
        """Look up the names in the registry that clients may request.

        Raises:
            RegistryError: the registry cannot be read.
        """
        patterns = [p for p in self.allowed.patterns if kind_of_pattern(p) == "local"]
        if patterns:
            published = self.engine.adapters.published().items()
            names = [name for name, own in published if any(each.yanked is None for each in own)]
            matching = (name for name in names if any(fnmatchcase(name, p) for p in patterns))
            self.allowed.listed = tuple(sorted(matching))

    def check_token(self, header: str | None) -> AccessToken | None:
        """Return the token in a header, with its permissions; None if it is not valid."""
        kind, _, token = (header or "").partition(" ")
        if self.tokens is None or kind.lower() != "bearer":
            return None
        return self.tokens.check(token.strip())


class AsyncGeneration:
    """Asynchronous iterator over the pieces of a text while it is generated.

    It belongs to one event loop.

    Args:
        generation: the generation of the text.
        reference: the reference of the adapter that generates it, with the version.
        on_text: called with the complete text.
    """

    def __init__(
        self,
        generation: TextGeneration,
        reference: str,
        on_text: Callable[[GeneratedText], None],
    ) -> None:
        self.generation, self.reference, self._on_text = generation, reference, on_text
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._ended: asyncio.Future[GeneratedText] = self._loop.create_future()
        generation.listen(
            lambda piece: _call_soon(self._loop, self._add, piece),
            lambda end: _call_soon(self._loop, self._end, end),
        )

    async def begin(self) -> None:
        """Wait for the first piece, so that an early failure is raised before anything is sent.

        Raises:
            AdapterhubError: the generation failed before the first piece.
        """
        await self._begun.wait()
        if self._ended.done() and self._pieces.qsize() == 1:  # end of the text
            self._ended.result()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        self._ended.result()

    async def result(self) -> GeneratedText:
        """Return the complete text when it ends; cancelling the caller cancels the generation."""
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the generation."""
        self.generation.cancel()

    def _add(self, piece: Piece) -> None:
        self._pieces.put_nowait(piece)
        self._begun.set()

    def _end(self, end: GeneratedText | BaseException) -> None:
        if isinstance(end, BaseException):
            self._ended.set_exception(end)
            self._ended.exception()  # raised where the result is awaited
        else:
            self._ended.set_result(end)
            self._on_text(end)
        self._pieces.put_nowait(None)
        self._begun.set()


async def loaded_adapter(loading: Future[ServedAdapter], seconds: float) -> ServedAdapter:
    """Return an adapter once it is loaded; other requests may wait for the same load.

    Raises:
        DeadlineError: loading takes longer than `seconds`.
        UnservableError: its files match the published ones, but cannot be served.
    """
    try:
        if loading.done():
            return loading.result()
        waiting = asyncio.shield(asyncio.wrap_future(loading))
        return await asyncio.wait_for(waiting, seconds)
    except asyncio.TimeoutError:
        raise DeadlineError(0.0) from None
    except (ConfigError, AttachError, SiteError, DataError) as error:
        raise UnservableError(str(error)) from error


async def awaited_results(futures: Sequence[ServedFuture], seconds: float) -> list[dict[str, Any]]:
    """Return the results of futures.

    After `seconds`, waiting continues only if the computation of all futures has started.

    Raises:
        AdapterhubError: a future failed; the first failure is raised at once.
        DeadlineError: the computation of one has not started after that time.
    """
    loop = asyncio.get_running_loop()
    waiter, left = loop.create_future(), itertools.count(len(futures) - 1, -1)

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def done(future: ServedFuture) -> None:
        if next(left) == 0 or future.cancelled() or future.exception() is not None:
            _call_soon(loop, wake)

    for each in futures:
        each.add_done_callback(done)  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(asyncio.shield(waiter), max(seconds, 0.0))
    except asyncio.TimeoutError:
        if not all(each.running() or each.done() for each in futures):
            raise DeadlineError(0.0) from None
        await waiter
    raise_failed(futures)
    return [each.result() for each in futures]


def raise_failed(futures: Sequence[ServedFuture]) -> None:
    """Raise the error of the first future that has failed, if one has.

    Raises:
        AdapterhubError: the error of an input, with its number.
    """
    for number, each in enumerate(futures):
        if each.done() and (error := each.exception()) is not None:
            raise _of_input(number, error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *of: Any) -> None:
    """Call a function in the thread of an event loop, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *of)


def _of_input(number: int, error: BaseException) -> BaseException:
    """Return the error of one input, with the input's number."""
    if not isinstance(error, DataError | ComputationError):
        return error
    kind = DataError if isinstance(error, DataError) else ComputationError
    return kind(
        f"input {number}: {error.problem}",
        expected=error.expected,
        hint=error.hint,
        offenders=error.offenders,
    )


T = TypeVar("T")
_READ_HERE = 1 << 10  # bytes of a body that is parsed and encoded in the event loop
_ROOM = 0.005  # seconds between two checks for room in the queue
_GRACE = 0.25  # seconds after the deadline for the engine to report it itself
BESIDE = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields that describe the client and do not affect the response."""
Answered = BaseModel | dict[str, Any] | list[Any] | Response


@dataclass(frozen=True)
class AdapterFacts:
    """Facts about an adapter before anything is computed.

    Attributes:
        model: the adapter's name in the request.
        reference: the reference with its version; for the backbone or a folder, the client's name.
        digest: the sha256 of its manifest; "" for the backbone.
        source: the key that identifies it in the engine; None for the backbone.
        served: the adapter as the engine has loaded it.
    """

    model: str
    reference: str
    digest: str
    source: AdapterSource | None
    served: ServedAdapter

    @property
    def predictor(self) -> Predictor:
        """The predictor, with the task, labels and tokenizer."""
        return self.served.predictor

    @property
    def task(self) -> str:
        """The task that the adapter was trained for."""
        return self.predictor.task.name

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the logits."""
        return self.predictor.labels

    @property
    def texts(self) -> int:
        """The number of texts per input; 0: any number."""
        return self.predictor.task.fields(self.predictor.data)

    @property
    def max_length(self) -> int:
        """The maximum length of an input, in tokens."""
        return self.predictor.max_length

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the adapter's new tokens."""
        return self.predictor.tokenizer

    @property
    def decodes(self) -> bool:
        """Whether the inputs are images or audio."""
        return self.predictor.task.decodes


@dataclass(frozen=True)
class Predicted:
    """Predictions of an adapter.

    Attributes:
        answers: for each input, the object that `predict --json` prints.
        facts: the adapter.
        tokens: the number of tokens computed for all inputs.
        truncated: the numbers of the truncated inputs.
    """

    answers: list[dict[str, Any]]
    facts: AdapterFacts
    tokens: int
    truncated: tuple[int, ...] = ()


class ClientRequest(BaseModel):
    """A body of a client: each of its fields acts, changes nothing, or is refused.

    A field that is null is as if it was not there.

    Attributes:
        neutral: fields that are not supported, with the values that change nothing.
    """

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    def check(self) -> None:
        """Reject fields that would be ignored.

        Raises:
            RequestError: the body has such fields.
        """
        refuse_unless(self.model_extra or {}, self.neutral, acts=BESIDE)


def refuse_unless(
    parameters: Mapping[str, Any],
    neutral: Mapping[str, Sequence[Any]],
    hint: str = "",
    *,
    acts: Collection[str] | None = None,
) -> None:
    """Reject unsupported parameters whose value would change the result.

    Args:
        parameters: the parameters of the request; null counts as absent.
        neutral: for each unsupported parameter, the values that change nothing.
        hint: what to do instead.
        acts: the names of the supported parameters. None: any.

    Raises:
        RequestError: there are such parameters; the error names all of them.
    """
    unknown = () if acts is None else (name for name in parameters if name not in acts)
    looked_at = dict.fromkeys((*neutral, *unknown))
    refused = [
        name
        for name in looked_at
        if parameters.get(name) is not None and parameters[name] not in neutral.get(name, ())
    ]
    if not refused:
        return
    names = ", ".join(name[:40] for name in refused[:8])
    accepted = [f"{n} {' or '.join(map(repr, neutral[n]))}" for n in refused if neutral.get(n)]
    raise RequestError(
        f"{names} {'is' if len(refused) == 1 else 'are'} not supported",
        parameter=refused[0][:40],
        expected=", ".join(accepted) or f"a request without {names}",
        hint=hint,
    )


@dataclass(kw_only=True)
class Call(WebCall):
    """A request to an endpoint.

    Attributes:
        service: the state shared by all calls.
        token: the client's token, with its permissions; None where no token is needed.
        body: the validated body, of the class `endpoint.request`.
        facts_of_answer: the adapter that answers, as soon as it is known.
        rows: the number of inputs.
        generations: the texts generated for this request.
    """

    service: Service
    token: AccessToken | None = None
    body: Any = None
    facts_of_answer: AdapterFacts | None = None
    rows: int = 0
    generations: list[AsyncGeneration] = field(default_factory=list)

    def read_form(self) -> BaseModel | None:
        """Return the body, validated by the endpoint's model.

        Raises:
            ValidationError: the body does not fit the model.
            RequestError: a field would be ignored.
        """
        body: BaseModel | None = None
        if self.endpoint.read is not None:
            body = self.endpoint.read(self)
        elif self.endpoint.request is not None:
            body = self.endpoint.request.model_validate_json(self.raw_body)
        if isinstance(body, ClientRequest):
            body.check()
        return body

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of the adapters that this client may request."""
        return ("*",) if self.token is None else self.token.adapters

    @property
    def is_ready(self) -> bool:
        """Whether all adapters are loaded and the server is not shutting down."""
        return self.service.is_alive and self.service.is_ready

    def adapters(self) -> list[str]:
        """List the names that this client may request, as far as they are known in advance."""
        return [each for each in self.service.allowed.names if may_ask_for(each, self.patterns)]

    def loaded(self) -> list[AdapterFacts]:
        """List the facts of the loaded adapters that this client may request."""
        allowed, facts = self.service.allowed, dict[str, AdapterFacts]()
        by_name = {**allowed.aliases, **allowed.named}
        names = {source: name for name, source in by_name.items()}
        for source, served in self.service.engine.adapters.loaded().items():
            own = source if isinstance(source, AdapterSource) else None
            model = names.get(own, own.reference if own else self.service.backbone)
            if model and may_ask_for(model, self.patterns):
                facts[model] = self._facts(model, own, served)
        return list(facts.values())

    async def facts(self, model: str, *, bare: BareBackbone = BareBackbone.VECTORS) -> AdapterFacts:
        """Return the facts of an adapter; load it if necessary.

        Args:
            model: the adapter's name in the request.
            bare: the computation of the backbone, if the name is the backbone's.

        Raises:
            UnknownAdapterError: it does not exist, or this client may not request it.
            AdapterhubError: it cannot be loaded.
        """
        source = self.service.allowed.find(model, self.patterns)
        try:
            loading = self.service.engine.find(source or bare)
            served = await loaded_adapter(loading, max(self.left, 0.0))
        except NotPublishedError:
            raise self.service.allowed.unknown(model, self.patterns) from None
        return self._facts(model, source, served)

    def _facts(
        self, model: str, source: AdapterSource | None, served: ServedAdapter
    ) -> AdapterFacts:
        reference = self.service.allowed.shown(model, served.reference)
        return AdapterFacts(model, reference, served.digest, source, served)

    async def predict(
        self,
        model: str,
        inputs: Sequence[Any],
        *,
        truncate: bool = False,
        keep_empty: bool = False,
    ) -> Predicted:
        """Return an adapter's predictions for inputs, computed in one or more batches.

        Args:
            model: the name of the adapter or the backbone in the request.
            inputs: the inputs in the form of `Predictor.predict`; for tasks on images and audio,
                the bytes of a file in base64.
            truncate: truncate inputs that are too long; otherwise they are rejected.
            keep_empty: return `{"empty": true}` for inputs without a text; otherwise they are
                rejected.

        Raises:
            DataError: an input is not valid; the error names it.
            LimitError: there are too many inputs.
            AdapterhubError: the adapter cannot be used.
        """
        limits, engine = self.service.limits, self.service.engine
        if not inputs:
            raise DataError("a request without inputs", expected="at least one")
        if len(inputs) > limits.inputs:
            raise LimitError(
                f"a request with {len(inputs):,} inputs",
                expected=f"at most {limits.inputs:,}",
                hint="several requests",
            )
        engine.refuse_full(limits.deadline)
        facts = await self.facts(model)
        decoded = [_decoded(n, each) for n, each in enumerate(inputs)] if facts.decodes else inputs
        self.rows += len(inputs)
        self.facts_of_answer = facts
        futures, answers = await self._computed(facts, decoded, truncate, keep_empty)
        if futures[0].digest != facts.digest:  # the reference has changed in the meantime
            facts = self.facts_of_answer = replace(
                facts,
                reference=self.service.allowed.shown(model, futures[0].reference),
                digest=futures[0].digest,
            )
        return Predicted(
            answers=answers,
            facts=facts,
            tokens=sum(each.tokens for each in futures),
            truncated=tuple(n for n, each in enumerate(futures) if each.lost),
        )

    async def _computed(
        self, facts: AdapterFacts, inputs: Sequence[Any], truncate: bool, keep_empty: bool
    ) -> tuple[list[ServedFuture], list[dict[str, Any]]]:
        """Return an adapter's predictions and their futures, split to fit the queue."""
        engine = self.service.engine
        futures: list[ServedFuture] = []
        is_over = False

        def submit() -> OverloadedError | None:
            for each in inputs[len(futures) :]:
                if is_over:
                    return None
                try:
                    future = engine.submit(
                        facts.source, each, self.left, truncate=truncate, keep_empty=keep_empty
                    )
                except OverloadedError as error:
                    return error
                futures.append(future)
            return None

        try:
            while (full := await self.with_tokenizer(facts, submit)) is not None:
                await self._room(full, begun=_is_worked_on(futures, engine.queued_tokens))
                raise_failed(futures)
            answers = await awaited_results(futures, self.left + _GRACE)
        finally:
            is_over = True
            for future in futures:
                future.cancel()
        return futures, answers

    async def generate(
        self, model: str, prompt: Prompt, options: GenerationOptions
    ) -> AsyncGeneration:
        """Start generating a text.

        Args:
            model: the name of the adapter or the backbone in the request.
            prompt: a text to continue, or the messages of a chat.
            options: the generation options.

        Raises:
            AdapterhubError: the adapter cannot be used.
        """
        if not self.generations:
            self.service.engine.refuse_full(self.service.limits.deadline)
        facts = await self.facts(model, bare=BareBackbone.TEXTS)
        self.facts_of_answer = facts
        self.rows += 1

        def generate() -> TextGeneration | OverloadedError:
            limit = self.service.limits.generation_time
            try:
                return self.service.engine.generate(facts.source, prompt, options, self.left, limit)
            except OverloadedError as error:
                return error

        while isinstance(started := await self.with_tokenizer(facts, generate), OverloadedError):
            await self._room(started, begun=bool(self.generations))
        observe = self.service.metrics.observe_text
        generation = AsyncGeneration(started, facts.reference, observe)
        self.generations.append(generation)
        self.at_end.append(generation.cancel)
        return generation

    async def with_tokenizer(self, facts: AdapterFacts, function: Callable[[], T]) -> T:
        """Run a function that takes the lock of an adapter's tokenizer, and return its result.

        It runs in a thread if the lock is taken or the body is not short.
        """
        if facts.served.model.encoding.locked():
            return await self._elsewhere(function)
        return await self.in_thread(function)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Return the result of a function; run it in a thread unless the body is short."""
        return function() if len(self.raw_body) <= _READ_HERE else await self._elsewhere(function)

    async def _elsewhere(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await self.before_deadline(loop.run_in_executor(self.service.encoders, function))

    @property
    def left(self) -> float:
        """The seconds until the deadline."""
        return self.service.limits.deadline - (time.perf_counter() - self.began)

    async def before_deadline(self, awaited: Awaitable[T]) -> T:
        """Return the result of an awaitable.

        Raises:
            DeadlineError: the deadline passes first.
        """
        try:
            return await asyncio.wait_for(awaited, max(self.left + _GRACE, 0.0))
        except asyncio.TimeoutError:
            raise DeadlineError(max(-self.left, 0.0)) from None

    async def _room(self, error: OverloadedError, *, begun: bool) -> None:
        """Wait briefly for room in the queue; requests larger than the queue are split.

        Raises:
            OverloadedError: the queue is filled by other requests.
            DeadlineError: the queue has no room before the deadline.
        """
        if not begun:
            raise error
        if self.left <= 0:
            raise DeadlineError(-self.left) from error
        await asyncio.sleep(_ROOM)

    async def load_alias(self, name: str, reference: str) -> None:
        """Load an adapter and serve it under a new name.

        Raises:
            UnknownAdapterError: this client may not request the adapter.
            ConfigError: the name is taken or not valid, or the reference is the backbone's.
        """
        allowed = self.service.allowed
        source = allowed.find(reference, self.patterns)
        if name in allowed.named or source is None or not is_name(name):
            raise ConfigError(
                f"{name[:100]!r} cannot be the name of an adapter here",
                expected="a new name of letters, digits and . _ -",
            )
        loading = self.service.engine.find(source)
        await loaded_adapter(loading, self.service.limits.deadline)
        allowed.aliases[name] = source

    async def unload_alias(self, name: str) -> None:
        """Remove a name.

        Raises:
            UnknownAdapterError: the name was not added by `load_alias`.
        """
        if self.service.allowed.aliases.pop(name, None) is None:
            raise UnknownAdapterError(name, self.service.allowed.aliases)


def _is_worked_on(futures: Sequence[ServedFuture], queued: int) -> bool:
    """Return whether inputs of a request are being computed, or fill the queue alone."""
    waiting = [each for each in futures if not (each.done() or each.running())]
    return bool(futures) and (
        len(waiting) < len(futures) or queued <= sum(each.tokens for each in waiting)
    )


def _decoded(number: int, text: Any) -> MediaFile:
    """Return an image or audio file from a request, decoded from base64.

    Raises:
        DataError: the input is not base64 text.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise DataError(
            f"input {number} is not the bytes of a file", expected="a text in base64"
        ) from None
    return MediaFile(hashlib.sha256(data).hexdigest(), data=data, name=f"input {number}")
