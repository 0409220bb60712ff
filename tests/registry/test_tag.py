"""`ah.tag` sets, moves, removes and lists the names of versions."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, RegistryError
from adapterhub.registry.local import LocalRegistry
from tests.kit import registries


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A registry with polite@v1 and polite@v2."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    for seed in range(2):
        ah.publish(registries.write_sample(tmp_path / f"made-{seed}", seed))
    return LocalRegistry()


def test_a_tag_is_set_moved_listed_and_removed(published):
    assert ah.tag("polite") == {}
    assert ah.tag("polite@v1", "best") == {"best": "v1"}
    assert ah.pull("polite@best").name == "v1"
    assert ah.tag("polite", "best") == {"best": "v2"}, "the newest"
    assert ah.tag("polite@best", "good") == {"best": "v2", "good": "v2"}
    assert ah.tag("polite", "best", remove=True) == {"good": "v2"}
    assert [entry.tags for entry in ah.search()] == [("good",)]


def test_removing_what_is_not_there(published):
    ah.tag("polite@v1", "best")
    with pytest.raises(ConfigError, match="unknown tag of polite 'bset'; did you mean 'best'"):
        ah.tag("polite", "bset", remove=True)
    with pytest.raises(ConfigError, match="polite@best is v1, not v2"):
        ah.tag("polite@v2", "best", remove=True)
    assert ah.tag("polite@v1", "best", remove=True) == {}


@pytest.mark.parametrize("tag", ["v3", "3", "-x", "a b", "con"])
def test_an_invalid_tag(published, tag):
    with pytest.raises(ConfigError, match="invalid tags"):
        ah.tag("polite", tag)


def test_a_version_that_was_deleted_meanwhile_gets_no_tag(published):
    entry = published.resolve("polite", "v1")
    ah.delete("polite@v1")
    with pytest.raises(RegistryError, match="polite@v1 was deleted"):
        published.tag(entry, "best")
    assert ah.tag("polite") == {}


def test_tags_of_a_hub_are_set_and_removed(hub, tmp_path):
    reference = f"{hub.address}/acme/polite"
    ah.push(registries.write_sample(tmp_path / "made"), reference, peft=False, tags=("best",))
    assert ah.tag(reference) == {"best": "v1"}
    assert ah.tag(reference, "good") == {"best": "v1", "good": "v1"}
    assert ah.tag(reference, "good", remove=True) == {"best": "v1"}
    with pytest.raises(ConfigError, match="is a folder"):
        ah.tag("./polite", "good")
