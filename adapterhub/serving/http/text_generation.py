"""Code shared by the APIs for generated texts: client options and event streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.responses import StreamingResponse

from adapterhub.errors import ConfigError
from adapterhub.serving.generation.request import GenerationOptions
from adapterhub.serving.http.request import AsyncGeneration, Call
from adapterhub.web.errors import LimitError, RequestError, body_of, problem_of

if TYPE_CHECKING:
    from adapterhub.serving.generation.request import GeneratedText, Piece

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
Event = Any  # a pydantic model or a JSON value


def generation_options(names: dict[str, str], **options: Any) -> GenerationOptions:
    """Return the generation options of a request.

    Args:
        names: the client's names of options, where they differ.
        options: the options of the request; None values are ignored.

    Raises:
        RequestError: an option is out of range.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        return GenerationOptions(**chosen)
    except ConfigError as error:
        name = next((each for each in chosen if error.problem.startswith(each)), "")
        words = [error.problem, error.expected]
        for own, shown in names.items():
            words = [each.replace(own, shown) for each in words]
        raise RequestError(words[0], parameter=names.get(name, name), expected=words[1]) from error


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


async def start_texts(
    call: Call, model: str, prompts: Iterable[Any], options: GenerationOptions
) -> list[AsyncGeneration]:
    """Start generating a text for each prompt, all at the same time.

    Raises:
        LimitError: there are too many prompts.
        AdapterhubError: a text cannot be generated.
    """
    every, limit = list(prompts), call.service.limits.inputs
    if len(every) > limit:
        raise LimitError(f"{len(every):,} prompts", expected=f"at most {limit:,}")
    started = [await call.generate(model, prompt, options) for prompt in every]
    for each in started:
        await call.before_deadline(each.begin())
    return started


def event_stream(call: Call, events: AsyncIterator[Event]) -> StreamingResponse:
    """Return a stream of server-sent events that ends with `[DONE]`.

    An error is sent as the last event, in the error format of the path.
    """

    async def generated() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield _line(event)
        except Exception as error:  # the status has already been sent
            yield _line(body_of(problem_of(error), call.request.url.path))
            return
        yield _DONE

    return StreamingResponse(generated(), headers=_HEADERS, media_type="text/event-stream")


def _line(event: Event) -> bytes:
    return b"data: " + to_json(event) + b"\n\n"


async def events_of(
    texts: list[AsyncGeneration],
    of_piece: Callable[[int, Piece], Event | None],
    of_end: Callable[[int, GeneratedText], Event],
) -> AsyncIterator[Event]:
    """Yield the events of texts, one text after the other; skip None."""
    for number, text in enumerate(texts):
        async for piece in text:
            if (event := of_piece(number, piece)) is not None:
                yield event
        yield of_end(number, await text.result())
