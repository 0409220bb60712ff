"""The Open Inference Protocol, version 2, over HTTP as in KServe and Triton.

Texts are tensors of the type BYTES, either in JSON or in the binary extension. A binary body starts
with JSON, whose length is in a header. The elements of each tensor follow, each with a length
prefix. Predictions are returned as tensors where they have that form, and as JSON in the output
`prediction`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from adapterhub import __version__
from adapterhub.serving.http.common import Items
from adapterhub.serving.http.request import AdapterFacts, Call, refuse_unless
from adapterhub.web.errors import RequestError
from adapterhub.web.frame import Endpoint

_HEAD_LENGTH = "inference-header-content-length"
_BINARY = "binary_data_size"
_PREDICTION = "prediction"
_TYPES = {"FP32": "<f4", "INT64": "<i8"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
    "priority": (0,),
    "timeout": (0,),
    "content_type": ("str", "hf"),
}
"""Unsupported request parameters, with the values that change nothing."""
_LENGTH = 4  # bytes of the length before an element


@dataclass(frozen=True)
class FieldTensor:
    """Tensor of a prediction field: its type, and whether it has a second axis."""

    datatype: str
    many: bool = False


FIELD_TENSORS = {
    "label": FieldTensor("BYTES"),
    "scores": FieldTensor("FP32", many=True),
    "value": FieldTensor("FP32"),
    "vector": FieldTensor("FP32", many=True),
    "similarity": FieldTensor("FP32"),
    "generated": FieldTensor("BYTES"),
    "filled": FieldTensor("BYTES"),
    "answer": FieldTensor("BYTES"),
    "start": FieldTensor("INT64"),
    "end": FieldTensor("INT64"),
    "score": FieldTensor("FP32"),
    "choice": FieldTensor("INT64"),
    "chosen": FieldTensor("BYTES"),
}
"""Fields with the same form for all inputs; other fields are only in `prediction`."""


class TensorFacts(BaseModel):
    """The name, type and shape of a tensor; -1 is any size."""

    name: str
    datatype: str
    shape: Items[int]


class InputTensor(TensorFacts):
    """A tensor of a request; its data is here, or behind the JSON."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class WantedOutput(BaseModel):
    """A requested output."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(BaseModel):
    """The inputs, and the requested outputs; by default all."""

    id: str | None = None
    inputs: Items[InputTensor] = Field(min_length=1)
    outputs: Items[WantedOutput] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class OutputTensor(TensorFacts):
    """A tensor of an answer."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any]


class InferResponse(BaseModel):
    """The outputs."""

    id: str | None = None
    model_name: str
    model_version: str
    outputs: list[OutputTensor]


class ModelMetadata(BaseModel):
    """The inputs and outputs of an adapter."""

    name: str
    versions: list[str]
    platform: str = "adapterhub"
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]


class ServerMetadata(BaseModel):
    """The server."""

    name: str = "adapterhub"
    version: str = __version__
    extensions: list[str] = ["binary_tensor_data"]


# Reading a request


def read_infer(call: Call) -> InferRequest:
    """Read a request: JSON and, in the binary extension, the tensors after it.

    Raises:
        RequestError: lengths and shapes do not match.
        ValidationError: the request has another form.
    """
    body = call.raw_body
    if call.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(
            "a compressed body", parameter="content-encoding", expected="an uncompressed one"
        )
    length = call.headers.get(_HEAD_LENGTH)
    if length is None:
        return InferRequest.model_validate_json(body)
    if not length.isascii() or not length.isdecimal() or not 0 < int(length[:12]) <= len(body):
        raise RequestError(
            f"{_HEAD_LENGTH} is {length[:40]}",
            parameter=_HEAD_LENGTH,
            expected="the bytes of the JSON in front",
        )
    head = InferRequest.model_validate_json(body[: int(length)])
    rest = memoryview(body)[int(length) :]
    for each in head.inputs:
        size = each.parameters.get(_BINARY)
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(rest):
                raise _bad_tensor(each, f"{_BINARY} is {str(size)[:40]}, of {len(rest)} bytes")
            each.data = list(_elements(each, rest[:size]))
            rest = rest[size:]
    if len(rest):
        raise RequestError(
            f"{len(rest)} bytes behind the tensors", parameter="inputs", expected="none"
        )
    return head


def _elements(tensor: InputTensor, data: memoryview) -> Iterator[str]:
    """Yield the texts of a binary tensor."""
    while len(data):
        size = int.from_bytes(data[:_LENGTH], "little")
        if len(data) < _LENGTH + size:
            raise _bad_tensor(tensor, "its data ends within an element")
        try:
            yield bytes(data[_LENGTH : _LENGTH + size]).decode("utf-8")
        except UnicodeDecodeError:
            raise _bad_tensor(tensor, "a text that is not UTF-8") from None
        data = data[_LENGTH + size :]


def _bad_tensor(tensor: TensorFacts, problem: str) -> RequestError:
    return RequestError(
        f"the input {tensor.name[:40]!r}: {problem}",
        parameter="inputs",
        expected="tensors of the type BYTES and the shape [n], or [n, texts] for several texts",
    )


def texts_of_tensors(tensors: Sequence[InputTensor]) -> list[str | tuple[str, ...]]:
    """Return the inputs of an adapter from one tensor, or from a tensor for each text of an input.

    Raises:
        RequestError: shapes and data do not match.
    """
    columns = [column for tensor in tensors for column in _columns(tensor)]
    if len({len(each) for each in columns}) != 1:
        raise _bad_tensor(tensors[0], "tensors of different lengths")
    if len(columns) == 1:
        return list(columns[0])
    return list(zip(*columns, strict=True))


def _columns(tensor: InputTensor) -> list[list[str]]:
    """Return the first texts of all inputs, then the second texts, and so on."""
    shape, data = tensor.shape, _flat(tensor.data or [])
    if tensor.datatype != "BYTES" or not all(isinstance(each, str) for each in data):
        raise _bad_tensor(tensor, f"the type {tensor.datatype[:20]}, or data that is not text")
    width = shape[1] if len(shape) == 2 else 1
    if len(shape) not in (1, 2) or width < 1 or shape[0] < 1 or shape[0] * width != len(data):
        raise _bad_tensor(tensor, f"the shape {shape[:8]}, and {len(data)} texts")
    return [data[n::width] for n in range(width)]


def _flat(data: list[Any]) -> list[Any]:
    """Flatten nested lists; the protocol allows nested and flat data."""
    if any(isinstance(each, list) for each in data):
        data = [item for each in data for item in (each if isinstance(each, list) else [each])]
    return data


# Writing a response


def output_tensors(answers: Sequence[Mapping[str, Any]]) -> list[OutputTensor]:
    """Return predictions as tensors."""
    tensors = [
        _tensor(name, [each[name] for each in answers], facts)
        for name, facts in FIELD_TENSORS.items()
        if all(name in each for each in answers)
    ]
    whole = [json.dumps(each, ensure_ascii=False) for each in answers]
    last = OutputTensor(name=_PREDICTION, datatype="BYTES", shape=[len(whole)], data=whole)
    return [*filter(None, tensors), last]


def _tensor(name: str, values: list[Any], facts: FieldTensor) -> OutputTensor | None:
    """Return a tensor; None if its rows have different lengths."""
    shape = [len(values)]
    if facts.many:
        rows = [list(v.values()) if isinstance(v, Mapping) else list(v) for v in values]
        if len({len(row) for row in rows}) != 1:
            return None
        shape, values = [len(rows), len(rows[0])], [value for row in rows for value in row]
    return OutputTensor(name=name, datatype=facts.datatype, shape=shape, data=values)


def chosen_outputs(
    tensors: Sequence[OutputTensor], requested: Sequence[WantedOutput] | None
) -> list[OutputTensor]:
    """Return the requested outputs, in the requested order.

    Raises:
        RequestError: an output does not exist.
    """
    if requested is None:
        return list(tensors)
    by_name = {each.name: each for each in tensors}
    if missing := [each.name for each in requested if each.name not in by_name]:
        raise RequestError(
            f"no output {missing[0][:40]!r}", parameter="outputs", expected=", ".join(by_name)
        )
    return [by_name[each.name] for each in requested]


def _rendered(request: InferRequest, answer: InferResponse) -> dict[str, Any] | Response:
    """Return a response as JSON, or in the binary extension if a tensor is requested in it."""
    every = request.parameters.get("binary_data_output") is True
    binary = {
        each.name: each.parameters.get("binary_data", every) for each in request.outputs or ()
    }
    parts = []
    head = answer.model_dump(exclude_none=True)
    for output in head["outputs"]:
        if binary.get(output["name"], every) is True:
            data = _bytes_of(output["datatype"], output.pop("data"))
            output["parameters"] = {_BINARY: len(data)}
            parts.append(data)
    if not parts:
        return head
    text = json.dumps(head).encode()
    return Response(
        b"".join((text, *parts)),
        headers={_HEAD_LENGTH: str(len(text))},
        media_type="application/octet-stream",
    )


def _bytes_of(datatype: str, data: list[Any]) -> bytes:
    if datatype == "BYTES":
        texts = [each.encode() for each in data]
        return b"".join(len(each).to_bytes(_LENGTH, "little") + each for each in texts)
    import numpy as np

    return np.asarray(data, dtype=_TYPES[datatype]).tobytes()


# Endpoints


def _model_of(call: Call) -> str:
    """Return the adapter in a path; its name and version form the reference."""
    name, version = call.values["name"], call.values.get("version")
    return f"{name}@{version}" if version else name


def _refuse_ignored(request: InferRequest) -> None:
    """Reject parameters that would be ignored.

    Raises:
        RequestError: the request has such parameters.
    """
    refuse_unless(request.parameters, _NEUTRAL, acts=("binary_data_output",))
    for tensor in request.inputs:
        refuse_unless(tensor.parameters, {}, acts=(_BINARY, "content_type"))
    for output in request.outputs or ():
        refuse_unless(output.parameters, {"classification": (0,)}, acts=("binary_data",))


async def _infer(call: Call) -> dict[str, Any] | Response:
    request: InferRequest = call.body
    _refuse_ignored(request)
    predicted = await call.predict(_model_of(call), texts_of_tensors(request.inputs))
    outputs = chosen_outputs(output_tensors(predicted.answers), request.outputs)
    answer = InferResponse(
        id=request.id,
        model_name=call.values["name"],
        model_version=_version_of(predicted.facts.reference),
        outputs=outputs,
    )
    return _rendered(request, answer)


def _version_of(reference: str) -> str:
    name, _, version = reference.rpartition("@")
    return version if name else ""


def _inputs_of(facts: AdapterFacts) -> list[TensorFacts]:
    second = facts.predictor.task.pair_name or "pair"
    names = ["text", second] if facts.texts == 2 else ["text"]
    shape = [-1] if facts.texts else [-1, -1]  # one text, or several
    return [TensorFacts(name=name, datatype="BYTES", shape=shape) for name in names]


async def _metadata(call: Call) -> ModelMetadata:
    facts = await call.facts(_model_of(call))
    kinds = {**FIELD_TENSORS, _PREDICTION: FieldTensor("BYTES")}
    outputs = [
        TensorFacts(name=n, datatype=kinds[n].datatype, shape=[-1, -1] if kinds[n].many else [-1])
        for n in (*facts.predictor.task.printed_fields, _PREDICTION)
        if n in kinds
    ]
    version = _version_of(facts.reference)
    return ModelMetadata(
        name=call.values["name"],
        versions=[version] if version else [],
        inputs=_inputs_of(facts),
        outputs=outputs,
    )


async def _model_ready(call: Call) -> dict[str, Any]:
    await call.facts(_model_of(call))
    return {"name": call.values["name"], "ready": True}


async def _config(call: Call) -> dict[str, Any]:
    described = await _metadata(call)
    inputs, outputs = (
        [{"name": e.name, "data_type": _TRITON_TYPES[e.datatype], "dims": e.shape} for e in tensors]
        for tensors in (described.inputs, described.outputs)
    )
    model = {"name": described.name, "platform": described.platform, "backend": "adapterhub"}
    return {**model, "max_batch_size": 0, "input": inputs, "output": outputs}


async def _stats(call: Call) -> dict[str, Any]:
    facts = [await call.facts(_model_of(call))] if call.values else call.loaded()
    return {"model_stats": [_counted(call, each) for each in facts]}


def _counted(call: Call, facts: AdapterFacts) -> dict[str, Any]:
    """Return the statistics of an adapter in Triton's format, as far as they are counted."""
    requests, errors, inputs, seconds = call.service.metrics.answered(facts.reference)
    success = {"count": requests - errors, "ns": round(1e9 * seconds)}
    return {
        "name": facts.model,
        "version": _version_of(facts.reference),
        "inference_count": inputs,
        "execution_count": requests,
        "inference_stats": {"success": success, "fail": {"count": errors, "ns": 0}},
    }


async def _repository(call: Call) -> Response:
    loaded = {each.model: each for each in call.loaded()}
    rows = [
        {"name": name, "version": _version_of(loaded[name].reference), "state": "READY"}
        if name in loaded
        else {"name": name, "state": "UNAVAILABLE", "reason": "it is loaded at its first request"}
        for name in dict.fromkeys((*call.adapters(), *loaded))
    ]
    return JSONResponse(rows)


async def _live(call: Call) -> Response:
    return JSONResponse({"live": call.service.is_alive}, 200 if call.service.is_alive else 503)


async def _ready(call: Call) -> Response:
    return JSONResponse({"ready": call.is_ready}, 200 if call.is_ready else 503)


def _example(facts: AdapterFacts) -> dict[str, Any] | None:
    if facts.decodes:
        return None
    texts = ["A train was late again.", "Why?", "No one can tell."]
    tensors = _inputs_of(facts)
    shape = [1] if facts.texts else [1, len(texts)]
    tensor = {"datatype": "BYTES", "shape": shape, "data": texts[: shape[-1]]}
    return {"inputs": [{"name": each.name, **tensor} for each in tensors]}


async def _server(call: Call) -> ServerMetadata:
    return ServerMetadata()


_TAGS = ("Open Inference Protocol",)
_TRITON_TYPES = {"BYTES": "TYPE_STRING"} | {kind: f"TYPE_{kind}" for kind in _TYPES}
_VERSIONS = ("/v2/models/{name:path}/versions/{version}", "/v2/models/{name:path}")
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        "/v2",
        _server,
        "",
        summary="Describe the server",
        response=ServerMetadata,
        tags=_TAGS,
    ),
    *(
        Endpoint(
            "GET",
            f"/v2/health/{name}",
            answer,
            "",
            summary=summary,
            tags=_TAGS,
            while_starting=True,
        )
        for name, summary, answer in (
            ("live", "Check that the server computes", _live),
            ("ready", "Check that requests are answered", _ready),
        )
    ),
    *(
        Endpoint(
            "POST",
            f"{path}/infer",
            _infer,
            summary="Predict with an adapter on tensors",
            request=InferRequest,
            response=InferResponse,
            tags=_TAGS,
            example=None if "{version}" in path else _example,
            read=read_infer,
        )
        for path in _VERSIONS
    ),
    *(
        Endpoint("GET", f"{path}/ready", _model_ready, summary="Load an adapter", tags=_TAGS)
        for path in _VERSIONS
    ),
    Endpoint(
        "POST", "/v2/repository/index", _repository, summary="List adapters for Triton", tags=_TAGS
    ),
    Endpoint("GET", "/v2/models/stats", _stats, summary="Count of all", tags=_TAGS),
    *(
        Endpoint("GET", f"{path}/{name}", answer, summary=summary, tags=_TAGS)
        for path in _VERSIONS
        for name, summary, answer in (
            ("config", "Describe an adapter for Triton", _config),
            ("stats", "Count the requests to an adapter", _stats),
        )
    ),
    *(
        Endpoint(
            "GET",
            path,
            _metadata,
            summary="Describe an adapter",
            response=ModelMetadata,
            tags=_TAGS,
        )
        for path in _VERSIONS
    ),
)
