"""What a shape of a client is made of: endpoints, and the call that each of them answers.

An endpoint reads `call.body`, asks `call.predict` or `call.generate`, and returns what the client
gets. Who may ask for which adapter, limits, deadlines and versions are the same for all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.responses import Response

from adapterhub.errors import DataError
from adapterhub.serving.http.errors import LimitError, WrongShapeError
from adapterhub.serving.refusals import ComputationError

if TYPE_CHECKING:
    from starlette.requests import Request

    from adapterhub.serving.http.service import Service

Answered = BaseModel | dict[str, Any] | Response


@dataclass(frozen=True)
class Endpoint:
    """One path: OpenAPI, limits, tokens, metrics and the documentation are made of a list of these.

    Attributes:
        method: the method of HTTP.
        path: with parameters in braces, such as /v2/models/{name}/infer.
        summary: what it does, in one line.
        request: the body; None: it has none.
        response: what is answered; None: another media type.
        answer: the function that answers a call.
        role: what a token must allow, predict or admin; "": anybody.
        tags: its chapter in the documentation.
        tasks: the tasks of the adapters that it answers for; (): of all.
    """

    method: str
    path: str
    summary: str
    request: type[BaseModel] | None
    response: type[BaseModel] | None
    answer: Callable[[Call], Awaitable[Answered]]
    role: str = "predict"
    tags: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """The answers of an adapter.

    Attributes:
        answers: for each input what `predict --json` prints.
        reference: the adapter with its version, or the backbone.
        digest: the sha256 of its manifest; "" for the backbone.
        task: what it was trained for.
        labels: in the order of the logits.
        tokens: of all inputs, as they were computed.
        truncated: the numbers of the inputs that were cut.
    """

    answers: list[dict[str, Any]]
    reference: str
    digest: str
    task: str
    labels: tuple[str, ...]
    tokens: int
    truncated: tuple[int, ...] = ()


@dataclass
class Call:
    """One request to an endpoint.

    Attributes:
        service: what all calls share.
        endpoint: what is asked for.
        request: as starlette has it.
        body: the validated body, of the class `endpoint.request`.
        versions: the reference and the digest of what has answered so far.
        generations: the texts that are generated for it.
    """

    service: Service
    endpoint: Endpoint
    request: Request
    body: Any = None
    versions: list[tuple[str, str]] = field(default_factory=list)
    generations: list[AsyncGeneration] = field(default_factory=list)

    @property
    def path_params(self) -> dict[str, str]:
        """The parameters of the path."""
        found: dict[str, str] = self.request.path_params
        return found

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the request."""
        return self.request.headers

    async def predict(
        self,
        model: str,
        inputs: Sequence[Any],
        *,
        truncate: bool = False,
        tasks: Collection[str] | None = None,
    ) -> Predicted:
        """Return the answers of an adapter to inputs, which may be computed in several batches.

        Args:
            model: the adapter, as the client names it, or the backbone.
            inputs: each as `Predictor.predict` takes it.
            truncate: cut inputs that are too long; otherwise they are refused.
            tasks: those that the shape has answers for; None: all.

        Raises:
            DataError: an input is not valid; the error names it.
            LimitError: there are too many inputs.
            WrongShapeError: the adapter has another task.
            AdapterhubError: the adapter cannot be used.
        """
        limit = self.service.limits.inputs
        if len(inputs) > limit:
            raise LimitError(
                f"{len(inputs):,} inputs", expected=f"at most {limit:,}", hint="several requests"
            )
        source = self.service.find(model, self)
        served = await _result(self.service.engine.adapters.find(source))
        task = served.predictor.task.name
        reference = self.service.allowed.shown(model, served.reference)
        if tasks is not None and task not in tasks:
            raise WrongShapeError(reference, task, self.service.endpoints_for(task))
        self.versions.append((reference, served.digest))
        deadline = self.service.limits.deadline
        futures = [self.service.engine.submit(source, each, deadline) for each in inputs]
        answers = await _results(futures)
        return Predicted(
            answers=answers,
            reference=reference,
            digest=served.digest,
            task=task,
            labels=served.predictor.labels,
            tokens=0,
        )

    async def generate(self, model: str, prompt: Any, options: Any) -> AsyncGeneration:
        """Begin to generate a text.

        Args:
            model: the adapter, as the client names it, or the backbone.
            prompt: a text to go on from, or the messages of a chat.
            options: the `GenerationOptions`.
        """
        source = self.service.find(model, self)
        engine: Any = self.service.engine
        started = engine.generate(source, prompt, options, deadline=self.service.limits.deadline)
        generation = AsyncGeneration(started)
        self.generations.append(generation)
        reference = self.service.allowed.shown(model, generation.reference)
        self.versions.append((reference, generation.digest))
        return generation


class AsyncGeneration:
    """A text that is being generated: an iterator of its pieces, for one event loop.

    The compute thread wakes the loop once for all that has come since it last looked.
    """

    def __init__(self, generation: Any) -> None:
        self.generation = generation
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self._ended: asyncio.Future[Any] = self._loop.create_future()
        generation.listen(
            lambda piece: self._call(self._pieces.put_nowait, piece),
            lambda end: self._call(self._end, end),
        )

    @property
    def reference(self) -> str:
        """The adapter with its version."""
        return str(self.generation.reference)

    @property
    def digest(self) -> str:
        """The sha256 of its manifest."""
        return str(self.generation.digest)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if (error := self._ended.exception()) is not None:
            raise error

    async def result(self) -> Any:
        """Return the whole text, when it ends; a caller that is cancelled cancels it."""
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Generate nothing more."""
        self.generation.cancel()

    def _call(self, function: Callable[[Any], None], value: Any) -> None:
        self._loop.call_soon_threadsafe(function, value)

    def _end(self, end: Any) -> None:
        if not self._ended.done():
            if isinstance(end, BaseException):
                self._ended.set_exception(end)
                self._ended.exception()  # it is told where somebody asks
            else:
                self._ended.set_result(end)
        self._pieces.put_nowait(None)


async def _result(future: Future[Any]) -> Any:
    """Return the result of a future of another thread."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


async def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of futures of the compute thread, which wakes the loop once for all.

    Those that wait are cancelled with the caller, and as soon as one has failed.

    The error of the first that failed is raised.
    """
    loop = asyncio.get_running_loop()
    waiter, lock = loop.create_future(), threading.Lock()
    left = len(futures)

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def done(future: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last or future.cancelled() or future.exception() is not None:
            loop.call_soon_threadsafe(wake)

    try:
        for each in futures:
            each.add_done_callback(done)
        if futures:
            await waiter
        return [_own_result(number, each) for number, each in enumerate(futures) if each.done()]
    finally:
        for each in futures:
            each.cancel()


def _own_result(number: int, future: Future[Any]) -> Any:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, DataError | ComputationError):
        raise type(error)(
            f"input {number}: {error.problem}",
            expected=error.expected,
            hint=error.hint,
            offenders=error.offenders,
        ) from None
    raise error
