"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for training programs.

The field `lora_path` is the reference of an adapter that the client may request, never a path on
the server. The adapter is pulled and verified, as in any other request.
"""

from __future__ import annotations

from pydantic import Field
from starlette.responses import PlainTextResponse

from adapterhub.serving.http.request import Call, ClientRequest
from adapterhub.web.errors import RequestError
from adapterhub.web.frame import Endpoint


class LoadLoraRequest(ClientRequest):
    """A name for clients, and the reference that it means: `lora_path`, as vLLM calls it."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=1000)
    load_inplace: bool = False


class UnloadLoraRequest(ClientRequest):
    """The name that is served no more."""

    lora_name: str


async def _load(call: Call) -> PlainTextResponse:
    request: LoadLoraRequest = call.body
    if request.lora_name in call.service.allowed.aliases and not request.load_inplace:
        raise RequestError(
            f"{request.lora_name!r} is served already",
            parameter="lora_name",
            expected="another name, or load_inplace: true",
        )
    await call.load_alias(request.lora_name, request.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def _unload(call: Call) -> PlainTextResponse:
    request: UnloadLoraRequest = call.body
    await call.unload_alias(request.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


_TAGS = ("vLLM",)
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        _load,
        "admin",
        summary="Serve an adapter by a name",
        request=LoadLoraRequest,
        tags=_TAGS,
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        _unload,
        "admin",
        summary="Serve a name no more",
        request=UnloadLoraRequest,
        tags=_TAGS,
    ),
)
