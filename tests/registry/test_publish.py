"""`ah.publish` adds an adapter to a registry; its metadata belongs to the version."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files.card import InPeft
from adapterhub.files.native import BESIDE, PEFT_FILES, Saved
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.publish import PublicationInfo, prepared_folder
from tests.kit import registries
from tests.kit.registries import new_key


def test_the_name_is_the_adapters_own_unless_given(tmp_path):
    folder, registry = registries.write_sample(tmp_path / "made"), tmp_path / "registry"
    assert ah.publish(folder, registry=registry).reference == "polite@v1"
    assert ah.publish(folder, "rude", version="v3", registry=registry).reference == "rude@v3"
    for name in ("polite", "rude"):
        assert f"\n# {name}\n" in (ah.pull(name, registry=registry) / "README.md").read_text()
    with pytest.raises(ConfigError, match="invalid adapter name"):
        ah.publish(folder, "a/b", registry=registry)
    with pytest.raises(ConfigError, match="invalid version"):
        ah.publish(folder, "other", version="best", registry=registry)
    with pytest.raises(FileError):
        ah.publish(tmp_path, registry=registry)


def test_a_change_of_metadata_is_a_new_version(tmp_path):
    folder, registry = registries.write_sample(tmp_path / "made"), tmp_path / "registry"

    def publish(**fields):
        return ah.publish(folder, registry=registry, listing=ah.Listing(**fields))

    assert publish().version == "v1"
    first = publish(license="mit", topics=("manners",))
    assert (first.version, first.license, first.topics) == ("v2", "mit", ("manners",))
    assert publish(license="mit", topics=("manners",)) == first
    assert publish(license="apache-2.0").version == "v3"
    assert publish().version == "v1"
    copy = ah.pull("polite@v2", registry=registry)
    manifest, tensors = Saved.at(copy).read()
    assert (manifest.license, manifest.tags) == ("mit", ("manners",))
    assert all(t.equal(Saved.at(folder).read()[1][name]) for name, t in tensors.items())
    assert "license: mit" in (copy / "README.md").read_text(encoding="utf-8")
    assert ah.search(registry=registry, tags=("manners",), all_versions=True) == [first]
    with pytest.raises(OutputError, match="license"):
        publish(license="Apache License 2.0")


@pytest.mark.parametrize(
    ("way", "published"),
    [
        ("as it is", {*PEFT_FILES}),
        ("--no-peft", set()),
        ("signed before", set()),
        ("--sign", {*BESIDE}),
    ],
)
def test_files_of_peft_in_the_folder_are_published_with_it(tmp_path, way, published):
    folder, registry = registries.write_sample(tmp_path / "made"), tmp_path / "registry"
    (folder / PEFT_FILES[0]).write_text('{"task_type": "SEQ_CLS"}', encoding="utf-8")
    (folder / PEFT_FILES[1]).write_bytes(bytes(8))
    if way == "signed before":
        ah.sign(folder, new_key())
    notes: list[str] = []
    options = {"peft": False} if way == "--no-peft" else {}
    options |= {"sign": new_key()} if way == "--sign" else {}
    entry = ah.publish(folder, registry=registry, note=notes.append, **options)
    version = LocalRegistry(registry).get(entry)
    assert {path.name for path in version.iterdir()} & {*BESIDE} == published
    assert "--sign KEY signs them" in " ".join(notes) or way != "signed before"
    pulled = ah.pull(entry.reference, tmp_path / "pulled", registry=registry)
    assert not {path.name for path in pulled.iterdir()} & {*BESIDE}


# A folder prepared for publication: the publisher's metadata, and a card that says the same.


def test_empty_fields_keep_the_value_of_the_manifest(tmp_path):
    source = registries.write_sample(tmp_path / "made")
    manifest, _ = Saved.at(source).read()
    assert PublicationInfo().apply(manifest) == manifest
    licensed = PublicationInfo(license="mit", topics=("manners",)).apply(manifest)
    assert (licensed.license, licensed.tags) == ("mit", ("manners",))
    assert PublicationInfo(description="Short.").apply(licensed).license == "mit"
    assert licensed.tensors == manifest.tensors
    with prepared_folder(Saved.at(source), PublicationInfo(), "polite") as saved:
        assert saved == Saved.at(source)


def test_with_changes_a_copy_is_prepared_and_removed(tmp_path):
    source = registries.write_sample(tmp_path / "made", card="# Mine\n\nMy text.\n")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    in_peft = InPeft(None, ("some reason",))
    with prepared_folder(Saved.at(source), PublicationInfo(license="mit"), "a/b", in_peft) as saved:
        folder = saved.folder
        manifest, tensors = saved.read()
        assert manifest.license == "mit"
        assert all(t.equal(Saved.at(source).read()[1][name]) for name, t in tensors.items())
        card = (folder / "README.md").read_text(encoding="utf-8")
        for text in ("My text.", "license: mit", "Not with peft: some reason.", "'a/b'"):
            assert text in card
    assert not folder.exists()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
