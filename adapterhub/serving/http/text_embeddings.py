"""The API of text-embeddings-inference: `/embed`, `/predict`, `/info` and `/health`.

Its clients assume a single model and do not name it. The field `model` or the header `x-adapter`
may name an adapter; otherwise the only one that fits is used. `/rerank` is in `scoring.py`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, RootModel
from starlette.responses import Response

from adapterhub import __version__
from adapterhub.serving.http.common import (
    Items,
    TextsOrTokens,
    check_dimensions,
    chosen_facts,
    fitting_example,
    gives_numbers,
    gives_scores,
    gives_vectors,
    listed_inputs,
    ranked_classes,
)
from adapterhub.serving.http.request import AdapterFacts, Call, ClientRequest
from adapterhub.web.errors import RequestError
from adapterhub.web.frame import Endpoint

_LENGTH_1 = 1e-3  # tolerance for the norm of unit vectors


class EmbedRequest(ClientRequest):
    """Texts, or the tokens of each."""

    model: str | None = None
    inputs: TextsOrTokens
    truncate: bool = False
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class PredictPairsRequest(ClientRequest):
    """A text, a pair of texts, or a list of lists of one or two texts."""

    model: str | None = None
    inputs: str | Items[str] | Items[Items[str]]
    truncate: bool = False
    raw_scores: bool = False


class EmbedResponse(RootModel[list[list[float]]]):
    """The vector of each text."""


class LabelScore(BaseModel):
    """A class, and its probability."""

    score: float
    label: str


class PredictPairsResponse(RootModel[list[LabelScore] | list[list[LabelScore]]]):
    """The classes of an input, the most probable one first; of a batch, a list for each."""


class EndpointInfo(BaseModel):
    """The loaded model, in the terms of text-embeddings-inference."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool = False
    version: str = __version__


async def _embed(call: Call) -> list[list[float]]:
    request: EmbedRequest = call.body
    facts = await chosen_facts(call, request.model, gives_vectors)
    _check_embed(request, facts)
    texts = await listed_inputs(call, request.inputs, facts, "inputs")
    predicted = await call.predict(facts.model, texts, truncate=request.truncate)
    vectors = [answer["vector"] for answer in predicted.answers]
    return _of_length(vectors, request)


def _check_embed(request: EmbedRequest, facts: AdapterFacts) -> None:
    """Reject options that would change the adapter's vectors."""
    own, prefixes = request.prompt_name, ("query_prefix", "passage_prefix")
    query, passage = (getattr(facts.predictor.task, name, "") for name in prefixes)
    if own not in (None, "query") and query != passage:
        raise RequestError(
            f"no prompt {own!r}", parameter="prompt_name", expected=f"query, which is {query!r}"
        )
    if request.truncate and request.truncation_direction.lower() == "left":
        raise RequestError(
            "texts are cut at their end", parameter="truncation_direction", expected="right"
        )


def _of_length(vectors: list[list[float]], request: EmbedRequest) -> list[list[float]]:
    """Return the adapter's vectors, normalized to length 1 if requested."""
    check_dimensions(request.dimensions, vectors)
    if request.normalize is None:
        return vectors
    sizes = [math.hypot(*each) for each in vectors]
    same = all(abs(size - 1) < _LENGTH_1 for size in sizes)
    if same and not request.normalize:
        raise RequestError(
            "the vectors of this adapter have length 1",
            parameter="normalize",
            expected="normalize: true, or a request without it",
        )
    if same or not request.normalize:
        return vectors
    pairs = zip(vectors, sizes, strict=True)
    return [[value / max(size, 1e-12) for value in each] for each, size in pairs]


async def _predict(call: Call) -> list[Any]:
    request: PredictPairsRequest = call.body
    if request.raw_scores:
        raise RequestError(
            "scores before the softmax", parameter="raw_scores", expected="raw_scores: false"
        )
    facts = await chosen_facts(call, request.model, gives_scores)
    value = request.inputs
    if not value:
        raise RequestError("no input", parameter="inputs", expected="one text or more")
    single = isinstance(value, str) or isinstance(value[0], str)
    items: list[Any] = [value] if single else list(value)
    inputs = [each if isinstance(each, str) else _one_or_two(each) for each in items]
    predicted = await call.predict(facts.model, inputs, truncate=request.truncate)
    answers = [
        [{"score": score, "label": label} for label, score in ranked_classes(each)]
        for each in predicted.answers
    ]
    return answers[0] if single else answers


def _one_or_two(texts: list[str]) -> str | tuple[str, str]:
    if len(texts) == 1:
        return texts[0]
    if len(texts) == 2:
        return texts[0], texts[1]
    raise RequestError(
        f"{len(texts)} texts in one input",
        parameter="inputs",
        expected="a text, a pair [text, text], or a batch [[text], [text]] or [[text, text]]",
    )


def endpoint_info(call: Call, facts: AdapterFacts) -> EndpointInfo:
    """Return information about an adapter for clients."""
    service = call.service
    labels = {str(n): label for n, label in enumerate(facts.labels)}
    ids = {label: int(n) for n, label in labels.items()}
    kind = "embedding" if gives_vectors(facts) else "classifier"
    known = gives_vectors(facts) or gives_scores(facts)
    return EndpointInfo(
        model_id=facts.reference,
        model_sha=facts.digest or None,
        model_dtype=str(facts.predictor.model.dtype).removeprefix("torch."),
        model_type={kind: {"id2label": labels, "label2id": ids} if labels else {}} if known else {},
        max_concurrent_requests=service.engine.queue_tokens,
        max_input_length=facts.max_length,
        max_batch_tokens=facts.served.model.limits.tokens,
        max_client_batch_size=service.limits.inputs,
    )


async def _info(call: Call) -> EndpointInfo:
    return endpoint_info(call, await chosen_facts(call, None, gives_numbers))


async def _health(call: Call) -> Response:
    return Response(status_code=200 if call.is_ready else 503)


def _embed_example(facts: AdapterFacts) -> dict[str, Any]:
    return {"model": facts.model, "inputs": "A train was late again."}


def _predict_example(facts: AdapterFacts) -> dict[str, Any]:
    texts = ["When does the train leave?", "It leaves at nine."]
    return {"model": facts.model, "inputs": [texts[: facts.texts or 1]]}


_TAGS = ("text-embeddings-inference",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/embed",
        _embed,
        summary="Return the vectors of texts",
        request=EmbedRequest,
        response=EmbedResponse,
        tags=_TAGS,
        example=fitting_example(gives_vectors, _embed_example),
    ),
    Endpoint(
        "POST",
        "/predict",
        _predict,
        summary="Return the classes of texts with their probabilities",
        request=PredictPairsRequest,
        response=PredictPairsResponse,
        tags=_TAGS,
        example=fitting_example(gives_scores, _predict_example),
    ),
    Endpoint(
        "GET", "/info", _info, summary="Describe the adapter", response=EndpointInfo, tags=_TAGS
    ),
    Endpoint(
        "GET",
        "/health",
        _health,
        "",
        summary="Check that requests are answered",
        tags=_TAGS,
        while_starting=True,
    ),
)
