"""Which signatures are about an adapter, and whether they are enough."""

from __future__ import annotations

import pytest
import signing

from adapterhub.files.signature import Statement, sign_statement
from adapterhub.registry.reference import parse_reference
from adapterhub.registry.signers import (
    SignedSubject,
    checked_signatures,
    is_enough,
    same_name,
    signature_error,
    signed_subject,
)
from adapterhub.registry.trust import SigningRule

DIGEST = "0" * 64


@pytest.fixture
def key():
    return signing.new_key()


def is_valid(key, statement, subject):
    (checked,) = checked_signatures([sign_statement(statement, key)], subject, SigningRule(False))
    return checked.is_valid


@pytest.mark.parametrize(
    ("asked", "version", "stated", "valid"),
    [
        ("hf:acme/x", "v3", "v3", True),
        ("hf:acme/x", "v3", None, True),
        ("hf:acme/x", "v2", "v3", False),
        ("hf:acme/x@best", "v2", "v3", False),
        ("hf:acme/x@3", "v3", "v3", True),
        ("hf:acme/x@main", "a" * 40, "v3", True),
        ("hf:acme/x", "a" * 40, "v3", False),
        ("hf:acme/x", "a" * 40, None, True),
    ],
)
def test_the_version_is_compared_where_it_can_be(key, asked, version, stated, valid):
    subject = signed_subject(parse_reference(asked), DIGEST, "acme/x", version)
    assert is_valid(key, Statement(DIGEST, "x", stated), subject) == valid


@pytest.mark.parametrize(
    ("stated", "name", "same"),
    [
        ("polite", "polite", True),
        ("Polite", "polite", True),
        ("polite", "acme/polite", True),
        ("acme/polite", "polite", True),
        ("acme/polite", "Acme/Polite", True),
        ("acme/polite", "other/polite", False),
        ("polite", "acme/rude", False),
        ("acme", "acme/polite", False),
        ("polit\u0435", "polite", False),
    ],
)
def test_names_are_compared_as_far_as_both_go(stated, name, same):
    assert same_name(stated, name) == same


def test_a_folder_has_no_name(key):
    subject = SignedSubject(parse_reference("./x"), DIGEST)
    assert is_valid(key, Statement(DIGEST, "anything", "v7"), subject)
    assert not is_valid(key, Statement("1" * 64, "anything"), subject)


def test_trusted_signatures_come_first(key):
    subject = signed_subject(parse_reference("hf:acme/x"), DIGEST, "acme/x", "v1")
    strangers = [signing.new_key() for _ in range(3)]
    wrong = sign_statement(Statement("1" * 64, "x"), key)
    signatures = [wrong, *(sign_statement(Statement(DIGEST, "x"), k) for k in (*strangers, key))]
    rule = SigningRule(True, frozenset({key.public.text}), "hf:acme/*")
    checked = checked_signatures(signatures, subject, rule)
    assert checked[0].signature.key == key.public.text
    assert [c.is_valid for c in checked] == [True] * 4 + [False]
    assert is_enough(checked, rule)
    assert not is_enough(checked[1:], rule), "a valid one of a stranger, an invalid one of the key"
    assert str(checked[0]) == f"key {key.public.id} for x: valid, trusted"


@pytest.mark.parametrize(
    ("reference", "namespace"),
    [
        ("hf:acme/x", "hf:acme/*"),
        ("https://h.org/acme/x@v1", "https://h.org/acme/*"),
        ("x", "*"),
        ("./x", "*"),
    ],
)
def test_the_error_says_what_to_type(reference, namespace):
    subject = SignedSubject(parse_reference(reference), DIGEST)
    error = signature_error([], subject, SigningRule(True))
    assert f"adapterhub trust '{namespace}' KEY" in str(error)
    assert "no signature" in str(error)
    rule = SigningRule(True, frozenset({signing.new_key().public.text}), "hf:a/b")
    assert "adapterhub trust 'hf:a/b' KEY" in str(signature_error([], subject, rule))
