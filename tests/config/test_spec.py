"""The call syntax of specs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.config.yaml import MAX_CHARACTERS, call_text, parse_calls
from adapterhub.errors import ConfigError
from tests.kit.selection import ALL

few = settings(max_examples=100 if ALL else 40)


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    return parse_calls(text, "method", "lora, lora(rank=16)")


def test_calls_are_parsed(subtests):
    cases = [
        ("lora", [("lora", {})]),
        ("lora(rank=16, alpha=-0.5)", [("lora", {"rank": 16, "alpha": -0.5})]),
        ("lora, causal-lm(data=text)", [("lora", {}), ("causal-lm", {"data": "text"})]),
        ("a(b=true, c=false, d=null)", [("a", {"b": True, "c": False, "d": None})]),
        ("a(b='x, y', c=[1, 'z'])", [("a", {"b": "x, y", "c": [1, "z"]})]),
        ("a(b=int8-weight)", [("a", {"b": "int8-weight"})]),
        (
            "lora(sites=[attn.q, encoder.0.attn.v], rank=8)",
            [("lora", {"sites": ["attn.q", "encoder.0.attn.v"], "rank": 8})],
        ),
        ("lora(ranks={attn.q: 4, attn.v: 8})", [("lora", {"ranks": {"attn.q": 4, "attn.v": 8}})]),
        (
            "a(layers=top 4), b(layers=0..3)",
            [("a", {"layers": "top 4"}), ("b", {"layers": "0..3"})],
        ),
        ("a(b=[true, null, 1e-3, x])", [("a", {"b": [True, None, 1e-3, "x"]})]),
        ("a(b='(x', c=\"]\"), d", [("a", {"b": "(x", "c": "]"}), ("d", {})]),
        ("a(b='it\\'s, x'),", [("a", {"b": "it's, x"})]),
        ("a(b=[]), c(d={})", [("a", {"b": []}), ("c", {"d": {}})]),
        ("a(\n  b=1,\n)", [("a", {"b": 1})]),
    ]
    for text, calls in cases:
        with subtests.test(text=text):
            assert parse(text) == calls


def test_other_text_is_refused_with_examples(subtests):
    cases = [
        "",
        "lora(",
        "lora(rank=)",
        "lora(rank=1+x)",
        "lora(rank=__import__('os').name)",
        "a.b(c=1)",
        "a) + (b",
        "a(b=1, b=2)",
        "a(b=[1)]",
        "a(b=[x, x: 1, {])",
        "a(b='x)",
        "a,, b",
        "a(b=x y=z)",
        "a b",
        "a" * (MAX_CHARACTERS + 1),
        "a(b=" + "[" * 1000 + "]" * 1000 + ")",
        "a\0",
    ]
    for text in cases:
        with subtests.test(text=text):
            with pytest.raises(ConfigError, match="invalid method spec") as caught:
                parse(text)
            assert caught.value.expected == "lora, lora(rank=16)"
            assert len(str(caught.value)) < 400


@given(st.text("ab=(),-[]{}'\"1.: \n"))
def test_any_text_is_parsed_or_is_a_config_error(text):
    try:
        calls = parse(text)
    except ConfigError:
        return
    assert all(isinstance(name, str) and isinstance(options, dict) for name, options in calls)


names = st.from_regex("[a-z][a-z0-9_]*", fullmatch=True)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["attn.q", "encoder.0.attn.v", "top 4", "0..3", "no", "*.bias", "1_0", "..."])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@few
@given(
    st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3)
)
def test_every_call_that_is_written_is_read_back(calls):
    text = ", ".join(call_text(name, options) for name, options in calls)
    if len(text) <= MAX_CHARACTERS:
        assert parse(text) == calls


def test_a_call_is_written_without_quotes_where_none_are_needed():
    options = {"rank": 4, "sites": ("attn.q", "attn.v"), "layers": "top 4", "ranks": {"attn.q": 2}}
    expected = "lora(rank=4, sites=[attn.q, attn.v], layers=top 4, ranks={attn.q: 2})"
    assert call_text("lora", options) == expected
    assert call_text("bitfit", {}) == "bitfit"
