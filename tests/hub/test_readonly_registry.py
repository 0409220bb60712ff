"""A registry in a folder, read by clients of the Hub."""

from __future__ import annotations

import socket

import httpx2
import pytest

from adapterhub.hub import readonly_registry
from adapterhub.hub.commits import TAG, refs_of
from adapterhub.hub.import_export import answering_in_thread
from adapterhub.hub.readonly_registry import is_registry, viewing
from adapterhub.hub.server import HubApp, known_hosts
from adapterhub.hub.state import HubOptions
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Publication
from tests.kit import registries
from tests.kit.real_hub import answered, commit
from tests.kit.session import wait_until

pytestmark = pytest.mark.usefixtures("online")


def test_a_registry_is_a_hub_that_only_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(readonly_registry, "_LOOK_SECONDS", 0.05)
    registry = LocalRegistry(tmp_path / "registry")
    registry.root.mkdir()

    def publish(seed, **options):
        folder = registries.write_sample(tmp_path / f"made-{seed}", seed)
        options["published"] = f"2026-11-2{seed}T10:00:00Z"
        return registry.put(folder, Publication("polite", **options))

    assert not is_registry(registry.root)
    first, second = publish(0, tags=("best",)), publish(1)
    registry.yank(publish(2), "why not")
    assert is_registry(registry.root)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    options = HubOptions(hosts=known_hosts("127.0.0.1", port))
    with viewing(registry.root, options) as hub, answering_in_thread(HubApp(hub), listening):
        address = f"http://127.0.0.1:{port}"
        store = HubStore(address, token=False)
        assert [entry.version for entry in store.versions("registry/polite")] == ["v1", "v2", "v3"]
        assert store.resolve("registry/polite").digest == second.digest
        assert store.resolve("registry/polite", "best").digest == first.digest
        assert store.resolve("registry/polite", "v3").yanked == "why not"
        got = store.get(store.resolve("registry/polite", "best"))
        for file in ("adapter.safetensors", "adapter.json", "README.md"):
            version = registry.root / "acme--bert-small/polite/v1"
            assert (got / file).read_bytes() == (version / file).read_bytes()
        with httpx2.Client(base_url=address) as client:
            url = "/api/models/registry/polite/refs"
            tags = client.get(url).json()["tags"]
            answered(commit(client, "registry/polite", {"a.md": b"a"}), 403, "adapterhub publish")
            assert client.get("/registry/polite").status_code == 200
            publish(3)
            wait_until(lambda: client.get(url).json()["tags"] != tags)
        assert store.resolve("registry/polite").version == "v4"
    with viewing(registry.root, options) as again, again.database.reading() as connection:
        found = refs_of(connection, 1)[TAG]
    assert {each["name"]: each["targetCommit"] for each in tags}.items() <= found.items()
