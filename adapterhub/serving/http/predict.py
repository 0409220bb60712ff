"""`POST /v1/predict`: one path for every task, with the same results as `predict --json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from adapterhub.serving.http.request import AdapterFacts, Call, ClientRequest
from adapterhub.web.frame import Endpoint

_TEXTS = ("A train was late again.", "No one explained why, and it did not matter.", "It was full.")


class PredictRequest(ClientRequest):
    """Inputs for an adapter, each as `adapterhub predict` takes it."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="An adapter, name, name@3 or name@tag; or the backbone.")
    inputs: list[Any] = Field(
        description="Each is a text, a list of texts (a pair), a row with the columns of the "
        "training data, a list of messages, or the bytes of a file in base64."
    )
    truncate: bool = Field(
        False, description="Cut inputs that are too long, which are refused otherwise."
    )
    keep_empty: bool = Field(
        False,
        description='Answer inputs without a text by {"empty": true}; they are refused otherwise.',
    )


class PredictResponse(BaseModel):
    """A prediction for each input, as `adapterhub predict --json` prints it."""

    model: str = Field(description="The adapter with its version.")
    predictions: list[dict[str, Any]]
    truncated: list[int] = Field(description="The numbers of the inputs that were cut.")


async def _predict(call: Call) -> dict[str, Any]:
    request: PredictRequest = call.body
    inputs = [_as_tuple(each) for each in request.inputs]
    predicted = await call.predict(
        request.model, inputs, truncate=request.truncate, keep_empty=request.keep_empty
    )
    return {
        "model": predicted.facts.reference,
        "predictions": predicted.answers,
        "truncated": list(predicted.truncated),
    }


def _as_tuple(value: Any) -> Any:
    """Return the texts of one input as a tuple, which JSON lacks; a list contains messages."""
    is_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return tuple(value) if is_texts else value


def example_inputs(facts: AdapterFacts) -> list[Any]:
    """Return example inputs for an adapter."""
    if facts.decodes:
        return ["iVBORw0KGgo="]
    return [_TEXTS[0] if facts.texts == 1 else list(_TEXTS[: facts.texts or 3])]


def _example(facts: AdapterFacts) -> dict[str, Any]:
    return {"model": facts.model, "inputs": example_inputs(facts)}


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/predict",
        _predict,
        summary="Predict with an adapter of any task",
        request=PredictRequest,
        response=PredictResponse,
        tags=("predict",),
        example=_example,
    ),
)
