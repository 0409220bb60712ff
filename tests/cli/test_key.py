"""`adapterhub key`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from adapterhub import cli
from adapterhub.files.signature import read_private_key, read_public_key
from tests.kit.session import refused

pytest.importorskip("cryptography")


def test_a_key_pair_is_created_and_shown(typed, tmp_path):
    key = json.loads(typed("key new acme.key --json"))
    assert (key["private"], key["public"]) == ("acme.key", "acme.pub")
    assert read_public_key(tmp_path / "acme.pub").text == key["key"]
    for file in ("acme.key", "acme.pub"):
        assert typed(f"key show {file}") == f"{key['key']} {key['id']}\n"
        assert json.loads(typed(f"key show {file} --json"))["id"] == key["id"]
    assert typed("key new other.key").startswith("other.key: the private key")


def test_a_passphrase_is_asked_for_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["key", "new", "acme.key", "--passphrase"]
    result = CliRunner().invoke(cli.group, words, input="secret words\nsecret words\n")
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    assert read_private_key(tmp_path / "acme.key", lambda: "secret words")


def test_what_is_no_key_is_refused(adapterhub, tmp_path):
    (tmp_path / "x.pub").write_text("none")
    refused(adapterhub("key", "show", tmp_path / "x.pub"))
    refused(adapterhub("key", "show", tmp_path / "missing"), "missing")
    (tmp_path / "a.key").write_text("")
    refused(adapterhub("key", "new", tmp_path / "a.key"), "never replaced")
