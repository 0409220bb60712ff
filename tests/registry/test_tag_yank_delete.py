"""`ah.tag`, `ah.yank` and `ah.delete`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, write_lock
from tests.kit import registries


@pytest.fixture
def published(here, tmp_path):
    """A registry with polite@v1 (best), v2 and v3."""
    for seed in range(3):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        ah.publish(made, tags=("best",) if seed == 0 else ())
    return tmp_path / "registry" / "acme--bert-small" / "polite"


def listed():
    return [entry.reference for entry in ah.search(all_versions=True)]


def test_a_deleted_version_is_gone_and_its_number_is_not_used_again(published, tmp_path):
    assert listed() == ["polite@v1", "polite@v2", "polite@v3"]
    assert ah.delete("polite@3") == "polite@v3"
    assert listed() == ["polite@v1", "polite@v2"]
    for act in (ah.pull, ah.delete):
        with pytest.raises(RegistryError, match="has no version v3"):
            act("polite@v3")
    assert ah.publish(registries.write_sample(tmp_path / "new", 9)).version == "v4"
    assert [p.name for p in published.iterdir() if p.name.startswith(".adapterhub")] == []


def test_tags_and_yanks_go_with_a_version_and_its_name_is_known_as_deleted(published, tmp_path):
    ah.yank("polite@v1", "wrong")
    ah.yank("polite@v2", "too")
    ah.delete("polite@v1")
    tree = json.loads((published / "names.json").read_bytes())
    assert tree == {"highest": 3, "tags": {}, "yanked": {"v2": "too"}}
    with pytest.raises(RegistryError, match="no version best"):
        ah.pull("polite@best")
    for version in ("v2", "v3"):
        ah.delete(f"polite@{version}")
    assert listed() == []
    with pytest.raises(RegistryError, match="no adapter 'polite': all its versions were deleted"):
        ah.pull("polite")
    with pytest.raises(RegistryError, match="all its versions were deleted"):
        ah.delete("polite@v1")
    assert ah.publish(tmp_path / "made-0").version == "v4"


def test_a_version_that_a_lock_file_here_pins_is_kept(published):
    write_lock(Path("adapterhub.lock"), dict([pin("polite@v2", name="theirs")]))
    with pytest.raises(RegistryError, match=r"polite@v2 is pinned as 'theirs' by adapterhub.lock"):
        ah.delete("polite@v2")
    other = published.parents[2] / "other"
    ah.publish(published.parents[2] / "made-0", registry=other)
    ah.publish(published.parents[2] / "made-1", registry=other)
    ah.delete("polite@v2", registry=other)  # another registry's
    ah.delete("polite@v1")
    ah.delete("polite@v2", force=True)
    Path("adapterhub.lock").write_text("x")
    with pytest.raises(FileError, match="not a lock file"):
        ah.delete("polite@v3")


def test_a_damaged_version_can_be_deleted(published):
    (published / "v3" / "adapter.json").write_text("x")
    with pytest.raises(FileError):
        ah.pull("polite")
    ah.delete("polite@v3")
    assert ah.pull("polite").name == "v2"


KEPT = [
    ("polite", "one version by its number"),
    ("polite@best", "one version by its number"),
    ("./polite", "is a folder"),
    ("hf:acme/polite@v1", "is on the Hub, where adapterhub deletes nothing"),
]


@pytest.mark.parametrize(("reference", "problem"), KEPT)
def test_only_a_version_of_a_local_registry_is_deleted(reference, problem):
    with pytest.raises(ConfigError, match=problem):
        ah.delete(reference)


def test_a_name_of_several_backbones(published, tmp_path):
    fingerprint = f"bf16-{'1' * 64}"
    other = {"backbone": "other/gpt", "fingerprint": fingerprint}
    ah.publish(registries.write_sample(tmp_path / "other", 5, **other))
    with pytest.raises(RegistryError, match="exists for several backbones"):
        ah.delete("polite@v1")
    ah.delete("polite@v1", backbone=fingerprint)
    ah.delete("polite@v2", backbone="acme/bert-small")
    with pytest.raises(RegistryError, match="has no adapter 'polite' for third/model"):
        ah.delete("polite@v1", backbone="third/model")
    assert listed() == ["polite@v1", "polite@v3"]


def test_a_tag_is_set_moved_listed_and_removed(published):
    assert ah.tag("polite") == {"best": "v1"}
    assert ah.pull("polite@best").name == "v1"
    assert ah.tag("polite", "best") == {"best": "v3"}, "the newest"
    assert ah.tag("polite@best", "good") == {"best": "v3", "good": "v3"}
    assert ah.tag("polite", "best", remove=True) == {"good": "v3"}
    assert [entry.tags for entry in ah.search()] == [("good",)]


def test_removing_what_is_not_there(published):
    with pytest.raises(ConfigError, match="is a folder"):
        ah.tag("./polite", "good")
    with pytest.raises(ConfigError, match="invalid tags"):
        ah.tag("polite", "a b")
    with pytest.raises(ConfigError, match="unknown tag of polite 'bset'; did you mean 'best'"):
        ah.tag("polite", "bset", remove=True)
    with pytest.raises(ConfigError, match="polite@best is v1, not v2"):
        ah.tag("polite@v2", "best", remove=True)
    assert ah.tag("polite@v1", "best", remove=True) == {}


def test_a_version_that_was_deleted_meanwhile_gets_no_tag(published):
    registry = LocalRegistry()
    entry = registry.resolve("polite", "v1")
    ah.delete("polite@v1")
    with pytest.raises(RegistryError, match="polite@v1 was deleted"):
        registry.tag(entry, "best")
    assert ah.tag("polite") == {}


def test_a_yank_needs_an_existing_version_and_one_printable_line(published):
    with pytest.raises(ConfigError, match="polite@v1"):
        ah.yank("polite", "no")
    with pytest.raises(RegistryError, match="has no version v4"):
        ah.yank("polite@v4", "no")
    for reason in ("", "a\nb", "\x1b[2J", "\ud800", "x" * 1001):
        with pytest.raises(ConfigError, match="invalid reason"):
            ah.yank("polite@v1", reason)
