"""Hugging Face Inference: `POST /models/{reference}`, the endpoint of `InferenceClient`.

The client sends `inputs` and `parameters` to one address for every task. The form of the response
depends on the adapter's predictions, and the task on the form of `inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import RootModel
from starlette.responses import Response

from adapterhub.serving.http.common import (
    generates_texts,
    gives_classes,
    gives_scores,
    gives_vectors,
    printed_names,
    ranked_classes,
    wrong_shape,
)
from adapterhub.serving.http.hugging_face_inputs import (
    FOR_ALL,
    InferenceRequest,
    inference_inputs,
    listed_at_most,
)
from adapterhub.serving.http.hugging_face_texts import generated_texts
from adapterhub.serving.http.openai_generation import (
    ChatRequest,
    ChatResponse,
    answer_chat,
    chat_example,
)
from adapterhub.serving.http.request import AdapterFacts, Call, refuse_unless
from adapterhub.serving.http.text_embeddings import EndpointInfo, endpoint_info
from adapterhub.tasks.masked_lm import LISTED_FILLS
from adapterhub.web.errors import RequestError
from adapterhub.web.frame import Endpoint

_ENTAILS = "entail"  # prefix of the label for entailment in natural language inference
_TEMPLATE = "This example is {}."


class InferenceResponse(RootModel[Any]):
    """The task, as clients read it."""


async def _infer(call: Call) -> Any:
    request: InferenceRequest = call.body
    model = call.values["reference"]
    facts = await call.facts(model)
    for fits, answer in _ANSWERS:
        if fits(facts, request):
            return await answer(call, facts, request)
    raise wrong_shape(call, facts)


async def _answers(
    call: Call, facts: AdapterFacts, request: InferenceRequest
) -> tuple[list[dict[str, Any]], bool]:
    inputs, single = inference_inputs(request.inputs)
    return (await call.predict(facts.model, inputs, truncate=request.truncates)).answers, single


# Classes


async def _classes(
    call: Call, facts: AdapterFacts, request: InferenceRequest
) -> list[list[dict[str, Any]]]:
    own = "sigmoid" if "labels" in printed_names(facts) else "softmax"
    if "value" in printed_names(facts):
        own = "none"
    refuse_unless(request.options, {"function_to_apply": (own,)}, acts=("top_k", *FOR_ALL))
    most = listed_at_most(request.options, "top_k")
    answers, _ = await _answers(call, facts, request)
    return [
        [{"label": label, "score": score} for label, score in ranked_classes(each)[:most]]
        for each in answers
    ]


async def _zero_shot(
    call: Call, facts: AdapterFacts, request: InferenceRequest
) -> list[Any] | list[dict[str, Any]]:
    """Return the probabilities of the labels in a request.

    The labels are the adapter's own, or become hypotheses for an adapter trained on textual
    entailment (Yin et al. 2019, https://arxiv.org/abs/1909.00161).
    """
    options = ("candidate_labels", "multi_label", "hypothesis_template", *FOR_ALL)
    refuse_unless(request.options, {}, acts=options)
    labels = _candidates(request.options)
    texts, single = inference_inputs(request.inputs)
    if not all(isinstance(each, str) for each in texts):
        raise RequestError("a pair of texts", parameter="inputs", expected="a text, or several")
    entails = next((n for n in facts.labels if n.lower().startswith(_ENTAILS)), None)
    if facts.texts == 2 and entails is not None:
        scores = await _entailed(call, facts, texts, labels, entails, request.options)
    else:
        scores = await _own_labels(call, facts, texts, labels, request.options)
    ranked = [_ranked(labels, each) for each in scores]
    return ranked[0] if single else ranked


async def _own_labels(
    call: Call,
    facts: AdapterFacts,
    texts: Sequence[Any],
    labels: list[str],
    options: Mapping[str, Any],
) -> list[list[float]]:
    """Return the probabilities of labels that the adapter was trained on."""
    answers = (await call.predict(facts.model, texts)).answers if gives_classes(facts) else []
    own = answers[0]["scores"] if answers else {}
    if unknown := [each for each in labels if each not in own]:
        raise RequestError(
            f"{facts.reference} was not trained for the label {unknown[0][:40]!r}",
            parameter="candidate_labels",
            expected=", ".join(list(own)[:20]) or "an adapter with labels",
            hint="an adapter for pairs of texts with a class entailment takes any labels",
        )
    scores = [[each["scores"][name] for name in labels] for each in answers]
    return scores if options.get("multi_label") else [_shares(each) for each in scores]


def _candidates(options: Mapping[str, Any]) -> list[str]:
    labels = options.get("candidate_labels")
    if isinstance(labels, str):
        labels = [each.strip() for each in labels.split(",")]
    if not labels or not isinstance(labels, list) or not all(isinstance(n, str) for n in labels):
        raise RequestError(
            "no labels", parameter="candidate_labels", expected="a list of at least one text"
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
    """Return entailment scores of each text for the hypotheses of the labels."""
    template = options.get("hypothesis_template") or _TEMPLATE
    if not isinstance(template, str) or "{}" not in template:
        raise RequestError(
            "a template without a place for the label",
            parameter="hypothesis_template",
            expected="a text with {}",
        )
    pairs = [(text, template.replace("{}", label)) for text in texts for label in labels]
    predicted = await call.predict(facts.model, pairs)
    scores = [_entailment(answer["scores"], entails) for answer in predicted.answers]
    rows = [scores[n : n + len(labels)] for n in range(0, len(scores), len(labels))]
    if options.get("multi_label") or len(labels) == 1:
        return [[against for _, against in row] for row in rows]
    return [_shares([alone for alone, _ in row]) for row in rows]


def _entailment(scores: Mapping[str, float], entails: str) -> tuple[float, float]:
    """Return the probability of entailment among all classes, and against contradiction only."""
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


async def _entities(call: Call, facts: AdapterFacts, request: InferenceRequest) -> list[Any]:
    groups = ("simple", "first", "average", "max")
    options = ("ignore_labels", *FOR_ALL)
    refuse_unless(request.options, {"aggregation_strategy": groups, "stride": (0,)}, acts=options)
    ignored = request.options.get("ignore_labels") or []
    if not isinstance(ignored, list):
        raise RequestError(
            "ignore_labels is not a list", parameter="ignore_labels", expected="a list of texts"
        )
    answers, single = await _answers(call, facts, request)
    entities = [
        [_entity(each) for each in answer["entities"] if each["kind"] not in ignored]
        for answer in answers
    ]
    return entities[0] if single else entities


def _entity(entity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "entity_group": entity["kind"],
        "score": entity["score"],
        "word": entity["text"],
        "start": entity["start"],
        "end": entity["end"],
    }


_OF_SPANS: dict[str, tuple[Any, ...]] = {
    "top_k": (1,),
    "align_to_words": (False,),
    "handle_impossible_answer": (False,),
}


async def _answer_spans(
    call: Call, facts: AdapterFacts, request: InferenceRequest
) -> list[Any] | dict[str, Any]:
    refuse_unless(request.options, _OF_SPANS, acts=FOR_ALL)
    answers, single = await _answers(call, facts, request)
    spans = [
        {name: each[name] for name in ("answer", "start", "end")}
        | {"score": _sigmoid(each["score"])}
        for each in answers
    ]
    return spans[0] if single else spans


def _sigmoid(margin: float) -> float:
    """Return the probability of an answer whose logit exceeds the no-answer logit by a margin."""
    return (1 + math.tanh(margin / 2)) / 2


async def _fills(call: Call, facts: AdapterFacts, request: InferenceRequest) -> list[Any]:
    refuse_unless(request.options, {"targets": ([],)}, acts=("top_k", *FOR_ALL))
    most = listed_at_most(request.options, "top_k", LISTED_FILLS)
    answers, single = await _answers(call, facts, request)

    def filled() -> list[Any]:
        with facts.served.model.encoding:
            return [_filled(each, facts, most) for each in answers]

    fills = await call.with_tokenizer(facts, filled)
    return fills[0] if single else fills


def _filled(answer: Mapping[str, Any], facts: AdapterFacts, most: int | None) -> list[Any]:
    """Return the best tokens for the mask of a text; for several masks, one list per mask."""
    tokenizer = facts.tokenizer
    mask, text = str(tokenizer.mask_token), str(answer["text"])
    parts = text.split(mask)
    if len(parts) - 1 != len(answer["fills"]):  # the end of the text was truncated
        parts = [*parts[: len(answer["fills"])], mask.join(parts[len(answer["fills"]) :])]
    fills = []
    for number, fill in enumerate(answer["fills"]):
        before, after = mask.join(parts[: number + 1]), mask.join(parts[number + 1 :])
        fills.append(
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
    return fills[0] if len(fills) == 1 else fills


def _token_id(tokenizer: Any, token: str) -> int | None:
    """Return the id of a token; some tokenizers have it only with a leading space."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (token, f" {token}")]
    return next((each[0] for each in ids if len(each) == 1), None)


# Vectors


async def _vectors(call: Call, facts: AdapterFacts, request: InferenceRequest) -> list[Any]:
    refuse_unless(
        request.options,
        {
            "normalize": (True,),
            "prompt_name": ("query",),
            "encoding_format": ("float",),
            "truncation_direction": ("right", "Right"),
        },
        acts=("dimensions", *FOR_ALL),
    )
    answers, single = await _answers(call, facts, request)
    vectors = [answer["vector"] for answer in answers]
    refuse_unless(request.options, {"dimensions": (len(vectors[0]),)})
    return list(vectors[0]) if single else vectors


async def _similarities(call: Call, facts: AdapterFacts, request: InferenceRequest) -> list[float]:
    source, others = request.inputs["source_sentence"], request.inputs.get("sentences")
    refuse_unless(request.options, {}, acts=FOR_ALL)
    texts = [source, *(others if isinstance(others, list) else [])]
    if not isinstance(others, list) or not others or not all(isinstance(t, str) for t in texts):
        raise RequestError(
            "no sentences", parameter="sentences", expected="a list of at least one text"
        )
    predicted = await call.predict(facts.model, [(source, each) for each in others])
    return [float(each["similarity"]) for each in predicted.answers]


# Chats and facts about adapters


async def _chat(call: Call) -> ChatResponse | Response:
    request: ChatRequest = call.body
    return await answer_chat(call, request, call.values["reference"])


async def _info(call: Call) -> EndpointInfo:
    return endpoint_info(call, await call.facts(call.values["reference"]))


async def _health(call: Call) -> Response:
    await call.facts(call.values["reference"])
    return Response(status_code=200 if call.is_ready else 503)


def _example(facts: AdapterFacts) -> dict[str, Any] | None:
    if not any(fits(facts, InferenceRequest(inputs="")) for fits, _ in _ANSWERS):
        return None
    first, second = "The train leaves at nine.", "When does it leave?"
    if {"answer", "start"} <= printed_names(facts):
        return {"inputs": {"question": second, "context": first}}
    mask = f"The train leaves at {facts.tokenizer.mask_token}."
    text = mask if "fills" in printed_names(facts) else first
    pair = {"text": first, "text_pair": second}
    return {"inputs": pair if facts.texts == 2 else text}


def _chat_example(facts: AdapterFacts) -> dict[str, Any] | None:
    return chat_example(facts) if generates_texts(facts) else None


def _asks_similarity(facts: AdapterFacts, request: InferenceRequest) -> bool:
    is_compared = isinstance(request.inputs, Mapping) and "source_sentence" in request.inputs
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
    (lambda f, a: generates_texts(f), generated_texts),
)

_TAGS = ("Hugging Face",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/models/{reference:path}/v1/chat/completions",
        _chat,
        summary="Write the next message of a chat",
        request=ChatRequest,
        response=ChatResponse,
        tags=_TAGS,
        example=_chat_example,
    ),
    Endpoint(
        "GET",
        "/models/{reference:path}/info",
        _info,
        summary="Describe an adapter",
        response=EndpointInfo,
        tags=_TAGS,
    ),
    Endpoint(
        "GET", "/models/{reference:path}/health", _health, summary="Load an adapter", tags=_TAGS
    ),
    Endpoint(
        "POST",
        "/models/{reference:path}",
        _infer,
        summary="Ask an adapter, in the form of its task",
        request=InferenceRequest,
        response=InferenceResponse,
        tags=_TAGS,
        example=_example,
    ),
)
