"""References are parsed from text, and written back to the same text."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError
from adapterhub.registry.store import Reference, is_name, parse_reference

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True).filter(is_name)
VERSIONS = st.none() | NAMES


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("./out/polite", Reference("folder", "./out/polite")),
        ("../a@b", Reference("folder", "../a@b")),
        (".", Reference("folder", ".")),
        ("/srv/a b", Reference("folder", "/srv/a b")),
        ("~/x", Reference("folder", "~/x")),
        ("C:\\x", Reference("folder", "C:\\x")),
        ("polite", Reference("local", "polite")),
        ("polite@v2", Reference("local", "polite", "v2")),
        ("hf:some/polite", Reference("hub", "some/polite")),
        ("hf:some/polite@refs/pr/1", Reference("hub", "some/polite", "refs/pr/1")),
        ("https://h.org/a/b@v1", Reference("server", "a/b", "v1", "https://h.org")),
        ("http://127.0.0.1:8000/a/b", Reference("server", "a/b", None, "http://127.0.0.1:8000")),
    ],
)
def test_each_form(text, reference):
    assert parse_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("some/polite", "./some/polite for a folder, hf:some/polite for the Hub"),
        ("a/b/c", "./a/b/c for a folder"),
        ("", "expected"),
        (" polite", "expected"),
        ("polite@", "version"),
        ("polite@../x", "version"),
        ("hf:polite", "hf:owner/name"),
        ("hf:a/..", "hf:owner/name"),
        ("http://h.org/a/b", "https"),
        ("https://h.org/a", "https://host/owner/name"),
        ("https://me:secret@h.org/a/b", "more than a host"),
        ("https://h.org:x/a/b", "URL"),
        ("ftp://h.org/a/b", "https"),
        ("-polite", "letters"),
    ],
)
def test_an_invalid_reference_gives_a_hint(text, remedy):
    with pytest.raises(ConfigError) as caught:
        parse_reference(text)
    assert remedy in str(caught.value)


def test_an_error_shows_no_password():
    with pytest.raises(ConfigError) as caught:
        parse_reference("https://me:secret@h.org/a/b")
    assert "secret" not in str(caught.value)


@given(NAMES, NAMES, VERSIONS, st.sampled_from(["local", "hub", "server"]))
def test_round_trip(owner, name, version, place):
    full = name if place == "local" else f"{owner}/{name}"
    host = "https://h.org:8443" if place == "server" else None
    reference = Reference(place, full, version, host)
    assert parse_reference(str(reference)) == reference


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_an_error(text):
    with contextlib.suppress(ConfigError):
        assert str(parse_reference(text)) == text
