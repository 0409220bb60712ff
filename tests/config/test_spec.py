"""The call syntax of specs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.config.spec import MAX_CHARACTERS, parse_calls
from adapterhub.errors import ConfigError


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    return parse_calls(text, "method", "lora, lora(rank=16)")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("lora", [("lora", {})]),
        ("lora()", [("lora", {})]),
        ("lora(rank=16, alpha=-0.5)", [("lora", {"rank": 16, "alpha": -0.5})]),
        ("lora(alpha=1e-3)", [("lora", {"alpha": 1e-3})]),
        ("lora, causal-lm(data=text)", [("lora", {}), ("causal-lm", {"data": "text"})]),
        ("a(b=true, c=false, d=null)", [("a", {"b": True, "c": False, "d": None})]),
        ("a(b='x, y', c=[1, 'z'])", [("a", {"b": "x, y", "c": [1, "z"]})]),
        ("a(b=int8-weight)", [("a", {"b": "int8-weight"})]),
        ("a(b='x-y')", [("a", {"b": "x-y"})]),
        ("a(b={'c': 1})", [("a", {"b": {"c": 1}})]),
    ],
)
def test_calls_are_parsed(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lora(",
        "lora(16)",
        "lora(rank=)",
        "lora(rank=1+x)",
        "lora(rank=f())",
        "lora(rank=__import__('os').name)",
        "a.b(c=1)",
        "1",
        "a) + (b",
        "a" * (MAX_CHARACTERS + 1),
        "a(b=" + "[" * 1000 + "]" * 1000 + ")",
        "a\0",
    ],
)
def test_other_text_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid method spec") as caught:
        parse(text)
    assert caught.value.expected == "lora, lora(rank=16)"
    assert len(str(caught.value)) < 400


@given(st.text("ab=(),-[]{}'\"1.: \n"))
def test_any_text_is_parsed_or_is_a_config_error(text: str) -> None:
    try:
        calls = parse(text)
    except ConfigError:
        return
    assert all(isinstance(name, str) and isinstance(options, dict) for name, options in calls)
