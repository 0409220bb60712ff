"""OpenAPI description and documentation page, generated from the endpoints and their types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticUndefined

from adapterhub._version import __version__
from adapterhub.pages.page import framed_page
from adapterhub.serving.http.request import AdapterFacts
from adapterhub.web.errors import LIKE_OPENAI, STATUSES, HubRefusal, NoPathError
from adapterhub.web.frame import Endpoint

_SCHEMAS = "#/components/schemas/"
_MOST_EXAMPLES = 20  # per path


class ErrorFacts(BaseModel):
    """The body of an error in OpenAI's form."""

    message: str = Field(description="a message for people")
    type: str = Field(description="invalid_request_error or server_error")
    param: str | None = Field(None, description="the field that it is about")
    code: str = Field(description="a word for programs")


class OpenAIError(BaseModel):
    """An error of a path of OpenAI, or of vLLM."""

    error: ErrorFacts


class PlainError(BaseModel):
    """An error of any other path."""

    error: str = Field(description="a message for people")
    error_type: str = Field(description="a word of text-embeddings-inference's clients")
    code: str = Field(description="a word for programs")


def error_model(path: str) -> type[BaseModel]:
    """Return the model of a path's errors."""
    return OpenAIError if path.startswith(LIKE_OPENAI) else PlainError


def openapi(
    endpoints: Iterable[Endpoint], adapters: Sequence[AdapterFacts] = (), *, has_tokens: bool
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of endpoints.

    Args:
        endpoints: the endpoints.
        adapters: the adapters used in examples.
        has_tokens: whether requests need a token.
    """
    known = list(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for each in known:
        operation = _operation(each, adapters, has_tokens=has_tokens)
        paths.setdefault(each.shown, {})[each.methods.lower()] = operation
    types = {
        model
        for each in known
        for model in (each.request, each.response, error_model(each.path))
        if model is not None
    }
    ordered = sorted(types, key=lambda each: each.__name__)
    _, definitions = models_json_schema(
        [(each, "validation") for each in ordered], ref_template=f"{_SCHEMAS}{{model}}"
    )
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    if has_tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "adapterhub serve", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(
    endpoint: Endpoint, adapters: Sequence[AdapterFacts], *, has_tokens: bool
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": list(endpoint.tags),
        "operationId": re.sub(r"\W+", "_", f"{endpoint.methods}{endpoint.path}".lower()).strip("_"),
        "responses": {
            "200": {"description": "The answer.", **_content(endpoint.response)},
            **{
                str(code): {"description": description, **_content(error_model(endpoint.path))}
                for code, description in _errors().items()
            },
        },
    }
    examples = example_bodies(endpoint, adapters)
    if names := endpoint.parts:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
        if examples and len(names) == 1:  # the adapter
            choices = {model: {"value": model} for model in examples}
            operation["parameters"][0]["examples"] = choices
    if endpoint.request is not None:
        body = _content(endpoint.request)
        if examples:
            body["content"]["application/json"]["examples"] = {
                name: {"value": value} for name, value in examples.items()
            }
        operation["requestBody"] = {"required": True, **body}
    if has_tokens and endpoint.role:
        operation["security"] = [{"token": []}]
    return operation


def _content(model: type[BaseModel] | None) -> dict[str, Any]:
    if model is None:
        return {}
    return {"content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{model.__name__}"}}}}


def _errors() -> dict[int, str]:
    """Return the names of errors by status code, sorted by code."""
    names: dict[int, list[str]] = {422: ["malformed"]}
    for kind, status in STATUSES.items():
        if issubclass(kind, HubRefusal | NoPathError):  # of no endpoint here
            continue
        listed = names.setdefault(status.code, [])
        if status.name not in listed:
            listed.append(status.name)
    return {code: ", ".join(names[code]) for code in sorted(names)}


def example_bodies(endpoint: Endpoint, adapters: Sequence[AdapterFacts]) -> dict[str, Any]:
    """Return an example body for each adapter that fits a path, by the adapter's name."""
    if endpoint.example is None:
        return {}
    made = ((facts.model, endpoint.example(facts)) for facts in adapters[:_MOST_EXAMPLES])
    return {model: body for model, body in made if body is not None}


def documentation(
    endpoints: Iterable[Endpoint],
    adapters: Sequence[AdapterFacts],
    address: str,
    *,
    has_tokens: bool,
) -> str:
    """Return the HTML page that describes all paths, without external assets."""
    chapters: dict[str, list[dict[str, Any]]] = {}
    for each in endpoints:
        entry = {
            "method": each.methods,
            "path": each.shown,
            "summary": f"{each.summary}.",
            "role": each.role if has_tokens else "",
            "fields": _fields(each.request),
            "command": _command(each, adapters, address, has_tokens=has_tokens),
        }
        chapters.setdefault((each.tags or ("other",))[0], []).append(entry)
    return framed_page(
        "api.html",
        ("copy.js",),
        name="adapterhub serve",
        subtitle=f"version {__version__}; /openapi.json has the same for programs",
        chapters=list(chapters.items()),
        facts=(),
    )


def _fields(model: type[BaseModel] | None) -> list[tuple[str, str]]:
    """Return the fields of a body with their descriptions, or whether they are required."""
    if model is None:
        return []
    return [(name, field.description or _need(field)) for name, field in model.model_fields.items()]


def _need(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    has_default = field.default not in (None, PydanticUndefined)
    return f"optional; {json.dumps(field.default, default=str)}" if has_default else "optional"


def _command(
    endpoint: Endpoint, adapters: Sequence[AdapterFacts], address: str, *, has_tokens: bool
) -> str:
    """Return a curl command for the first example of a path; "" if it has no example."""
    examples: Mapping[str, Any] = example_bodies(endpoint, adapters)
    if not examples:
        return ""
    model, example = next(iter(examples.items()))
    body = json.dumps(example, ensure_ascii=False).replace("'", "'\\''")
    path = re.sub(r"\{\w+\}", quote(model), endpoint.shown)
    token = '    -H "Authorization: Bearer $TOKEN" \\\n' if has_tokens else ""
    return (
        f"curl {address}{path} \\\n{token}"
        f"    -H 'content-type: application/json' \\\n    -d '{body}'"
    )
