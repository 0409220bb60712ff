"""`ah.verify`."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import FileError
from adapterhub.files.native import Saved
from adapterhub.registry.store import Reference
from adapterhub.registry.trust import signatures_beside, trust_key
from tests.kit import registries
from tests.kit.fake_hub import Repository


@pytest.fixture
def folder(tmp_path):
    return registries.write_sample(tmp_path / "run" / "adapter")


def test_a_folder(folder, key):
    found = ah.verify(folder.parent)
    assert (found.digest, found.signatures, found.is_trusted) == (
        Saved.at(folder).digest,
        (),
        False,
    )
    ah.sign(folder, key)
    found = ah.verify(folder)
    assert [c.is_valid for c in found.signatures] == [True]
    assert not found.is_trusted
    trust_key(key.public)
    assert ah.verify(folder).is_trusted


def test_those_beside_an_adapter(folder, key, tmp_path):
    assert signatures_beside(Reference("folder", str(folder)), Saved.at(folder)) == []
    entry = ah.publish(folder, registry=tmp_path / "r", sign=key)
    files = ah.pull("polite", registry=tmp_path / "r")
    beside = signatures_beside(Reference("local", "polite"), Saved.at(files), entry)
    assert [(c.is_valid, c.is_trusted) for c in beside] == [(True, False)]


def test_nothing_is_required(folder, key, tmp_path):
    """The command is there to find out why an adapter is refused."""
    ah.publish(folder, registry=tmp_path / "r", sign=registries.new_key())
    registries.require_key(key)
    found = ah.verify("polite", registry=tmp_path / "r")
    assert not found.is_trusted
    assert [str(c).rpartition(": ")[2] for c in found.signatures] == ["valid, not trusted"]


def test_damaged_files_are_an_error(folder, key):
    ah.sign(folder, key)
    path = folder / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(FileError):
        ah.verify(folder)


def test_another_librarys_adapter_cannot_be_signed(hub):
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b""}
    hub.repositories["acme/x"] = Repository()
    hub.repositories["acme/x"].commit(files)
    with pytest.raises(FileError, match="cannot be signed"):
        ah.verify(f"{hub.address}/acme/x")
