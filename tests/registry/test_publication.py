"""A folder prepared for publication: the publisher's metadata, and a card that says the same."""

from __future__ import annotations

from adapterhub.files.card import InPeft
from adapterhub.files.native import Saved
from adapterhub.registry.publish import PublicationInfo, prepared_folder
from tests.kit import registries


def test_empty_fields_keep_the_value_of_the_manifest(tmp_path):
    manifest, _ = Saved.at(registries.write_sample(tmp_path / "made")).read()
    assert PublicationInfo().apply(manifest) == manifest
    licensed = PublicationInfo(license="mit", topics=("manners",)).apply(manifest)
    assert (licensed.license, licensed.tags) == ("mit", ("manners",))
    assert PublicationInfo(description="Short.").apply(licensed).license == "mit"
    assert licensed.tensors == manifest.tensors


def test_without_changes_the_folder_is_used_as_it_is(tmp_path):
    source = registries.write_sample(tmp_path / "made")
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
