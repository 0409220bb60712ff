"""Requests of `InferenceClient`: inputs in several forms, and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from adapterhub.web.errors import RequestError

FOR_ALL = ("truncate", "truncation", "options", "user")
"""Parameters of all tasks; `options` controls queues and caches of the hosted service."""
_ROWS = (("question", "context"), ("text", "text_pair"))  # names of two texts in one input


class InferenceRequest(BaseModel):
    """Inputs of the form of the task, and its parameters."""

    model_config = ConfigDict(extra="allow")

    inputs: Any
    model: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    stream: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The parameters, including the ones for vectors, which are next to `inputs`."""
        return {**(self.model_extra or {}), **self.parameters}

    @property
    def truncates(self) -> bool:
        """Whether inputs that are too long are truncated."""
        values = (self.options.get("truncate"), self.options.get("truncation"))
        return any(each not in (None, False, "do_not_truncate") for each in values)


def inference_inputs(inputs: Any) -> tuple[list[Any], bool]:
    """Return inputs in the form of adapters, and whether the request has a single input.

    Raises:
        RequestError: the inputs have another form.
    """
    single = not isinstance(inputs, list)
    items = [inputs] if single else inputs
    if not items:
        raise RequestError("no input", parameter="inputs", expected="one or more")
    return [_input(each) for each in items], single


def _input(value: Any) -> str | tuple[str, str]:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        for names in _ROWS:
            texts = [value.get(name) for name in names]
            if all(isinstance(each, str) for each in texts):
                return str(texts[0]), str(texts[1])
    if isinstance(value, list) and len(value) == 2 and all(isinstance(t, str) for t in value):
        return str(value[0]), str(value[1])
    raise RequestError(
        f"an input of the type {type(value).__name__}",
        parameter="inputs",
        expected='a text, {"question": ..., "context": ...}, {"text": ..., "text_pair": ...}, '
        "or a list of these",
    )


def listed_at_most(options: Mapping[str, Any], name: str, highest: int | None = None) -> int | None:
    """Return the requested number of best results.

    Raises:
        RequestError: the value is not a valid number.
    """
    value = options.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (highest is not None and value > highest):
        most = f" up to {highest}" if highest else ""
        raise RequestError(
            f"{name} is {str(value)[:40]}", parameter=name, expected=f"a number from 1{most}"
        )
    return value
