"""`serve --try`: a page that compares the results of two adapters for the same text.

Its script sends requests to the public API: `/v1/predict`, or a stream from the OpenAI endpoints
for adapters that generate texts. A server with tokens shows nothing until a token is entered. The
page keeps the token only in its input field.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from adapterhub.pages.page import framed_page
from adapterhub.serving.http.common import generates_texts
from adapterhub.serving.http.request import AdapterFacts, Call
from adapterhub.web.frame import Endpoint, page_response

_TEXT = "A train was late again, and no one explained why."
_GENERATORS = ("ForCausalLM", "ForConditionalGeneration")  # classes of generative checkpoints
_PREDICT, _CHAT, _WRITE = "/v1/predict", "/v1/chat/completions", "/v1/completions"


async def _page(call: Call) -> Response:
    service, backbone = call.service, call.service.backbone
    page = framed_page(
        "try.html",
        ("copy.js", "try.js"),
        name="adapterhub serve",
        subtitle=f"Ask two adapters{f' of {backbone}' if backbone else ''} the same text.",
        has_tokens=service.tokens is not None,
        text=_TEXT,
        connects=True,
        facts=(),
    )
    return page_response(page)


async def _adapters(call: Call) -> dict[str, Any]:
    """Return the page's data for one adapter or all; only loaded adapters have a task."""
    if model := call.request.query_params.get("model"):
        return {"adapters": [_shown(await call.facts(model))]}
    loaded = {facts.model: _shown(facts) for facts in call.loaded()}
    names = sorted(call.adapters(), key=lambda name: name == call.service.backbone)  # it is last
    return {"adapters": [loaded.get(name, {"model": name}) for name in names]}


def _shown(facts: AdapterFacts) -> dict[str, Any]:
    path = _PREDICT
    if generates_texts(facts) or _may_generate(facts):
        path = _CHAT if getattr(facts.tokenizer, "chat_template", None) else _WRITE
    return {"model": facts.model, "task": facts.task, "texts": facts.texts, "path": path}


def _may_generate(facts: AdapterFacts) -> bool:
    """Return whether an adapter is the backbone alone and the backbone generates texts."""
    names = facts.predictor.model.config.architectures or ()
    return facts.source is None and any(name.endswith(_GENERATORS) for name in names)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET", "/", _page, "", summary="A page to try adapters", tags=("try",), while_starting=True
    ),
    Endpoint(
        "GET",
        "/try/adapters",
        _adapters,
        "predict",
        summary="The contents of that page",
        tags=("try",),
    ),
)
