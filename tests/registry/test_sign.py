"""`ah.sign`, and signing on publication."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import SIGNATURE_FILE, Saved, read_signatures
from adapterhub.files.signature import Statement
from tests.kit import registries


@pytest.fixture
def folder(tmp_path):
    return registries.write_sample(tmp_path / "run" / "adapter")


@pytest.fixture
def registry(tmp_path):
    return tmp_path / "registry"


def statements(folder):
    return {signature.statement for signature in read_signatures(folder)}


def test_a_folder_is_signed_by_its_own_name_or_another(folder, key):
    digest, before = Saved.at(folder).digest, {p.name: p.read_bytes() for p in folder.iterdir()}
    assert ah.sign(folder.parent, key).statement == Statement(digest, "polite")
    ah.sign(folder, key, name="acme/polite", version="3")
    data = (folder / SIGNATURE_FILE).read_bytes()
    ah.sign(folder, key)
    assert (folder / SIGNATURE_FILE).read_bytes() == data
    assert statements(folder) == {
        Statement(digest, "polite"),
        Statement(digest, "acme/polite", "v3"),
    }
    assert {n: (folder / n).read_bytes() for n in before} == before
    with pytest.raises(ConfigError, match="best"):
        ah.sign(folder, key, version="best")


def test_signatures_of_other_files_are_removed_and_damage_is_not_signed(folder, key, tmp_path):
    ah.sign(folder, key)
    other = registries.write_sample(tmp_path / "other", 1)
    (folder / SIGNATURE_FILE).rename(other / SIGNATURE_FILE)
    ah.sign(other, key)
    assert statements(other) == {Statement(Saved.at(other).digest, "polite")}
    path = folder / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(FileError):
        ah.sign(folder, key)
    assert not (folder / SIGNATURE_FILE).exists()


def test_the_signature_of_a_folder_goes_with_it_and_later_ones_are_added(folder, key, registry):
    ah.sign(folder, key, version="v7")
    entry = ah.publish(folder, registry=registry)
    assert entry.version == "v7"
    assert len(read_signatures(ah.pull("polite@v7", registry=registry))) == 1
    assert ah.publish(folder, sign=key, registry=registry) == entry
    assert ah.publish(folder, sign=registries.new_key(), registry=registry) == entry
    assert len(read_signatures(ah.pull("polite", registry=registry))) == 2


def test_a_version_on_a_hub_is_signed_in_its_commit_or_later(hub, folder, key, tmp_path):
    reference = f"{hub.address}/acme/polite"
    made = registries.write_sample(tmp_path / "signed", 7)
    signed = ah.push(made, f"{hub.address}/acme/signed", peft=False, sign=key)
    assert len(hub.repositories["acme/signed"].commits) == 2  # the first is empty
    copy = ah.pull(f"{hub.address}/acme/signed", tmp_path / "mine")
    assert statements(copy) == {Statement(signed.digest, "acme/signed", "v1")}
    first = ah.push(folder, reference, peft=False)
    ah.push(registries.write_sample(tmp_path / "next", 1), reference, peft=False)
    tags = dict(hub.repositories["acme/polite"].tags)
    assert ah.push(folder, reference, peft=False, sign=key).version == "v1"
    assert hub.repositories["acme/polite"].tags == tags
    (checked,) = ah.verify(f"{reference}@v1").signatures
    assert checked.is_valid
    assert checked.signature.statement == Statement(first.digest, "acme/polite", "v1")
    assert ah.verify(reference).signatures == ()


def test_a_published_version_is_signed_without_changing(folder, key, registry):
    entry = ah.publish(folder, registry=registry)
    assert ah.sign("polite", key, registry=registry).statement == Statement(
        entry.digest, "polite", "v1"
    )
    assert ah.publish(folder, registry=registry) == entry
    assert ah.verify("polite", registry=registry).signatures[0].is_valid
    with pytest.raises(ConfigError):
        ah.sign("polite", key, name="x", registry=registry)
    with pytest.raises(RegistryError):
        ah.sign("rude", key, registry=registry)


@pytest.mark.parametrize("deleted", [("v2",), ("v1", "v2")])
def test_publication_states_name_and_version_also_after_a_deletion(
    key, registry, tmp_path, deleted
):
    for seed in (1, 2, 3):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        if seed == 3:
            for version in deleted:
                ah.delete(f"rude@{version}", registry=registry)
        entry = ah.publish(made, "rude", sign=key, tags=("best",), registry=registry)
        assert (entry.version, entry.tags) == (f"v{seed}", ("best",))
        stored = ah.pull("rude", registry=registry)
        assert statements(stored) == {Statement(entry.digest, "rude", entry.version)}
        assert not (made / SIGNATURE_FILE).exists()
    licensed = ah.Listing(license="mit")
    entry = ah.publish(made, "rude", sign=key, listing=licensed, registry=registry)
    assert statements(ah.pull("rude", registry=registry)) == {Statement(entry.digest, "rude", "v4")}
    other = registries.write_sample(tmp_path / "other", 4)
    with pytest.raises(RegistryError, match="highest version so far is v4"):
        ah.publish(other, "rude", version="v2", sign=key, registry=registry)
