"""The file of trusted keys, and the rule for an adapter."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import signing
from huggingface_hub import constants

from adapterhub.errors import ConfigError, FileError
from adapterhub.registry.namespaces import parse_namespace
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.trust import (
    Trust,
    distrust_key,
    read_trust,
    require_signatures,
    requiring_signatures,
    rule_of,
    trust_key,
    trust_path,
)

FOLDER = Reference("folder", "./x")


def rule(text, **options):
    return rule_of(parse_reference(text), **options)


def test_nothing_is_trusted_at_first():
    assert read_trust() == Trust()
    assert not rule("hf:a/b").required
    assert not rule_of(FOLDER).required


def test_keys_are_added_and_removed():
    first, second = signing.new_key(), signing.new_key()
    space = parse_namespace("hf:acme/*")
    for key in (first, second, first):
        trust_key(space, key.public)
    assert read_trust().trusted == {space: tuple(sorted((first.public.text, second.public.text)))}
    assert distrust_key(space, first.public.text) == (second.public.text,)
    with pytest.raises(ConfigError, match="no such key"):
        distrust_key(space, first.public.text)
    assert distrust_key(space, second.public.id) == ()
    assert read_trust() == Trust()


def test_what_is_in_a_namespace_must_be_signed():
    key = signing.new_key()
    signing.trust("hf:acme/*", key)
    decided = rule("hf:acme/x@v3")
    assert decided.required
    assert (decided.keys, decided.namespace) == ({key.public.text}, "hf:acme/*")
    for other in ("hf:acmee/x", "hf:other/acme", "https://h.org/acme/x", "acme", "x"):
        assert not rule(other).required, other


@pytest.mark.parametrize(
    "text",
    [
        *("hf:acme/x", "hf:Acme/X", "hf:ACME/x@main", "https://huggingface.co/acme/x"),
        *("https://HuggingFace.co:443/aCme/x", "https://hf.co/acme/x", "https://hf.co./acme/x"),
        *("https://mirror.org/acme/x", "https://Mirror.org:443/ACME/x"),
    ],
)
def test_another_spelling_of_the_place_does_not_evade(text, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "https://mirror.org")
    signing.trust("hf:acme/*", signing.new_key())
    assert rule(text).required


def test_a_hub_in_a_lock_file_does_not_evade():
    signing.trust("https://own.org/acme/*", signing.new_key())
    signing.trust("hf:other/*", signing.new_key())
    assert rule("hf:acme/x", endpoint="https://own.org").required
    assert rule("hf:other/x", endpoint="https://evil.org").required
    assert not rule("hf:acme/x").required


def test_the_most_specific_namespace_decides_alone():
    keys = {text: signing.new_key() for text in ("hf:*", "hf:acme/*", "hf:acme/x")}
    for text, key in keys.items():
        signing.trust(text, key)
    for reference, decisive in (
        ("hf:acme/x", "hf:acme/x"),
        ("hf:acme/y", "hf:acme/*"),
        ("hf:b/x", "hf:*"),
    ):
        decided = rule(reference)
        assert decided.keys == {keys[decisive].public.text}
        assert decided.namespace == decisive


def test_two_names_of_one_place_are_both_for_it(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "https://mirror.org")
    keys = [signing.new_key(), signing.new_key()]
    signing.trust("hf:acme/*", keys[0])
    signing.trust("https://mirror.org/acme/*", keys[1])
    assert rule("hf:acme/x").keys == {key.public.text for key in keys}
    assert rule("hf:acme/x").namespace == "hf:acme/* and https://mirror.org/acme/*"


def test_the_general_switch(monkeypatch):
    key = signing.new_key()
    signing.trust("hf:acme/*", key)
    for on in (lambda: rule("other", signed=True), lambda: rule_of(FOLDER, signed=True)):
        assert on().required
    with requiring_signatures():
        assert rule("other").required
        assert rule("other").keys == set()
        assert rule_of(FOLDER).keys == {key.public.text}
    assert not rule("other").required
    require_signatures(True)
    assert rule("other").required
    assert rule_of(FOLDER).required
    for value in ("0", "", "false"):  # the variable adds, it does not take away
        monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", value)
        assert rule("other").required
    require_signatures(False)
    for value in ("1", "true", "YES", "on"):
        monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", value)
        assert rule("other").required
    monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", "ture")
    with pytest.raises(ConfigError, match="ADAPTERHUB_REQUIRE_SIGNATURES is 'ture'"):
        rule("other")


GOOD = "ed25519:vfF30CxvsAPDo-EYXl8H8N4CUnIY_9qLWk2Y_1pvVEM"


def trusting(namespace, *keys):
    return json.dumps({"version": 1, "trusted": {namespace: keys}, "require_signatures": False})


BROKEN = {
    "empty": "",
    "text": "none",
    "list": "[]",
    "no switch": '{"version": 1, "trusted": {}}',
    "later": '{"version": 2, "trusted": {}, "require_signatures": false}',
    "twice": '{"version": 1, "trusted": {}, "trusted": {}, "require_signatures": false}',
    "word": '{"version": 1, "trusted": {}, "require_signatures": "no"}',
    "no key": trusting("hf:*"),
    "bad key": trusting("hf:*", "x"),
    "small order": trusting("hf:*", f"ed25519:{'A' * 43}"),
    "spelling": trusting("hf:Acme/*", GOOD),
    "namespace": trusting("./x", GOOD),
    "unknown": '{"version": 1, "trusted": {}, "require_signatures": false, "more": 1}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_never_means_that_nothing_is_required(kind):
    trust_path().parent.mkdir(parents=True)
    trust_path().write_text(BROKEN[kind])
    for reference in (parse_reference("polite"), FOLDER):
        with pytest.raises(FileError):
            rule_of(reference)
    with pytest.raises(FileError):
        signing.trust("polite", signing.new_key())
    assert trust_path().read_text() == BROKEN[kind]


def test_a_file_that_is_named_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_TRUST", str(tmp_path / "trust.json"))
    with pytest.raises(FileError, match="ADAPTERHUB_TRUST"):
        rule("polite")
    signing.trust("polite", signing.new_key())
    assert rule("polite").required
    assert trust_path() == tmp_path / "trust.json"


def test_a_link_to_the_file_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_TRUST", str(tmp_path / "link.json"))
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(FileError):
        rule("polite")
    empty = {"version": 1, "trusted": {}, "require_signatures": False}
    (tmp_path / "real.json").write_text(json.dumps(empty))
    signing.trust("polite", signing.new_key())
    assert (tmp_path / "link.json").is_symlink()
    assert rule("polite").required


def test_no_key_of_concurrent_writers_is_lost():
    keys = [signing.new_key() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: signing.trust("polite", key), keys))
    assert rule("polite").keys == {key.public.text for key in keys}


def test_the_number_of_keys_is_limited():
    for _ in range(16):
        signing.trust("polite", signing.new_key())
    with pytest.raises(ConfigError, match="too many"):
        signing.trust("polite", signing.new_key())
