"""Hugging Face Inference: `POST /models/{reference}`, as `InferenceClient` asks an endpoint.

The client sends `inputs` and `parameters` to one address, whatever the task: what the adapter
prints decides the form of the answer, and the form of `inputs` what is asked.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterhub.serving.http.call import AdapterFacts, Call, Endpoint
from adapterhub.serving.http.errors import RequestError
from adapterhub.serving.http.openai_generation import (
    ChatRequest,
    ChatResponse,
    answer_chat,
    chat_example,
)
from adapterhub.serving.http.shapes import (
    class_scores,
    gives_scores,
    gives_vectors,
    printed_names,
    refuse_unless,
    writes_texts,
    wrong_shape,
)
from adapterhub.serving.http.text_embeddings import EndpointInfo, endpoint_info
from adapterhub.serving.http.text_generation import (
    StartedText,
    event_stream,
    generation_options,
    start_texts,
    stop_texts,
)

if TYPE_CHECKING:
    from adapterhub.serving.generation import GeneratedText, GeneratedToken

_ENTAILS = "entail"  # how the name of the class begins that says yes in natural language inference
_TEMPLATE = "This example is {}."
_ROW_TYPES = {
    "question-answering": ("question", "context"),
    "text-pair": ("text", "text_pair"),
}


class InferenceRequest(BaseModel):
    """Inputs of the form of the task, and its parameters."""

    model_config = ConfigDict(extra="allow")

    inputs: Any
    parameters: dict[str, Any] = Field(default_factory=dict)
    stream: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The parameters; those of vectors are beside `inputs`."""
        return {**(self.model_extra or {}), **self.parameters}


async def _infer(call: Call) -> Any:
    asked: InferenceRequest = call.body
    model = call.path_params["reference"]
    facts = await call.facts(model)
    for fits, answer in _ANSWERS:
        if fits(facts, asked):
            return await answer(call, facts, asked)
    raise wrong_shape(call, facts)


# Inputs


def inference_inputs(given: Any) -> tuple[list[Any], bool]:
    """Return inputs as adapters read them, and whether what is given is one and no list.

    Raises:
        RequestError: they are of another form.
    """
    single = not isinstance(given, list)
    items = [given] if single else given
    if not items:
        raise RequestError("no input", parameter="inputs", expected="one or more")
    return [_input(each) for each in items], single


def _input(given: Any) -> str | tuple[str, str]:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        for names in _ROW_TYPES.values():
            texts = [given.get(name) for name in names]
            if all(isinstance(each, str) for each in texts):
                return str(texts[0]), str(texts[1])
    if isinstance(given, list) and len(given) == 2 and all(isinstance(t, str) for t in given):
        return str(given[0]), str(given[1])
    raise RequestError(
        f"an input of the type {type(given).__name__}",
        parameter="inputs",
        expected='a text, {"question": ..., "context": ...}, {"text": ..., "text_pair": ...}, '
        "or a list of these",
    )


async def _answers(
    call: Call, facts: AdapterFacts, asked: InferenceRequest
) -> tuple[list[dict[str, Any]], bool]:
    inputs, single = inference_inputs(asked.inputs)
    truncate = bool(asked.options.get("truncate") or asked.options.get("truncation"))
    return (await call.predict(facts.model, inputs, truncate=truncate)).answers, single


# Classes


async def _classes(
    call: Call, facts: AdapterFacts, asked: InferenceRequest
) -> list[list[dict[str, Any]]]:
    own = "sigmoid" if "labels" in printed_names(facts) else "softmax"
    if "value" in printed_names(facts):
        own = "none"
    refuse_unless(asked.options, {"function_to_apply": (own,)})
    most = _count(asked.options, "top_k")
    answers, _ = await _answers(call, facts, asked)
    return [
        [{"label": label, "score": score} for label, score in class_scores(each)[:most]]
        for each in answers
    ]


def _count(options: Mapping[str, Any], name: str, highest: int | None = None) -> int | None:
    """Return how many of the best answers are asked for.

    Raises:
        RequestError: it is no such number.
    """
    value = options.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (highest is not None and value > highest):
        most = f" up to {highest}" if highest else ""
        raise RequestError(
            f"{name} is {str(value)[:40]}", parameter=name, expected=f"a number from 1{most}"
        )
    return value


async def _zero_shot(
    call: Call, facts: AdapterFacts, asked: InferenceRequest
) -> list[Any] | list[dict[str, Any]]:
    """Answer with the probabilities of labels that the request names.

    They are the adapter's own, or hypotheses for an adapter that was trained to say whether one
    text follows from another (Yin et al. 2019, https://arxiv.org/abs/1909.00161).
    """
    labels, several = _candidates(asked.options), bool(asked.options.get("multi_label"))
    texts, single = inference_inputs(asked.inputs)
    own = set(labels) <= set(facts.labels or ())
    entailing = [n for n in facts.labels if n.lower().startswith(_ENTAILS)]
    if own and not (facts.texts == 2 and entailing):
        answers = (await call.predict(facts.model, texts)).answers
        scores = [[each["scores"][name] for name in labels] for each in answers]
        found = [each if several else _shares(each) for each in scores]
    elif facts.texts == 2 and entailing:
        found = await _entailed(call, facts, texts, labels, entailing[0], asked.options)
    else:
        raise RequestError(
            "labels that the adapter was not trained for",
            parameter="candidate_labels",
            expected=f"some of {', '.join(facts.labels[:20])}, or an adapter for pairs of "
            "texts with a class entailment",
        )
    ranked = [_ranked(labels, each) for each in found]
    return ranked[0] if single else ranked


def _candidates(options: Mapping[str, Any]) -> list[str]:
    labels = options.get("candidate_labels")
    if isinstance(labels, str):
        labels = [each.strip() for each in labels.split(",")]
    if not labels or not isinstance(labels, list) or not all(isinstance(n, str) for n in labels):
        raise RequestError(
            "no labels", parameter="candidate_labels", expected="a list of one text or more"
        )
    return labels


async def _entailed(
    call: Call,
    facts: AdapterFacts,
    texts: Sequence[Any],
    labels: list[str],
    entails: str,
    options: Mapping[str, Any],
) -> list[list[float]]:
    """Return how far each text entails the hypothesis of each label."""
    template = options.get("hypothesis_template") or _TEMPLATE
    if not isinstance(template, str) or "{}" not in template:
        raise RequestError(
            "a template without a place for the label",
            parameter="hypothesis_template",
            expected="a text with {}",
        )
    pairs = [(text, template.replace("{}", label)) for text in texts for label in labels]
    found = await call.predict(facts.model, pairs)
    scores = [_entailment(answer["scores"], entails) for answer in found.answers]
    rows = [scores[n : n + len(labels)] for n in range(0, len(scores), len(labels))]
    if options.get("multi_label") or len(labels) == 1:
        return [[against for _, against in row] for row in rows]
    return [_shares([alone for alone, _ in row]) for row in rows]


def _entailment(scores: Mapping[str, float], entails: str) -> tuple[float, float]:
    """Return the probability of entailment, and that against contradiction alone."""
    yes = scores[entails]
    against = [value for name, value in scores.items() if name.lower().startswith("contra")]
    no = against[0] if against else 1 - yes
    return yes, yes / max(yes + no, 1e-12)


def _shares(values: Sequence[float]) -> list[float]:
    total = max(sum(values), 1e-12)
    return [value / total for value in values]


def _ranked(labels: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    pairs = sorted(zip(labels, scores, strict=True), key=lambda each: -each[1])
    return [{"label": label, "score": score} for label, score in pairs]


# Spans


async def _entities(call: Call, facts: AdapterFacts, asked: InferenceRequest) -> list[Any]:
    groups = ("simple", "first", "average", "max")
    refuse_unless(asked.options, {"aggregation_strategy": groups})
    ignored = asked.options.get("ignore_labels") or []
    answers, single = await _answers(call, facts, asked)
    found = [
        [_entity(each) for each in answer["entities"] if each["kind"] not in ignored]
        for answer in answers
    ]
    return found[0] if single else found


def _entity(entity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "entity_group": entity["kind"],
        "score": entity.get("score"),
        "word": entity["text"],
        "start": entity["start"],
        "end": entity["end"],
    }


async def _answer_spans(
    call: Call, facts: AdapterFacts, asked: InferenceRequest
) -> list[Any] | dict[str, Any]:
    refuse_unless(asked.options, {"top_k": (1,)})
    answers, single = await _answers(call, facts, asked)
    found = [
        {name: each[name] for name in ("answer", "start", "end")}
        | {"score": _sigmoid(each["score"])}
        for each in answers
    ]
    return found[0] if single else found


def _sigmoid(margin: float) -> float:
    """Return the share of an answer whose logit is higher than that of no answer by a margin."""
    return (1 + math.tanh(margin / 2)) / 2


async def _fills(call: Call, facts: AdapterFacts, asked: InferenceRequest) -> list[Any]:
    refuse_unless(asked.options, {"targets": ([],)})
    answers, single = await _answers(call, facts, asked)
    most = _count(
        asked.options, "top_k", min((len(f) for a in answers for f in a["fills"]), default=1)
    )
    found = [_filled(each, facts, most) for each in answers]
    return found[0] if single else found


def _filled(answer: Mapping[str, Any], facts: AdapterFacts, most: int | None) -> list[Any]:
    """Return the best tokens for the mask of a text; of several masks, a list for each."""
    tokenizer = facts.tokenizer
    mask, text = str(tokenizer.mask_token), str(answer["text"])
    parts = text.split(mask)
    if len(parts) - 1 != len(answer["fills"]):  # the end of the text was cut
        parts = [*parts[: len(answer["fills"])], mask.join(parts[len(answer["fills"]) :])]
    found = []
    for number, fill in enumerate(answer["fills"]):
        before, after = mask.join(parts[: number + 1]), mask.join(parts[number + 1 :])
        found.append(
            [
                {
                    "score": score,
                    "token": _token_id(tokenizer, token),
                    "token_str": token,
                    "sequence": f"{before}{token}{after}",
                }
                for token, score in list(fill.items())[:most]
            ]
        )
    return found[0] if len(found) == 1 else found


def _token_id(tokenizer: Any, token: str) -> int | None:
    """Return the number of a token, which some tokenizers know with a space in front only."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (token, f" {token}")]
    return next((each[0] for each in ids if len(each) == 1), None)


# Vectors


async def _vectors(call: Call, facts: AdapterFacts, asked: InferenceRequest) -> list[Any]:
    refuse_unless(
        asked.options,
        {"normalize": (True,), "prompt_name": ("query",), "encoding_format": ("float",)},
    )
    answers, single = await _answers(call, facts, asked)
    vectors = [answer["vector"] for answer in answers]
    refuse_unless(asked.options, {"dimensions": (len(vectors[0]),)})
    return list(vectors[0]) if single else vectors


async def _similarities(call: Call, facts: AdapterFacts, asked: InferenceRequest) -> list[float]:
    source, others = asked.inputs["source_sentence"], asked.inputs.get("sentences")
    texts = [source, *(others if isinstance(others, list) else [])]
    if not isinstance(others, list) or not others or not all(isinstance(t, str) for t in texts):
        raise RequestError(
            "no sentences", parameter="sentences", expected="a list of one text or more"
        )
    found = await call.predict(facts.model, [(source, each) for each in others])
    return [float(each["similarity"]) for each in found.answers]


# Texts


async def _texts(
    call: Call, facts: AdapterFacts, asked: InferenceRequest
) -> list[dict[str, Any]] | Response:
    """Answer with texts, as `predict` writes them unless the request says how."""
    options = asked.options
    options = {**options, **(options.get("generate_parameters") or {})}
    refuse_unless(options, _NOT_GENERATED)
    inputs, _ = inference_inputs(asked.inputs)
    chosen = {name: options[name] for name in _GENERATES if options.get(name) is not None}
    before = [each if options.get("return_full_text") else "" for each in inputs]
    if not (chosen or asked.stream or options.get("details")):
        found = await call.predict(facts.model, inputs, truncate=bool(options.get("truncate")))
        return [
            _named_text(f"{b}{a['generated']}") for b, a in zip(before, found.answers, strict=True)
        ]
    prompts = [as_trained(each, facts) for each in inputs]
    texts = await start_texts(call, facts.model, prompts, _how(chosen, options))
    if asked.stream:
        return event_stream(call, _token_events(texts[:1], before[0], chosen.get("seed")))
    wholes = [await each.result() for each in texts]
    return [
        _named_text(f"{b}{whole.text}")
        | (_details(whole, chosen) if options.get("details") else {})
        for b, whole in zip(before, wholes, strict=True)
    ]


_GENERATES = (
    "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_sequences",
    "do_sample",
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
    "num_beams": (1,),
}


def _how(chosen: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the options of generation; as in the client, nothing is sampled unless asked for."""
    names = ("temperature", "top_p", "top_k")
    samples = chosen.get("do_sample") or any(chosen.get(name) for name in names)
    details = 0 if options.get("details") else None
    stops = chosen.get("stop", chosen.get("stop_sequences"))
    for name, kind in _KINDS.items():
        if name in chosen and not isinstance(chosen[name], kind):
            raise RequestError(
                f"{name} is a {type(chosen[name]).__name__}", parameter=name, expected="a number"
            )
    if stops is not None and not (
        isinstance(stops, str)
        or (isinstance(stops, list) and all(isinstance(s, str) for s in stops))
    ):
        raise RequestError("stop is no list of texts", parameter="stop", expected="a list of texts")
    return generation_options(
        {"max_tokens": "max_new_tokens"},
        max_tokens=chosen.get("max_new_tokens"),
        temperature=chosen.get("temperature", 1.0) if samples else 0.0,
        top_p=chosen.get("top_p"),
        top_k=chosen.get("top_k"),
        seed=chosen.get("seed"),
        stop=stop_texts(stops),
        logprobs=details,
    )


_KINDS: dict[str, Any] = {
    "max_new_tokens": int,
    "temperature": int | float,
    "top_p": int | float,
    "top_k": int,
    "seed": int,
}


def as_trained(given: Any, facts: AdapterFacts) -> Any:
    """Return a prompt as the adapter reads inputs: a message where it was trained on answers."""
    task = facts.predictor.task
    if isinstance(given, str) and task.predicts_next and not task.streams:
        return [{"role": "user", "content": given}]
    return given


def _named_text(text: str) -> dict[str, Any]:
    """Return a text by the names that clients read: of generation, summaries and translations."""
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
    texts: list[StartedText], before: str, seed: int | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield an event for each token; the last one has the whole text as well."""
    index = 0
    last: dict[str, Any] = {"id": 0, "text": "", "logprob": 0.0, "special": True}

    def event(token: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "token": token, "generated_text": None, "details": None, **more}

    async for piece in texts[0].pieces():
        tokens = [_token(each) for each in piece.tokens] or [last | {"text": piece.text}]
        for token in tokens:
            index += 1
            yield event(token)
    whole = await texts[0].result()
    details = {
        "finish_reason": _reason(whole),
        "generated_tokens": whole.completion_tokens,
        "input_length": whole.prompt_tokens,
        "seed": seed,
    }
    index += 1
    yield event(last, generated_text=f"{before}{whole.text}", details=details)


async def _chat(call: Call) -> ChatResponse | Response:
    asked: ChatRequest = call.body
    return await answer_chat(call, asked, call.path_params["reference"])


async def _info(call: Call) -> EndpointInfo:
    return endpoint_info(call, await call.facts(call.path_params["reference"]))


async def _health(call: Call) -> Response:
    await call.facts(call.path_params["reference"])
    return Response(status_code=200 if call.is_ready else 503)


def _example(facts: AdapterFacts) -> dict[str, Any] | None:
    if facts.decodes:
        return None
    first, second = "The train leaves at nine.", "When does it leave?"
    if {"answer", "start"} <= printed_names(facts):
        return {"inputs": {"question": second, "context": first}}
    mask = f"The train leaves at {facts.tokenizer.mask_token}."
    text = mask if "fills" in printed_names(facts) else first
    pair = {"text": first, "text_pair": second}
    return {"inputs": pair if facts.texts == 2 else text}


def _chat_example(facts: AdapterFacts) -> dict[str, Any] | None:
    return chat_example(facts) if writes_texts(facts) else None


def _asks_similarity(facts: AdapterFacts, asked: InferenceRequest) -> bool:
    is_compared = isinstance(asked.inputs, Mapping) and "source_sentence" in asked.inputs
    return gives_vectors(facts) and is_compared


_ANSWERS: tuple[
    tuple[Callable[[AdapterFacts, InferenceRequest], bool], Callable[..., Any]], ...
] = (
    (lambda f, a: gives_scores(f) and "candidate_labels" in a.options, _zero_shot),
    (lambda f, a: gives_scores(f), _classes),
    (lambda f, a: "entities" in printed_names(f), _entities),
    (lambda f, a: {"answer", "score"} <= printed_names(f), _answer_spans),
    (lambda f, a: "fills" in printed_names(f), _fills),
    (_asks_similarity, _similarities),
    (lambda f, a: gives_vectors(f), _vectors),
    (lambda f, a: writes_texts(f), _texts),
)

_TAGS = ("Hugging Face",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/models/{reference:path}/v1/chat/completions",
        "Write the next message of a chat",
        ChatRequest,
        ChatResponse,
        _chat,
        tags=_TAGS,
        example=_chat_example,
    ),
    Endpoint(
        "GET",
        "/models/{reference:path}/info",
        "Describe an adapter",
        None,
        EndpointInfo,
        _info,
        tags=_TAGS,
    ),
    Endpoint(
        "GET",
        "/models/{reference:path}/health",
        "Load an adapter",
        None,
        None,
        _health,
        tags=_TAGS,
    ),
    Endpoint(
        "POST",
        "/models/{reference:path}",
        "Ask an adapter, in the form of its task",
        InferenceRequest,
        None,
        _infer,
        tags=_TAGS,
        example=_example,
    ),
)
