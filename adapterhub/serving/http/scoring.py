"""Classification, scoring and reranking in the APIs of vLLM, Cohere, Jina and TEI.

`/rerank` accepts two forms, distinguished by the field of the texts: `documents` in the APIs of
Cohere, Jina and vLLM, `texts` in the API of text-embeddings-inference (TEI).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, RootModel

from adapterhub.serving.http.common import (
    AdapterRequest,
    Items,
    ModelAnswer,
    ModelUsage,
    Texts,
    TextsOrTokens,
    chosen_facts,
    compares_texts,
    comparison,
    fitting_example,
    fitting_facts,
    gives_classes,
    gives_numbers,
    listed_inputs,
    listed_texts,
    new_id,
    ranked_classes,
    usage_of,
)
from adapterhub.serving.http.openai_embeddings import in_base64
from adapterhub.serving.http.request import AdapterFacts, Call, ClientRequest, Predicted
from adapterhub.web.errors import RequestError
from adapterhub.web.frame import Endpoint

TextsOrPairs = TextsOrTokens | Items[Annotated[Items[str], Field(min_length=2, max_length=2)]]
_EXAMPLE = ("When does the train leave?", "It leaves at nine.")


class ClassifyRequest(AdapterRequest):
    """Texts, or pairs of texts for adapters that read two."""

    input: TextsOrPairs


class ClassifiedItem(BaseModel):
    """The most probable class of an input, and the probabilities in the order of the classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ScoringAnswer(ModelAnswer):
    """Fields common to responses to several inputs."""

    object: Literal["list"] = "list"
    truncated: list[int] = Field(default_factory=list)


class ClassifyResponse(ScoringAnswer):
    """The class of each input."""

    data: list[ClassifiedItem]


class ScoreRequest(AdapterRequest):
    """Pairs of texts: one with each of several, or the first with the first and so on."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


class ScoredItem(BaseModel):
    """The number for a pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(ScoringAnswer):
    """The number for each pair."""

    data: list[ScoredItem]


class PoolingRequest(AdapterRequest):
    """Texts, pairs of texts, or the tokens of each."""

    input: TextsOrPairs
    encoding_format: Literal["float", "base64"] = "float"


class PooledItem(BaseModel):
    """A vector, the probabilities of classes, or a number."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingResponse(ScoringAnswer):
    """The result of an adapter for each input."""

    data: list[PooledItem]


class RankedDocument(BaseModel):
    """A document that is ranked."""

    text: str


class RerankRequest(ClientRequest):
    """A query, and documents to rank by it; or `texts`, as text-embeddings-inference asks."""

    model: str | None = None
    truncate: bool = False
    query: str
    documents: Items[str | RankedDocument] | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    texts: Items[str] | None = None
    raw_scores: bool = False
    return_text: bool = False


class RankedItem(BaseModel):
    """A document's place in the request, and its relevance."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RankedText(BaseModel):
    """A text's place in the request, and its relevance, as text-embeddings-inference says it."""

    index: int
    score: float
    text: str | None = None


class RankedDocuments(BaseModel):
    """The documents, the most relevant one first."""

    id: str
    model: str
    results: list[RankedItem]
    usage: ModelUsage
    meta: dict[str, Any]


class RerankResponse(RootModel[RankedDocuments | list[RankedText]]):
    """The documents; or, of `texts`, a list as of text-embeddings-inference."""


def _answer_of(kind: str, predicted: Predicted) -> dict[str, Any]:
    return {
        "id": new_id(kind),
        "model": predicted.facts.reference,
        "usage": usage_of(predicted.tokens),
        "truncated": list(predicted.truncated),
    }


async def _classify(call: Call) -> ClassifyResponse:
    request: ClassifyRequest = call.body
    facts = await fitting_facts(call, request.model, gives_classes)
    inputs = await _inputs(call, request.input, facts)
    predicted = await call.predict(request.model, inputs, truncate=request.truncate)
    data = [
        _classified(n, each, predicted.facts.labels) for n, each in enumerate(predicted.answers)
    ]
    return ClassifyResponse(data=data, **_answer_of("classify", predicted))


async def _inputs(call: Call, value: Any, facts: AdapterFacts) -> list[Any]:
    """Return texts, pairs of texts, or the texts of tokens, as a list."""
    nested = isinstance(value, list) and value and isinstance(value[0], list) and value[0]
    if nested and isinstance(nested[0], str):
        return [tuple(each) for each in value]
    return list(await listed_inputs(call, value, facts, "input"))


def _classified(index: int, answer: Mapping[str, Any], labels: Sequence[str]) -> ClassifiedItem:
    probabilities = _probabilities(answer, labels)
    best, _ = ranked_classes(answer)[0]
    return ClassifiedItem(
        index=index, label=best, probs=probabilities, num_classes=len(probabilities)
    )


def _probabilities(answer: Mapping[str, Any], labels: Sequence[str]) -> list[float]:
    """Return the probabilities in the order of the head's classes, if the order is known."""
    scores = answer["scores"]
    return [scores[name] for name in (labels or scores)]


async def _score(call: Call) -> ScoreResponse:
    request: ScoreRequest = call.body
    await fitting_facts(call, request.model, compares_texts)
    first, second = listed_texts(request.text_1), listed_texts(request.text_2)
    pairs = _pairs(first, second)
    predicted = await call.predict(request.model, pairs, truncate=request.truncate)
    data = [ScoredItem(index=n, score=comparison(a)) for n, a in enumerate(predicted.answers)]
    return ScoreResponse(data=data, **_answer_of("score", predicted))


def _pairs(first: list[str], second: list[str]) -> list[tuple[str, str]]:
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not first:
        raise RequestError(
            f"{len(first)} texts to compare with {len(second)}",
            parameter="text_1",
            expected="one text and several, or two lists of one length",
        )
    return list(zip(first, second, strict=True))


async def _pooling(call: Call) -> PoolingResponse:
    request: PoolingRequest = call.body
    facts = await fitting_facts(call, request.model, gives_numbers)
    inputs = await _inputs(call, request.input, facts)
    predicted = await call.predict(request.model, inputs, truncate=request.truncate)
    as_text = request.encoding_format == "base64"
    numbers = [_pooled(each, predicted.facts.labels) for each in predicted.answers]
    data = [
        PooledItem(index=n, data=in_base64(each) if as_text else each)
        for n, each in enumerate(numbers)
    ]
    return PoolingResponse(data=data, **_answer_of("pool", predicted))


def _pooled(answer: Mapping[str, Any], labels: Sequence[str]) -> list[float]:
    if "vector" in answer:
        return list(answer["vector"])
    return _probabilities(answer, labels) if "scores" in answer else [answer["value"]]


async def _rerank(call: Call) -> RankedDocuments | list[dict[str, Any]]:
    request: RerankRequest = call.body
    if (request.texts is None) == (request.documents is None):
        raise RequestError(
            "no documents" if request.texts is None else "documents, and texts",
            parameter="documents",
            expected="documents (Cohere, Jina, vLLM) or texts (text-embeddings-inference)",
        )
    if request.documents is None:
        return await _rank_texts(call, request, request.texts or [])
    documents = [d if isinstance(d, str) else d.text for d in request.documents]
    predicted, ranks = await _ranked(call, request, documents)
    returned = request.return_documents
    if returned is None:  # the default of each API; version 2 of Cohere's lacks the field
        returned = not call.endpoint.path.startswith("/v2")
    results = [
        RankedItem(
            index=n,
            relevance_score=value,
            document=RankedDocument(text=documents[n]) if returned else None,
        )
        for n, value in ranks[: request.top_n]
    ]
    return RankedDocuments(
        id=new_id("rerank"),
        model=predicted.facts.reference,
        results=results,
        usage=usage_of(predicted.tokens),
        meta={"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    )


async def _rank_texts(call: Call, request: RerankRequest, texts: list[str]) -> list[dict[str, Any]]:
    """Rank texts, with a response in the format of text-embeddings-inference."""
    if request.raw_scores:
        raise RequestError(
            "scores before the sigmoid", parameter="raw_scores", expected="raw_scores: false"
        )
    _, ranks = await _ranked(call, request, texts)
    return [
        {"index": n, "score": value} | ({"text": texts[n]} if request.return_text else {})
        for n, value in ranks
    ]


async def _ranked(
    call: Call, request: RerankRequest, texts: list[str]
) -> tuple[Predicted, list[tuple[int, float]]]:
    """Return the indices of the texts with their relevance, the most relevant first."""
    if not texts:
        raise RequestError("nothing to rank", parameter="documents", expected="one text or more")
    facts = await chosen_facts(call, request.model, compares_texts)
    pairs = [(request.query, each) for each in texts]
    predicted = await call.predict(facts.model, pairs, truncate=request.truncate)
    values = list(enumerate(map(comparison, predicted.answers)))
    return predicted, sorted(values, key=lambda each: -each[1])


def _classify_example(facts: AdapterFacts) -> dict[str, Any]:
    text: Any = list(_EXAMPLE) if facts.texts == 2 else _EXAMPLE[0]
    return {"model": facts.model, "input": [text]}


def _score_example(facts: AdapterFacts) -> dict[str, Any]:
    return {"model": facts.model, "text_1": _EXAMPLE[0], "text_2": [_EXAMPLE[1]]}


def _rerank_example(facts: AdapterFacts) -> dict[str, Any]:
    return {"model": facts.model, "query": _EXAMPLE[0], "documents": list(_EXAMPLE)}


_VLLM = ("vLLM",)
_RERANK = ("Cohere, Jina, vLLM",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/classify",
        _classify,
        summary="Return the class of texts, with all probabilities",
        request=ClassifyRequest,
        response=ClassifyResponse,
        tags=_VLLM,
        example=fitting_example(gives_classes, _classify_example),
    ),
    Endpoint(
        "POST",
        "/score",
        _score,
        summary="Return a number for each pair of texts",
        request=ScoreRequest,
        response=ScoreResponse,
        tags=_VLLM,
        example=fitting_example(compares_texts, _score_example),
    ),
    Endpoint(
        "POST",
        "/pooling",
        _pooling,
        summary="Return the vector, the probabilities or the number of texts",
        request=PoolingRequest,
        response=PoolingResponse,
        tags=_VLLM,
        example=fitting_example(gives_numbers, _classify_example),
    ),
    *(
        Endpoint(
            "POST",
            path,
            _rerank,
            summary=summary,
            request=RerankRequest,
            response=RerankResponse,
            tags=_RERANK,
            example=fitting_example(compares_texts, _rerank_example),
        )
        for path, summary in (
            ("/v1/rerank", "Rank documents by a query"),
            ("/v2/rerank", "Rank documents by a query, without returning them"),
            ("/rerank", "Rank documents (or `texts`, of text-embeddings-inference) by a query"),
        )
    ),
)
