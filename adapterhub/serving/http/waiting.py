"""What the compute thread does, for the event loop that waits for it.

The thread wakes the loop once for all that has come since it last looked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from adapterhub.errors import AttachError, ConfigError, DataError, SiteError
from adapterhub.serving.engine import ServedFuture
from adapterhub.serving.generation import GeneratedText, Piece, TextGeneration
from adapterhub.serving.http.errors import UnservableError
from adapterhub.serving.models import ServedAdapter
from adapterhub.serving.refusals import ComputationError, DeadlineError


class AsyncGeneration:
    """A text that is being written: an iterator of its pieces, for one event loop.

    Args:
        generation: the text.
        reference: the adapter that writes it, with its version.
        on_text: called with the whole text.
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
        """Wait for the first piece, so that what prevents it is told before anything is sent.

        Raises:
            AdapterhubError: the text has failed without one.
        """
        await self._begun.wait()
        if self._ended.done() and self._pieces.qsize() == 1:  # its end
            self._ended.result()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        self._ended.result()

    async def result(self) -> GeneratedText:
        """Return the whole text, when it ends; a caller that is cancelled cancels it."""
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Write nothing more."""
        self.generation.cancel()

    def _add(self, piece: Piece) -> None:
        self._pieces.put_nowait(piece)
        self._begun.set()

    def _end(self, end: GeneratedText | BaseException) -> None:
        if isinstance(end, BaseException):
            self._ended.set_exception(end)
            self._ended.exception()  # it is told where somebody asks
        else:
            self._ended.set_result(end)
            self._on_text(end)
        self._pieces.put_nowait(None)
        self._begun.set()


async def loaded_adapter(found: Future[ServedAdapter], seconds: float) -> ServedAdapter:
    """Return an adapter when it is loaded, which others may wait for, too.

    Raises:
        DeadlineError: that takes longer.
        UnservableError: its files are as published, and cannot be served.
    """
    try:
        if found.done():
            return found.result()
        waiting = asyncio.shield(asyncio.wrap_future(found))
        return await asyncio.wait_for(waiting, seconds)
    except asyncio.TimeoutError:
        raise DeadlineError(0.0) from None
    except (ConfigError, AttachError, SiteError, DataError) as error:
        raise UnservableError(str(error)) from error


async def awaited_results(futures: Sequence[ServedFuture], seconds: float) -> list[dict[str, Any]]:
    """Return the results of futures.

    After so many seconds only those are waited for that are computed already.

    Raises:
        AdapterhubError: that of the first that fails, at once.
        DeadlineError: one is not computed yet after that time.
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
        AdapterhubError: that of an input, with its number.
    """
    for number, each in enumerate(futures):
        if each.done() and (error := each.exception()) is not None:
            raise _of_input(number, error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *of: Any) -> None:
    """Call a function in the thread of a loop, unless that has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *of)


def _of_input(number: int, error: BaseException) -> BaseException:
    """Return the error of one input with its number."""
    if not isinstance(error, DataError | ComputationError):
        return error
    kind = DataError if isinstance(error, DataError) else ComputationError
    return kind(
        f"input {number}: {error.problem}",
        expected=error.expected,
        hint=error.hint,
        offenders=error.offenders,
    )
