"""Namespaces: their texts, and the addresses of one place."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from adapterhub.errors import ConfigError
from adapterhub.registry.namespaces import (
    HUB,
    LOCAL,
    Namespace,
    addresses,
    parse_namespace,
    place_of_url,
)
from adapterhub.registry.reference import parse_reference


@pytest.mark.parametrize(
    ("text", "place", "owner", "name"),
    [
        ("hf:acme/polite", HUB, "acme", "polite"),
        ("hf:acme/*", HUB, "acme", ""),
        ("hf:*", HUB, "", ""),
        ("https://h.org/acme/polite", "https://h.org", "acme", "polite"),
        ("https://h.org/acme/*", "https://h.org", "acme", ""),
        ("https://h.org/*", "https://h.org", "", ""),
        ("http://localhost:8080/acme/*", "http://localhost:8080", "acme", ""),
        ("polite", LOCAL, "", "polite"),
        ("*", LOCAL, "", ""),
    ],
)
def test_a_namespace_is_written_as_it_is_read(text, place, owner, name):
    namespace = parse_namespace(text)
    assert namespace == Namespace(place, owner, name)
    assert str(namespace) == text
    assert namespace.depth == 2 - bool(not name) - bool(not owner and not name)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("hf:Acme/Polite", "hf:acme/polite"),
        ("https://H.org:443/Acme/*", "https://h.org/acme/*"),
        ("https://h.org./acme/*", "https://h.org/acme/*"),
        ("http://localhost:80/acme/*", "http://localhost/acme/*"),
        ("http://[::1]:80/acme/*", "http://[::1]/acme/*"),
        ("https://huggingface.co/acme/*", "hf:acme/*"),
        ("https://HuggingFace.co:443/acme/x", "hf:acme/x"),
        ("https://hf.co/*", "hf:*"),
        ("Polite", "polite"),
    ],
)
def test_a_place_has_one_spelling(text, same):
    assert str(parse_namespace(text)) == same


@pytest.mark.parametrize(
    "text",
    [
        *("", "**", "*x", "x*", "./x", "./*", "/*", "~/*", "../*", "hf:", "hf:acme", "hf:/*"),
        *("hf:acme/po*", "hf:*/x", "hf:**", "hf:*/*", "hf:acme/*/x", "hf:acme/x/*", "hf:acme//*"),
        *("hf:acme/x@v1", "hf:acme/*@v1", "polite@v1", "hf:\u0430cme/*", "hf:acme /*", "*\n"),
        *("https://*", "https://h.org", "https://h.org*", "https://h.org/a*", "http://h.org/a/*"),
        *("https://user@h.org/*", "https://h.org/*?x", "https://\uff48.org/a/*", "file:///*"),
    ],
)
def test_another_text_is_refused(text):
    with pytest.raises(ConfigError):
        parse_namespace(text)


MIRROR = "https://mirror.org"


@pytest.mark.parametrize(
    ("reference", "variable", "places"),
    [
        ("polite", None, {LOCAL}),
        ("hf:a/b", None, {HUB}),
        ("https://huggingface.co/a/b", None, {HUB}),
        ("https://www.huggingface.co:443/a/b", None, {HUB}),
        ("https://h.org/a/b", None, {"https://h.org"}),
        ("hf:a/b", MIRROR, {HUB, MIRROR}),
        ("https://mirror.org/a/b", MIRROR, {HUB, MIRROR}),
        ("https://MIRROR.org:443/a/b", MIRROR, {HUB, MIRROR}),
        ("https://huggingface.co/a/b", MIRROR, {HUB}),
        ("https://h.org/a/b", MIRROR, {"https://h.org"}),
    ],
)
def test_one_place_has_several_addresses(reference, variable, places, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", variable or "https://huggingface.co")
    assert addresses(parse_reference(reference)) == places


def test_the_hub_of_a_lock_file_is_an_address(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    places = addresses(parse_reference("hf:a/b"), "https://OTHER.org")
    assert places == {HUB, "https://other.org"}


def test_the_origin_of_no_url_is_empty():
    assert place_of_url("https://h.org:x") == place_of_url("") == place_of_url("https://[h") == ""


def test_a_host_in_other_letters_is_no_reference():
    """httpx would make huggingface.co of these."""
    for host in ("\uff48uggingface.co", "huggingface\u3002co", "\u24d7uggingface.co"):
        with pytest.raises(ConfigError):
            parse_reference(f"https://{host}/acme/x")
