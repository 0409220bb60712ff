"""`adapterhub sign`, and signing with `publish`."""

from __future__ import annotations

import json

import pytest

from adapterhub.errors import AdapterhubError
from tests.kit import registries

pytest.importorskip("cryptography")


@pytest.fixture
def run(typed, tmp_path):
    """A folder `runs/a` with an adapter, and a key `acme.key`; return the function `typed`."""
    registries.write_sample(tmp_path / "runs" / "a" / "adapter")
    typed("key new acme.key")
    return typed


def test_a_folder_is_signed(run, tmp_path):
    assert run("sign runs/a --key acme.key").startswith("signed polite, sha256 ")
    assert run("sign runs/a --key acme.key --name rude --version 3").startswith("signed rude v3,")
    assert (tmp_path / "runs" / "a" / "adapter" / "adapter.sig").is_file()


def test_a_published_version_is_signed(run):
    run("publish runs/a")
    statement = json.loads(run("sign polite@v1 --key acme.key --json"))
    assert (statement["name"], statement["version"]) == ("polite", "v1")


def test_a_publication_is_signed(run):
    run("publish runs/a --sign acme.key")
    run("trust acme.pub")
    assert run("pull polite --require-signature").strip()


def test_a_key_that_others_can_read(run, tmp_path):
    (tmp_path / "acme.key").chmod(0o644)
    for line in ("sign runs/a --key acme.key", "publish runs/a --sign acme.key"):
        with pytest.raises(AdapterhubError) as error:
            run(line)
        assert "chmod 600 acme.key" in str(error.value)
    assert not (tmp_path / "registry").exists()


def test_a_hub_is_signed_on_push(run):
    with pytest.raises(AdapterhubError) as error:
        run("sign hf:acme/polite@v1 --key acme.key")
    assert "adapterhub push FOLDER hf:acme/polite --sign KEY" in str(error.value)
