"""`POST /v1/predict`: the one path for every task; its answers are those of `predict --json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from adapterhub.serving.http.call import Call, Endpoint


class PredictRequest(BaseModel):
    """Inputs for an adapter, each as `adapterhub predict` takes it."""

    model_config = ConfigDict(extra="forbid")

    model: str
    inputs: list[Any]
    truncate: bool = False


class PredictResponse(BaseModel):
    """A prediction for each input, as `adapterhub predict --json` prints it."""

    model: str
    predictions: list[dict[str, Any]]
    truncated: list[int] = []


async def _predict(call: Call) -> dict[str, Any]:
    asked: PredictRequest = call.body
    found = await call.predict(asked.model, asked.inputs, truncate=asked.truncate)
    return {
        "model": found.reference,
        "predictions": found.answers,
        "truncated": list(found.truncated),
    }


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/predict",
        "Predict with an adapter of any task",
        PredictRequest,
        PredictResponse,
        _predict,
        tags=("predict",),
    ),
)
