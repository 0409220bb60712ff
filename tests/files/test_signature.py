"""The format of `adapter.sig`, and Ed25519 keys in files."""

import json
import os
import stat
import sys
from dataclasses import replace

import pytest

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files.native import Saved, read_signatures, write_adapter
from adapterhub.files.schema import canonical_json
from adapterhub.files.signature import (
    MAX_SIGNATURE_BYTES,
    MAX_SIGNATURES,
    PublicKey,
    Statement,
    base64_text,
    parse_public_key,
    parse_signatures,
    read_private_key,
    read_public_key,
    sign_statement,
    signatures_to_json,
    write_key_pair,
)
from tests.kit import registries

pytest.importorskip("cryptography")
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
    "none": lambda tree: tree.update(signatures=[]),
    "many": lambda tree: tree.update(signatures=tree["signatures"] * 9),
    "missing": lambda tree: tree["signatures"][0].pop("name"),
    "other algorithm": lambda tree: tree["signatures"][0].update(key="rsa:AAAA"),
    "small order": lambda tree: tree["signatures"][0].update(key=f"ed25519:{'A' * 43}"),
    "short": lambda tree: tree["signatures"][0].update(signature="A" * 80),
    "spelling": lambda tree: tree["signatures"][0].update(signature="A" * 85 + "B"),
    "upper case": lambda tree: tree["signatures"][0].update(digest="A" * 64),
    "zero": lambda tree: tree["signatures"][0].update(version="v0"),
    "control": lambda tree: tree["signatures"][0].update(name="a\u001b[2J"),
}


BENT = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\n",
    "twice": lambda data: data.replace(b'"version": 1', b'"version": 1,\n  "version": 1'),
    "a mark": lambda data: b"\xef\xbb\xbf" + data,
    "escaped": lambda data: data.replace(b"polite", b"pol\\u0069te"),
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


def test_saving_over_a_signed_adapter_removes_the_signature(tmp_path, signature):
    folder = registries.write_sample(tmp_path / "a")
    (folder / "adapter.sig").write_bytes(signatures_to_json([signature]))
    manifest, tensors = Saved.at(folder).read()
    write_adapter(folder, manifest, tensors, overwrite=True)
    assert not (folder / "adapter.sig").exists()
    assert read_signatures(folder) == ()


# Keys in files.

PRIME = 2**255 - 19


def public_text(raw: bytes) -> str:
    return f"ed25519:{base64_text(raw)}"


def test_a_key_pair_is_written_and_read(tmp_path):
    path = tmp_path / "acme.key"
    public_path, public = write_key_pair(path)
    assert public_path == tmp_path / "acme.pub"
    assert public_path.read_text() == f"{public.text}\n"
    private = read_private_key(path)
    assert private.public == read_public_key(public_path) == read_public_key(public.text) == public
    signature = private.sign(b"text")
    assert public.accepts(b"text", signature)
    assert not public.accepts(b"other", signature)
    assert len(public.id) == 16
    assert "BEGIN" not in repr(private)
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_never_replaced(tmp_path):
    (tmp_path / "a.pub").write_text("mine")
    with pytest.raises(OutputError, match=r"a\.pub"):
        write_key_pair(tmp_path / "a.key")
    assert not (tmp_path / "a.key").exists()
    with pytest.raises(ConfigError, match=r"a\.key"):
        write_key_pair(tmp_path / "a.pub")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o666])
def test_a_private_key_that_others_can_use_is_refused(tmp_path, mode):
    write_key_pair(tmp_path / "a.key")
    (tmp_path / "a.key").chmod(mode)
    with pytest.raises(FileError, match=rf"its mode is {mode:o}(.|\n)*chmod 600 "):
        read_private_key(tmp_path / "a.key")


def test_a_passphrase_protects_a_key(tmp_path, monkeypatch):
    path = tmp_path / "a.key"
    _, public = write_key_pair(path, "correct horse")
    assert b"ENCRYPTED" in path.read_bytes()
    with pytest.raises(ConfigError, match="ADAPTERHUB_KEY_PASSPHRASE"):
        read_private_key(path)
    assert read_private_key(path, lambda: "correct horse").public == public
    monkeypatch.setenv("ADAPTERHUB_KEY_PASSPHRASE", "wrong")
    with pytest.raises(ConfigError, match="passphrase is wrong") as caught:
        read_private_key(path, lambda: "correct horse")
    assert "wrong horse" not in str(caught.value)
    monkeypatch.setenv("ADAPTERHUB_KEY_PASSPHRASE", "correct horse")
    assert read_private_key(path).public == public


def other_algorithm() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, serialization.NoEncryption())


@pytest.mark.parametrize("data", [b"x", b"-----BEGIN PRIVATE KEY-----\n", b"\0" * 20_000, "ec"])
def test_another_file_is_no_private_key(tmp_path, data):
    path = tmp_path / "a.key"
    path.write_bytes(other_algorithm() if data == "ec" else data)
    path.chmod(0o600)
    with pytest.raises(FileError):
        read_private_key(path)


def test_a_private_key_is_not_taken_for_a_public_one(tmp_path):
    write_key_pair(tmp_path / "a.key")
    with pytest.raises(ConfigError, match=r"private key(.|\n)*a\.pub") as caught:
        read_public_key(tmp_path / "a.key")
    assert "BEGIN" not in str(caught.value)


GOOD = "ed25519:vfF30CxvsAPDo-EYXl8H8N4CUnIY_9qLWk2Y_1pvVEM"


@pytest.mark.parametrize(
    "text",
    [
        "", GOOD[:-1], GOOD + "\n", " " + GOOD, GOOD + "=",
        GOOD.replace("ed25519", "ed448"), GOOD.replace("ed25519", "rsa"), GOOD.replace("_", "/"),
        GOOD.replace("vf", "\u0432f"),
        GOOD[:-1] + "N",  # the same bytes in another spelling
        *(public_text(n.to_bytes(32, "little")) for n in (PRIME, PRIME + 1, 2**256 - 1)),
    ],
)  # fmt: skip
def test_only_the_canonical_form_is_a_public_key(text):
    assert parse_public_key(GOOD).text == GOOD
    with pytest.raises(ConfigError):
        parse_public_key(text)


# The y of all points whose order divides eight.
SMALL_ORDERS = (
    0, 1, PRIME - 1,
    2707385501144840649318225287225658788936804267575313519463743609750303402022,
    55188659117513257062467267217118295137698188065244968500265048394206261417927,
)  # fmt: skip


@pytest.mark.parametrize("sign_bit", [0, 1])
@pytest.mark.parametrize("y", SMALL_ORDERS)
def test_a_key_of_small_order_is_refused(y, sign_bit):
    with pytest.raises(ConfigError, match="forge"):
        parse_public_key(public_text((y | sign_bit << 255).to_bytes(32, "little")))


def test_a_signature_has_one_form(tmp_path):
    write_key_pair(tmp_path / "a.key")
    key = read_private_key(tmp_path / "a.key")
    order = 2**252 + 27742317777372353535851937790883648493
    signature = key.sign(b"text")
    scalar = int.from_bytes(signature[32:], "little") + order
    for other in (
        signature[:32] + scalar.to_bytes(32, "little"),
        signature[:-1] + bytes([signature[-1] | 0xE0]),
        signature[:63],
        signature + b"\0",
        b"",
    ):
        assert not key.public.accepts(b"text", other)


def test_without_cryptography_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_key_pair(tmp_path / "a.key")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    for act in (
        lambda: write_key_pair(tmp_path / "b.key"),
        lambda: read_private_key(tmp_path / "a.key"),
        lambda: PublicKey(GOOD).accepts(b"", b""),
    ):
        with pytest.raises(ConfigError, match=r'pip install "adapterhub\[signatures\]"'):
            act()
    assert not (tmp_path / "b.key").exists()
