"""Generated texts in the API of Hugging Face Inference, complete or as a stream of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from adapterhub.serving.http.hugging_face_inputs import FOR_ALL, InferenceRequest, inference_inputs
from adapterhub.serving.http.request import AdapterFacts, AsyncGeneration, Call, refuse_unless
from adapterhub.serving.http.text_generation import (
    event_stream,
    generation_options,
    start_texts,
    stop_texts,
)
from adapterhub.tasks.common.languages import LANGUAGE_COLUMNS
from adapterhub.web.errors import RequestError

if TYPE_CHECKING:
    from adapterhub.serving.generation.request import GeneratedText, GeneratedToken


async def generated_texts(
    call: Call, facts: AdapterFacts, request: InferenceRequest
) -> list[dict[str, Any]] | Response:
    """Generate texts with the options of the request, by default as `predict` does.

    Raises:
        RequestError: the request has an unsupported option.
    """
    options = _all_options(request)
    inputs, _ = inference_inputs(request.inputs)
    chosen = {name: options[name] for name in _GENERATES if options.get(name) is not None}
    full = bool(options.get("return_full_text"))
    before = [each if full and isinstance(each, str) else "" for each in inputs]
    if not (chosen or request.stream or options.get("details")):
        predicted = await call.predict(facts.model, inputs, truncate=request.truncates)
        generated = [answer["generated"] for answer in predicted.answers]
        return [_named_text(b + text) for b, text in zip(before, generated, strict=True)]
    if request.stream and len(inputs) > 1:
        raise RequestError("a stream of several texts", parameter="inputs", expected="one text")
    prompts = [_as_trained(each, facts) for each in inputs]
    with_tokens = bool(request.stream or options.get("details"))
    texts = await start_texts(call, facts.model, prompts, _how(chosen, with_tokens))
    if request.stream:
        return event_stream(call, _token_events(texts[0], before[0], chosen.get("seed")))
    wholes = [await each.result() for each in texts]
    return [
        _named_text(b + whole.text) | (_details(whole, chosen) if options.get("details") else {})
        for b, whole in zip(before, wholes, strict=True)
    ]


def _all_options(request: InferenceRequest) -> dict[str, Any]:
    """Return the options, including the nested options of summaries."""
    own = request.options.get("generate_parameters") or {}
    if not isinstance(own, dict):
        raise RequestError(
            "generate_parameters is not an object",
            parameter="generate_parameters",
            expected='an object such as {"max_new_tokens": 20}',
        )
    options = {**request.options, **own}
    names = (*_GENERATES, "return_full_text", "details", "generate_parameters", *FOR_ALL)
    refuse_unless(options, _NOT_GENERATED, acts=names)
    return options


_GENERATES = (
    "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_sequences",
    "do_sample", *LANGUAGE_COLUMNS,
)  # fmt: skip
_NOT_GENERATED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "decoder_input_details": (False,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "grammar": (),
    "top_n_tokens": (0,),
    "typical_p": (1,),
    "watermark": (False,),
    "adapter_id": (),
    "truncate": (True, False),
    "num_beams": (1,),
    "min_new_tokens": (0,),
    "clean_up_tokenization_spaces": (False,),
}


def _how(chosen: Mapping[str, Any], with_tokens: bool) -> Any:
    """Return the generation options; as in the client, sampling is off by default."""
    names = ("temperature", "top_p", "top_k")
    samples = chosen.get("do_sample") or any(chosen.get(name) for name in names)
    stops = chosen.get("stop", chosen.get("stop_sequences"))
    for name, kind in _KINDS.items():
        value = chosen.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, kind) or not abs(value) < _HIGHEST:
            raise RequestError(
                f"{name} is {str(value)[:40]!r}", parameter=name, expected="a number"
            )
    languages = {name: chosen.get(name) for name in LANGUAGE_COLUMNS}
    for name, language in languages.items():
        if language is not None and not isinstance(language, str):
            raise RequestError(f"{name} is not text", parameter=name, expected="a language")
    if stops is not None and not (
        isinstance(stops, str)
        or (isinstance(stops, list) and all(isinstance(s, str) for s in stops))
    ):
        raise RequestError(
            "stop is not a list of texts", parameter="stop", expected="a list of texts"
        )
    return generation_options(
        {"max_tokens": "max_new_tokens"},
        max_tokens=chosen.get("max_new_tokens"),
        temperature=chosen.get("temperature", 1.0) if samples else 0.0,
        top_p=chosen.get("top_p"),
        top_k=chosen.get("top_k"),
        seed=chosen.get("seed"),
        stop=stop_texts(stops),
        logprobs=0 if with_tokens else None,
        **languages,
    )


_HIGHEST = 1 << 62
_KINDS: dict[str, Any] = {
    "max_new_tokens": int,
    "temperature": int | float,
    "top_p": int | float,
    "top_k": int,
    "seed": int,
}


def _as_trained(value: Any, facts: AdapterFacts) -> Any:
    """Return a prompt in the adapter's input format: a message if it was trained on answers."""
    if not isinstance(value, str):
        raise RequestError(
            "two texts, and options of generation",
            parameter="inputs",
            expected="one text, or a request without parameters",
        )
    task = facts.predictor.task
    answers = task.predicts_next and not task.streams
    return [{"role": "user", "content": value}] if answers else value


def _named_text(text: str) -> dict[str, Any]:
    """Return a text under the field names of generation, summarization and translation."""
    return {name: text for name in ("generated_text", "summary_text", "translation_text")}


def _details(whole: GeneratedText, chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "details": {
            "finish_reason": _reason(whole),
            "generated_tokens": whole.completion_tokens,
            "seed": chosen.get("seed"),
            "prefill": [],
            "tokens": [_token(each) for each in whole.tokens],
        }
    }


def _reason(whole: GeneratedText) -> str:
    return "length" if whole.finish_reason == "length" else "eos_token"


def _token(token: GeneratedToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": not token.text,
    }


async def _token_events(
    text: AsyncGeneration, before: str, seed: int | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield an event for each token; the last one also has the complete text."""
    index = 0
    last: dict[str, Any] = {"id": 0, "text": "", "logprob": 0.0, "special": True}

    def event(token: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "token": token, "generated_text": None, "details": None, **more}

    async for piece in text:
        tokens = [_token(each) for each in piece.tokens] or [last | {"text": piece.text}]
        for token in tokens:
            index += 1
            yield event(token)
    whole = await text.result()
    details = {
        "finish_reason": _reason(whole),
        "generated_tokens": whole.completion_tokens,
        "input_length": whole.prompt_tokens,
        "seed": seed,
    }
    index += 1
    yield event(last, generated_text=f"{before}{whole.text}", details=details)
