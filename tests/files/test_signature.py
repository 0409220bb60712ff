"""The format of `adapter.sig`."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from adapterhub.errors import FileError, OutputError
from adapterhub.files.native import Saved, read_signatures, write_adapter
from adapterhub.files.schema import canonical_json
from adapterhub.files.signature import (
    MAX_SIGNATURE_BYTES,
    MAX_SIGNATURES,
    Statement,
    parse_signatures,
    sign_statement,
    signatures_to_json,
)
from tests.kit import registries

STATEMENT = Statement("0" * 64, "polite", "v3")


@pytest.fixture
def signature():
    return sign_statement(STATEMENT, registries.new_key())


def test_signatures_are_read_as_written(signature):
    other = sign_statement(STATEMENT, registries.new_key())
    data = signatures_to_json([signature, other, signature])
    assert set(parse_signatures(data)) == {signature, other}
    assert signatures_to_json([other, signature]) == data
    assert signature.is_valid


def test_each_field_is_signed(signature):
    assert STATEMENT.message == (
        b'adapterhub-signature-v1\n{\n  "digest": "' + b"0" * 64 + b'",\n  "name": "polite",\n'
        b'  "version": "v3"\n}\n'
    )
    for change in ({"digest": "1" * 64}, {"name": "rude"}, {"version": "v4"}, {"version": None}):
        assert not replace(signature, **change).is_valid


def test_the_limit_has_room_for_long_names():
    statements = [Statement("0" * 64, "n" * 100, "v999999999") for _ in range(MAX_SIGNATURES)]
    data = signatures_to_json(sign_statement(s, registries.new_key()) for s in statements)
    assert len(data) <= MAX_SIGNATURE_BYTES
    with pytest.raises(OutputError, match="9 signatures"):
        signatures_to_json(sign_statement(STATEMENT, registries.new_key()) for _ in range(9))


def test_a_name_that_cannot_be_written_is_not_signed():
    for name in ("", " x", "a\nb", "../x", "x" * 201):
        with pytest.raises(OutputError, match="--name"):
            sign_statement(Statement("0" * 64, name), registries.new_key())


CHANGES = {
    "version": lambda tree: tree.update(version=2),
    "extra": lambda tree: tree.update(more="x"),
    "none": lambda tree: tree.update(signatures=[]),
    "many": lambda tree: tree.update(signatures=tree["signatures"] * 9),
    "missing": lambda tree: tree["signatures"][0].pop("name"),
    "other algorithm": lambda tree: tree["signatures"][0].update(key="rsa:AAAA"),
    "small order": lambda tree: tree["signatures"][0].update(key=f"ed25519:{'A' * 43}"),
    "no signature": lambda tree: tree["signatures"][0].update(signature=""),
    "short": lambda tree: tree["signatures"][0].update(signature="A" * 80),
    "spelling": lambda tree: tree["signatures"][0].update(signature="A" * 85 + "B"),
    "digest": lambda tree: tree["signatures"][0].update(digest="0" * 63),
    "upper case": lambda tree: tree["signatures"][0].update(digest="A" * 64),
    "no version": lambda tree: tree["signatures"][0].update(version="best"),
    "zero": lambda tree: tree["signatures"][0].update(version="v0"),
    "control": lambda tree: tree["signatures"][0].update(name="a\u001b[2J"),
    "number": lambda tree: tree["signatures"][0].update(name=3),
}


BENT = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\n",
    "tabs": lambda data: data.replace(b"  ", b"\t"),
    "twice": lambda data: data.replace(b'"version": 1', b'"version": 1,\n  "version": 1'),
    "a mark": lambda data: b"\xef\xbb\xbf" + data,
    "escaped": lambda data: data.replace(b"polite", b"pol\\u0069te"),
    "empty": lambda data: b"",
    "large": lambda data: data + b" " * MAX_SIGNATURE_BYTES,
}


@pytest.mark.parametrize("change", [*CHANGES, *BENT])
def test_another_file_is_refused(signature, change):
    data = signatures_to_json([signature])
    if change in CHANGES:
        CHANGES[change](tree := json.loads(data))
        data = canonical_json(tree)
    else:
        data = BENT[change](data)
    with pytest.raises(FileError, match="signature"):
        parse_signatures(data)


def test_mutated_files_are_read_or_refused(signature):
    """Whatever bytes a hub sends, the reader raises nothing but a FileError."""
    data, random = signatures_to_json([signature]), Random(0)
    refused = 0
    for _ in range(2_000):
        mutated = bytearray(data)
        for _ in range(random.randint(1, 4)):
            start = random.randrange(len(mutated))
            end = start + random.choice((0, 1, 8))
            mutated[start:end] = random.choice((b"", b'"', b"{", b"\xff", b"9" * 400, b"null"))
        try:
            assert all(s.is_valid in (True, False) for s in parse_signatures(bytes(mutated)))
        except FileError as error:
            refused += len(str(error)) < 5_000
    assert refused > 1_900


def test_saving_over_a_signed_adapter_removes_the_signature(tmp_path, signature):
    folder = registries.write_sample(tmp_path / "a")
    (folder / "adapter.sig").write_bytes(signatures_to_json([signature]))
    manifest, tensors = Saved.at(folder).read()
    write_adapter(folder, manifest, tensors, overwrite=True)
    assert not (folder / "adapter.sig").exists()
    assert read_signatures(folder) == ()
