"""OpenAI's `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from adapterhub.serving.http.common import (
    AdapterRequest,
    ModelUsage,
    TextsOrTokens,
    check_dimensions,
    fitting_example,
    fitting_facts,
    gives_vectors,
    listed_inputs,
    now,
    usage_of,
)
from adapterhub.serving.http.request import AdapterFacts, Call
from adapterhub.web.frame import Endpoint

_STARTED = now()


class EmbeddingsRequest(AdapterRequest):
    """Texts, or the tokens of each."""

    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class EmbeddingItem(BaseModel):
    """The vector of one input: numbers, or 32-bit floats in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """The vectors of all inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: ModelUsage
    truncated: list[int] = []


class ListedModel(BaseModel):
    """An adapter, or the backbone, which has no parent."""

    id: str
    object: Literal["model"] = "model"
    created: int = _STARTED
    owned_by: str = "adapterhub"
    root: str
    parent: str | None = None


class ListedModels(BaseModel):
    """A model that requests can name."""

    object: Literal["list"] = "list"
    data: list[ListedModel]


async def _embeddings(call: Call) -> EmbeddingsResponse:
    request: EmbeddingsRequest = call.body
    facts = await fitting_facts(call, request.model, gives_vectors)
    texts = await listed_inputs(call, request.input, facts, "input")
    predicted = await call.predict(request.model, texts, truncate=request.truncate)
    vectors = [answer["vector"] for answer in predicted.answers]
    check_dimensions(request.dimensions, vectors)
    as_text = request.encoding_format == "base64"
    data = [
        EmbeddingItem(index=n, embedding=in_base64(each) if as_text else each)
        for n, each in enumerate(vectors)
    ]
    return EmbeddingsResponse(
        data=data,
        model=predicted.facts.reference,
        usage=usage_of(predicted.tokens),
        truncated=list(predicted.truncated),
    )


def in_base64(vector: Sequence[float]) -> str:
    """Return a vector as little-endian 32-bit floats in base64."""
    import numpy as np

    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


def _listed(call: Call, name: str, reference: str) -> ListedModel:
    parent = call.service.backbone if call.service.backbone not in ("", name) else None
    return ListedModel(id=name, root=reference, parent=parent)


async def _models(call: Call) -> ListedModels:
    return ListedModels(data=[_listed(call, name, name) for name in sorted(call.adapters())])


async def _model(call: Call) -> ListedModel:
    facts = await call.facts(call.values["model"])
    return _listed(call, facts.model, facts.reference)


def _example(facts: AdapterFacts) -> dict[str, Any]:
    return {"model": facts.model, "input": ["A train was late again."]}


_TAGS = ("OpenAI",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        _embeddings,
        summary="Return the vectors of texts",
        request=EmbeddingsRequest,
        response=EmbeddingsResponse,
        tags=_TAGS,
        example=fitting_example(gives_vectors, _example),
    ),
    Endpoint(
        "GET",
        "/v1/models",
        _models,
        summary="List the adapters that requests can name",
        response=ListedModels,
        tags=_TAGS,
    ),
    Endpoint(
        "GET",
        "/v1/models/{model:path}",
        _model,
        summary="Return which version an adapter's name means",
        response=ListedModel,
        tags=_TAGS,
    ),
)
