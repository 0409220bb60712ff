"""OpenAI's `/v1/chat/completions` and `/v1/completions`, also as streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterhub.data.chat_formats import ARGUMENTS
from adapterhub.serving.generation.detokenize import whole_text
from adapterhub.serving.generation.request import MOST_LOGPROBS
from adapterhub.serving.http.common import (
    Items,
    ModelAnswer,
    ModelUsage,
    TextsOrTokens,
    fitting_example,
    generates_texts,
    generating_facts,
    new_id,
    now,
    usage_of,
)
from adapterhub.serving.http.request import AdapterFacts, AsyncGeneration, Call, ClientRequest
from adapterhub.serving.http.text_generation import (
    event_stream,
    events_of,
    generation_options,
    start_texts,
    stop_texts,
)
from adapterhub.web.errors import RequestError
from adapterhub.web.frame import Endpoint

if TYPE_CHECKING:
    from adapterhub.serving.generation.request import (
        GeneratedText,
        GeneratedToken,
        Piece,
        PromptToken,
    )

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "priority": (0,),
    "verbosity": ("medium",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "echo": (False,),
}
"""Unsupported parameters that clients may send, with the values that change nothing."""


_OWN_ARGUMENTS = frozenset(
    {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
     "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "conversation", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip
"""Arguments of `apply_chat_template` that are not template variables."""
_NORMALIZED = 16  # characters that a tokenizer leaves out between two tokens
_NEUTRAL_OF_STREAMS = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}


LANGUAGE = "The language of {}, as the tokenizer names it, for adapters that translate."


class StreamOptions(ClientRequest):
    """Additional content of a stream."""

    neutral = _NEUTRAL_OF_STREAMS

    include_usage: bool = False


class WritingRequest(ClientRequest):
    """Fields of all requests for texts; other fields are not supported."""

    neutral = _NEUTRAL

    model: str
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: str | Items[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    src_lang: str | None = Field(None, description=LANGUAGE.format("the prompt"))
    tgt_lang: str | None = Field(None, description=LANGUAGE.format("the text"))

    def check(self) -> None:
        """Reject fields that would be ignored.

        Raises:
            RequestError: the body has such fields.
        """
        super().check()
        if self.stream_options is not None:
            self.stream_options.check()
            if not self.stream:
                raise RequestError(
                    "stream_options without a stream",
                    parameter="stream_options",
                    expected="stream: true",
                )

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, **more: Any) -> Any:
        """Return the generation options."""
        return generation_options(
            {},
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            seed=self.seed,
            stop=stop_texts(self.stop),
            src_lang=self.src_lang,
            tgt_lang=self.tgt_lang,
            **more,
        )


class ContentPart(BaseModel):
    """A part of a message: a text."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str = ""


class ChatMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None


class ChatRequest(WritingRequest):
    """The messages of a chat; the next one is generated."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(WritingRequest):
    """Texts to go on from, or the tokens of each."""

    prompt: TextsOrTokens
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = Field(False, description="Begin the text with the prompt.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="Number of most probable tokens to list for each token of the prompt.",
    )

    def check(self) -> None:
        """Reject fields that would be ignored or do not fit together, and requests for no output.

        Raises:
            RequestError: the body has such fields, or requests no output.
        """
        super().check()
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs of a stream",
                parameter="prompt_logprobs",
                expected="stream: false, or echo with logprobs",
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0, and nothing of the prompt is requested",
                parameter="max_tokens",
                expected="1 or more; or echo: true, or prompt_logprobs",
            )

    @property
    def scored(self) -> int | None:
        """The number of alternatives for each prompt token; None: the prompt is not scored."""
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        numbers = [each for each in counts if each is not None] or [0] * (self.max_tokens == 0)
        return max(numbers, default=None)


class TokenAlternative(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class WrittenToken(TokenAlternative):
    """A token of the text, and the most probable ones in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(BaseModel):
    """The tokens of a message."""

    content: list[WrittenToken]


class WrittenMessage(BaseModel):
    """The message that is written."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The message, and why it ends."""

    index: int = 0
    message: WrittenMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatResponse(ModelAnswer):
    """The next message of a chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class CompletionLogprobs(BaseModel):
    """The tokens of a text; the first one of a prompt has no probability."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class PromptLogprob(BaseModel):
    """A token that may be at a place of the prompt, as vLLM describes it; rank 1 is the first."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    """The text for a prompt, and why it ends."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class CompletionResponse(ModelAnswer):
    """The text for each prompt."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


# Chats


def chat_messages(
    messages: Sequence[ChatMessage], arguments: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates, and the other template arguments.

    Raises:
        RequestError: a message has a part that is not text, or an argument is reserved.
    """
    if own := sorted(_OWN_ARGUMENTS.intersection(arguments or ())):
        raise RequestError(
            f"{', '.join(own)} in chat_template_kwargs",
            parameter="chat_template_kwargs",
            expected="variables of the adapter's chat template, such as enable_thinking",
        )
    prompt = [_message(number, each) for number, each in enumerate(messages)]
    if arguments:
        prompt[0][ARGUMENTS] = dict(arguments)
    return prompt


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    content = message.content
    place = f"messages[{number}]"
    if isinstance(content, list):
        if wrong := [each.type for each in content if each.type != "text"]:
            raise RequestError(
                f"content of the type {wrong[0]!r}", parameter=place, expected="the type text"
            )
        content = "".join(each.text for each in content)
    more = {k: v for k, v in (message.model_extra or {}).items() if v not in (None, [])}
    if content is None or "tool_calls" in more or "function_call" in more:
        raise RequestError("a message without a text", parameter=place, expected="content")
    if ARGUMENTS in more:
        raise RequestError(
            f"{ARGUMENTS} in a message", parameter=place, expected=f"{ARGUMENTS} beside messages"
        )
    role = "system" if message.role == "developer" else message.role
    return {**more, "role": role, "content": content}


async def _chat(call: Call) -> ChatResponse | Response:
    request: ChatRequest = call.body
    return await answer_chat(call, request, request.model)


async def answer_chat(call: Call, request: ChatRequest, model: str) -> ChatResponse | Response:
    """Generate the next message of a chat, as one response or as a stream.

    Raises:
        RequestError: the request has an unsupported field.
        AdapterhubError: the message cannot be generated.
    """
    await generating_facts(call, model)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            "top_logprobs without logprobs", parameter="top_logprobs", expected="logprobs: true"
        )
    options = request.options(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    prompt = chat_messages(request.messages, request.chat_template_kwargs)
    (text,) = await start_texts(call, model, [prompt], options)
    if request.stream:
        return event_stream(call, _chat_events(text, request))
    whole = await text.result()
    choice = ChatChoice(
        message=WrittenMessage(content=whole.text),
        finish_reason=whole.finish_reason,
        logprobs=_chat_logprobs(whole.tokens) if request.logprobs else None,
    )
    return ChatResponse(
        id=new_id("chatcmpl"),
        model=text.reference,
        choices=[choice],
        usage=_usage([whole]),
    )


async def _chat_events(
    text: AsyncGeneration, request: ChatRequest
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a message: its role, its pieces, its end, and the token usage."""
    head = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion.chunk",
        "created": now(),
        "model": text.reference,
    }
    usage = {"usage": None} if request.with_usage else {}

    def chunk(delta: dict[str, str], end: str | None = None, of: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": of}
        return {**head, "choices": [choice], **usage}

    def of_piece(number: int, piece: Piece) -> dict[str, Any] | None:
        logprobs = _chat_logprobs(piece.tokens).model_dump() if request.logprobs else None
        return chunk({"content": piece.text}, of=logprobs) if piece.text or logprobs else None

    def of_end(number: int, whole: GeneratedText) -> dict[str, Any]:
        return chunk({}, whole.finish_reason)

    yield chunk({"role": "assistant", "content": ""})
    async for event in events_of([text], of_piece, of_end):
        yield event
    if request.with_usage:
        yield {**head, "choices": [], "usage": _usage([await text.result()])}


def _chat_logprobs(tokens: Iterable[GeneratedToken]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            WrittenToken(
                **_alternative(each.text, each.logprob or 0.0),
                top_logprobs=[TokenAlternative(**_alternative(*a)) for a in each.alternatives],
            )
            for each in tokens
        ]
    )


def _alternative(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(texts: Sequence[GeneratedText]) -> ModelUsage:
    prompts = sum(each.prompt_tokens for each in texts)
    return usage_of(prompts, sum(each.completion_tokens for each in texts))


# Texts


async def _completion(call: Call) -> CompletionResponse | Response:
    request: CompletionRequest = call.body
    facts = await generating_facts(call, request.model)
    prompts = _listed_prompts(request.prompt)
    options = request.options(
        max_tokens=request.max_tokens, logprobs=request.logprobs, prompt_logprobs=request.scored
    )
    echoed = [""] * len(prompts)
    if request.echo:

        def decode() -> list[str]:
            with facts.served.model.encoding:
                return [
                    each if isinstance(each, str) else whole_text(facts.tokenizer, each)
                    for each in prompts
                ]

        echoed = await call.with_tokenizer(facts, decode)
    texts = await start_texts(call, request.model, prompts, options)
    if request.stream:
        return event_stream(call, _text_events(texts, echoed, request))
    wholes = [await each.result() for each in texts]
    choices = [
        _choice(number, before, text.generation.prompt, whole, request)
        for number, (before, text, whole) in enumerate(zip(echoed, texts, wholes, strict=True))
    ]
    return CompletionResponse(
        id=new_id("cmpl"),
        model=texts[0].reference,
        choices=choices,
        usage=_usage(wholes),
    )


def _listed_prompts(prompts: TextsOrTokens) -> list[Any]:
    """Return prompts, as texts or tokens, as a list.

    Raises:
        RequestError: the list is empty.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not prompts or not all(prompts):
        raise RequestError("no prompt", parameter="prompt", expected="one text or more")
    return [prompts] if isinstance(prompts[0], int) else list(prompts)


def _choice(
    number: int,
    echoed: str,
    prompt: Sequence[PromptToken],
    whole: GeneratedText,
    request: CompletionRequest,
) -> CompletionChoice:
    choice = CompletionChoice(
        index=number, text=f"{echoed}{whole.text}", finish_reason=whole.finish_reason
    )
    if request.logprobs is not None:
        choice.logprobs = CompletionLogprobs()
        if request.echo:
            _add_prompt(choice.logprobs, echoed, prompt, request.logprobs)
        _add_tokens(choice.logprobs, whole.tokens, len(echoed))
    if request.prompt_logprobs is not None:
        choice.prompt_logprobs = [_at_place(each, request.prompt_logprobs) for each in prompt]
    return choice


def _at_place(token: PromptToken, count: int) -> dict[int, PromptLogprob] | None:
    """Return a prompt token and the most probable tokens at its position, by id."""
    if token.logprob is None or token.rank is None:
        return None
    listed = {
        i: PromptLogprob(logprob=value, rank=rank, decoded_token=text)
        for rank, (i, text, value) in enumerate(token.alternatives[:count], start=1)
    }
    own = PromptLogprob(logprob=token.logprob, rank=token.rank, decoded_token=token.text)
    return {token.id: own} | listed


async def _text_events(
    texts: list[AsyncGeneration], echoed: Sequence[str], request: CompletionRequest
) -> AsyncIterator[dict[str, Any]]:
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": now(),
        "model": texts[0].reference,
    }
    usage = {"usage": None} if request.with_usage else {}
    lengths = [*map(len, echoed)]

    def chunk(number: int, text: str, end: str | None, of: Any = None) -> dict[str, Any]:
        choice = {"index": number, "text": text, "finish_reason": end, "logprobs": of}
        return {**head, "choices": [choice], **usage}

    def of_piece(number: int, piece: Piece) -> dict[str, Any] | None:
        logprobs = None
        if request.logprobs is not None:
            logprobs = _add_tokens(CompletionLogprobs(), piece.tokens, lengths[number])
        lengths[number] += len(piece.text)
        return chunk(number, piece.text, None, logprobs) if piece.text or logprobs else None

    def of_end(number: int, whole: GeneratedText) -> dict[str, Any]:
        return chunk(number, "", whole.finish_reason)

    if request.echo:
        for number, (before, text) in enumerate(zip(echoed, texts, strict=True)):
            prompt_logprobs = None
            if request.logprobs is not None:
                prompt = text.generation.prompt
                prompt_logprobs = _add_prompt(
                    CompletionLogprobs(), before, prompt, request.logprobs
                )
            yield chunk(number, before, None, prompt_logprobs)
    async for event in events_of(texts, of_piece, of_end):
        yield event
    if request.with_usage:
        wholes = [await each.result() for each in texts]
        yield {**head, "choices": [], "usage": _usage(wholes)}


def _add_tokens(
    logprobs: CompletionLogprobs, tokens: Iterable[GeneratedToken], start: int
) -> CompletionLogprobs:
    """Add the tokens of a text that begins at offset `start`."""
    for each in tokens:
        logprobs.tokens.append(each.text)
        logprobs.token_logprobs.append(each.logprob or 0.0)
        logprobs.top_logprobs.append(_by_text(each.alternatives))
        logprobs.text_offset.append(start)
        start += len(each.text)
    return logprobs


def _add_prompt(
    logprobs: CompletionLogprobs, text: str, tokens: Iterable[PromptToken], count: int
) -> CompletionLogprobs:
    """Add the tokens of a prompt, with their offsets in its text.

    A special token that is not in the text, such as the first, has no width. The token itself is
    listed in addition to `count` alternatives, as in OpenAI's API.
    """
    place = 0
    for each in tokens:
        name = each.text
        if not text.startswith(name, place) and text.startswith(name.lstrip(), place):
            name = name.lstrip()  # the space between a special token and the first word
        listed = [(other, value) for _, other, value in each.alternatives[:count]]
        own = [(name, each.logprob or 0.0)]
        at = text.find(name, place, place + len(name) + _NORMALIZED)
        logprobs.tokens.append(name)
        logprobs.token_logprobs.append(each.logprob)
        logprobs.top_logprobs.append(None if each.logprob is None else _by_text([*listed, *own]))
        logprobs.text_offset.append(max(at, place))
        place = max(place, at + len(name) if at >= 0 else 0)
    return logprobs


def _by_text(tokens: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the probability of each text: the highest among the tokens with this text."""
    logprobs: dict[str, float] = {}
    for text, logprob in tokens:
        logprobs[text] = max(logprob, logprobs.get(text, logprob))
    return logprobs


def chat_example(facts: AdapterFacts) -> dict[str, Any]:
    """Return an example body for an adapter."""
    message = {"role": "user", "content": "When does the train leave?"}
    return {"model": facts.model, "messages": [message], "max_tokens": 16}


def _text_example(facts: AdapterFacts) -> dict[str, Any]:
    return {"model": facts.model, "prompt": "The train leaves", "max_tokens": 16}


_TAGS = ("OpenAI",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        _chat,
        summary="Write the next message of a chat",
        request=ChatRequest,
        response=ChatResponse,
        tags=_TAGS,
        example=fitting_example(generates_texts, chat_example),
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        _completion,
        summary="Go on from a text",
        request=CompletionRequest,
        response=CompletionResponse,
        tags=_TAGS,
        example=fitting_example(generates_texts, _text_example),
    ),
)
