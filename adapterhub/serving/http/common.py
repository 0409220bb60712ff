"""Code shared by the client APIs: the adapters that fit each, and formats of inputs and responses.

An adapter fits an API by its printed fields (`Task.printed_fields`) and its number of input texts,
not by the name of its task. A new task is served through every API that can represent its results.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, FailFast, Field

from adapterhub.errors import AdapterhubError, BackboneError
from adapterhub.serving.adapter_cache import BareBackbone
from adapterhub.serving.http.request import AdapterFacts, Call, ClientRequest
from adapterhub.tasks.common.language_models import written_text
from adapterhub.web.errors import RequestError, WrongShapeError

T = TypeVar("T")


class _OnlyFirst(FailFast):
    """Report only the first invalid item; hashable, as types in unions must be."""

    __hash__ = object.__hash__


Items = Annotated[list[T], _OnlyFirst()]
"""List that reports only its first invalid item: reporting thousands would take seconds."""
Texts = str | Items[str]
TextsOrTokens = str | Items[str] | Items[int] | Items[Items[int]]
"""Texts, each as a string or as tokens of the backbone."""
_TRIED = 32  # adapters searched for the only one that fits


def now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


class AdapterRequest(ClientRequest):
    """Fields of every request.

    Attributes:
        model: the adapter.
        truncate: truncate inputs that are too long and report it; otherwise they are refused.
    """

    model: str
    truncate: bool = False


class ModelUsage(BaseModel):
    """The tokens that were computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class ModelAnswer(BaseModel):
    """Fields common to all responses of a model."""

    id: str
    created: int = Field(default_factory=now)
    model: str
    usage: ModelUsage


# Fitting adapters


def printed_names(facts: AdapterFacts) -> frozenset[str]:
    """Return the names of the fields that an adapter prints; empty if its inputs are files."""
    return frozenset(() if facts.decodes else facts.predictor.task.printed_fields)


def gives_vectors(facts: AdapterFacts) -> bool:
    """Return whether an adapter computes a vector for each text."""
    return "vector" in printed_names(facts)


def gives_classes(facts: AdapterFacts) -> bool:
    """Return whether an adapter computes the probability of each class."""
    names = printed_names(facts)
    return "scores" in names and not names.isdisjoint({"label", "labels"})


def gives_scores(facts: AdapterFacts) -> bool:
    """Return whether an adapter computes classes or a number."""
    return gives_classes(facts) or "value" in printed_names(facts)


def compares_texts(facts: AdapterFacts) -> bool:
    """Return whether an adapter computes a number for two texts: relevance or similarity."""
    names = printed_names(facts)
    return "similarity" in names or ("value" in names and facts.texts == 2)


def gives_numbers(facts: AdapterFacts) -> bool:
    """Return whether an adapter computes a vector, classes or a number."""
    return gives_vectors(facts) or gives_scores(facts)


def generates_texts(facts: AdapterFacts) -> bool:
    """Return whether an adapter generates texts."""
    return "generated" in printed_names(facts)


Fits = Callable[[AdapterFacts], bool]
Example = Callable[[AdapterFacts], dict[str, Any] | None]


def fitting_example(fits: Fits, example: Callable[[AdapterFacts], dict[str, Any]]) -> Example:
    """Return a function that returns an example for adapters that fit, and None for others."""
    return lambda facts: example(facts) if fits(facts) else None


async def fitting_facts(call: Call, model: str, fits: Fits) -> AdapterFacts:
    """Return the facts of an adapter that fits.

    Raises:
        WrongShapeError: the adapter does not fit.
        AdapterhubError: the adapter cannot be used.
    """
    facts = await call.facts(model)
    if not fits(facts):
        raise wrong_shape(call, facts)
    return facts


async def generating_facts(call: Call, model: str) -> AdapterFacts:
    """Return the facts of an adapter, or the backbone, that generates texts.

    Raises:
        WrongShapeError: it does not generate texts.
        AdapterhubError: it cannot be used.
    """
    try:
        facts = await call.facts(model, bare=BareBackbone.TEXTS)
    except BackboneError:
        if model != call.service.backbone:
            raise
        facts = await call.facts(model)
    if not generates_texts(facts):
        raise wrong_shape(call, facts)
    return facts


def wrong_shape(call: Call, facts: AdapterFacts) -> WrongShapeError:
    """Return the error for an adapter that does not fit; it names the paths that fit."""
    endpoints = call.service.endpoints
    paths = [e.shown for e in endpoints if e.example and e.example(facts) is not None]
    return WrongShapeError(
        f"{facts.reference} is for {facts.task}, for which {call.request.url.path} has no answer",
        expected=" or ".join(dict.fromkeys(paths)),
        hint="POST /v1/predict, which answers for every task",
    )


# Responses


def ranked_classes(answer: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the classes with their probabilities, the most probable first.

    A number becomes one class, with the name that transformers uses.
    """
    scores = answer["scores"] if "scores" in answer else {"LABEL_0": answer["value"]}
    return sorted(scores.items(), key=lambda each: -each[1])


def comparison(answer: Mapping[str, Any]) -> float:
    """Return the number for two texts."""
    return float(answer["similarity"] if "similarity" in answer else answer["value"])


def new_id(kind: str) -> str:
    """Return a new id for a response."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage_of(prompt: int, generated: int = 0) -> ModelUsage:
    """Return the token counts of inputs and generated texts."""
    return ModelUsage(
        prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated
    )


def check_dimensions(dimensions: int | None, vectors: Sequence[Sequence[float]]) -> None:
    """Reject another vector length, because adapters are not trained for truncated vectors.

    Raises:
        RequestError: another length is requested.
    """
    if dimensions is not None and dimensions != (length := len(vectors[0])):
        raise RequestError(
            f"vectors of {dimensions} numbers; the adapter has not learned shorter ones",
            parameter="dimensions",
            expected=f"{length}, or a request without dimensions",
        )


# Inputs


def listed_texts(texts: Texts) -> list[str]:
    """Return one or more texts as a list."""
    return [texts] if isinstance(texts, str) else texts


async def listed_inputs(
    call: Call, inputs: TextsOrTokens, facts: AdapterFacts, parameter: str
) -> list[str]:
    """Return texts, decoded from tokens if necessary, as a list.

    Raises:
        RequestError: there are no texts, or the tokens are not tokens of the backbone.
    """
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise RequestError("no input", parameter=parameter, expected="one text or more")
    items: list[Any] = [inputs] if isinstance(inputs[0], int) else list(inputs)
    if all(isinstance(each, str) for each in items):
        return items

    def read() -> list[str]:
        with facts.served.model.encoding:
            return [_text_of(each, facts, parameter) for each in items]

    return await call.with_tokenizer(facts, read)


def _text_of(value: Any, facts: AdapterFacts, parameter: str) -> str:
    """Return the text of tokens; reject tokens that the text would not be encoded to."""
    tokenizer = facts.tokenizer
    if all(0 <= each < len(tokenizer) for each in value):
        text = written_text(tokenizer, value)
        around = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        own = [each for each in value if each not in around]
        if own and tokenizer(text, add_special_tokens=False)["input_ids"] == own:
            return text
    raise RequestError(
        "the input has tokens that the backbone does not have",
        parameter=parameter,
        expected="texts, or tokens of the backbone's own tokenizer",
        hint="texts; in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)",
    )


# Choice of the adapter


async def chosen_facts(call: Call, named: str | None, fits: Fits) -> AdapterFacts:
    """Return the adapter for a request that need not name one: by default the only one that fits.

    The body or the header `x-adapter` may name it.

    Raises:
        RequestError: no adapter is named, and not exactly one fits.
        WrongShapeError: the named adapter does not fit.
    """
    named = named or call.headers.get("x-adapter")
    names = call.adapters()
    if named or len(names) == 1:
        return await fitting_facts(call, named or names[0], fits)
    tried = names if len(names) <= _TRIED else []  # each of them is loaded
    every = [await _facts_if_fitting(call, each, fits) for each in tried]
    fitting = [each for each in every if each is not None]
    adapters = [each for each in fitting if each.source is not None]
    chosen = adapters or fitting  # an adapter rather than the backbone alone
    if len(chosen) == 1:
        return chosen[0]
    examples = [each.model for each in chosen] or names[:_TRIED]
    raise RequestError(
        "no adapter is named, and not exactly one fits this path",
        parameter="model",
        expected=f"one of {', '.join(examples)}",
        hint="its name in the field model of the body, or in the header x-adapter",
    )


async def _facts_if_fitting(call: Call, name: str, fits: Fits) -> AdapterFacts | None:
    try:
        facts = await call.facts(name)
    except AdapterhubError:
        return None
    return facts if fits(facts) else None
