"""`ah.search` passes a query to the local registry or to a hub."""

from __future__ import annotations

import pytest
import sample_adapters

import adapterhub as ah
from adapterhub.errors import ConfigError, RegistryError


def test_the_fields_of_a_query_are_keywords(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry = tmp_path / "registry"
    for name, accuracy in (("a", 0.5), ("b", 0.75)):
        folder = sample_adapters.write(tmp_path / name, accuracy=accuracy)
        ah.publish(folder, name, registry=registry)
    best = ah.search("bert", registry=registry, sort="accuracy", method="lora", limit=1)
    assert [entry.name for entry in best] == ["b"]
    assert ah.search(registry=registry, task="tagging") == []
    with pytest.raises(RegistryError, match="no registry"):
        ah.search(registry=tmp_path / "missing")
    with pytest.raises(TypeError, match="colour"):
        ah.search(registry=registry, colour="red")


def test_a_hub_is_searched_by_its_url(hub, tmp_path):
    folder = sample_adapters.write(tmp_path / "made")
    entry = ah.push(folder, f"{hub.address}/acme/polite", peft=False)
    assert ah.search(hub=hub.address) == ah.search("poli", hub=f"{hub.address}/") == [entry]
    with pytest.raises(ConfigError, match="https"):
        ah.search(hub="ftp://h.org")
