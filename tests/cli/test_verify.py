"""`adapterhub verify`."""

from __future__ import annotations

import json

import pytest

from tests.kit import registries

pytest.importorskip("cryptography")


@pytest.fixture
def run(adapterhub, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.chdir(tmp_path)
    registries.write_sample(tmp_path / "runs" / "a")
    return lambda line: adapterhub(*line.split())


def test_the_exit_code_says_whether_it_is_signed_by_a_trusted_key(run, tmp_path):
    code, out, _ = run("verify runs/a")
    assert (code, out.splitlines()[1]) == (1, "no signature")
    run("key new acme.key")
    run("sign runs/a --key acme.key")
    code, out, _ = run("verify runs/a")
    assert code == 1
    assert "for polite: valid, not trusted" in out
    run("trust acme.pub")
    code, out, _ = run("verify runs/a")
    assert (code, "for polite: valid, trusted" in out) == (0, True)
    (tmp_path / "runs" / "a" / "adapter.safetensors").write_bytes(b"x")
    assert run("verify runs/a")[0] == 2


def test_the_signers_are_shown(run):
    run("key new acme.key")
    run("key new other.key")
    run("publish runs/a --sign other.key")
    run("trust acme.pub")
    code, out, _ = run("verify polite")
    key = json.loads(run("key show other.pub --json")[1])["id"]
    assert code == 1
    assert f"key {key} for polite v1: valid, not trusted" in out
    facts = json.loads(run("verify polite --json")[1])
    assert (facts["reference"], facts["trusted"]) == ("polite@v1", False)
    (signature,) = facts["signatures"]
    assert (signature["valid"], signature["trusted"], signature["version"]) == (True, False, "v1")
