"""`adapterhub sync`."""

from __future__ import annotations

from tests.kit import registries


def test_sync_restores_what_is_missing(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    typed("lock polite")
    assert typed("sync") == "adapters: 1 restored, 0 already present\n"
    assert typed("sync") == "adapters: 0 restored, 1 already present\n"
    assert (tmp_path / "adapters" / "polite" / "adapter.json").is_file()


def test_sync_finds_the_registry_of_the_lock_file(typed, tmp_path, monkeypatch):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    (tmp_path / "project").mkdir()
    typed("publish run --name polite --registry project/shared")
    typed("lock polite --registry project/shared --file project/adapterhub.lock")
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "of-another-machine"))
    restored = typed("sync --file project/adapterhub.lock --to project/adapters")
    assert restored == "project/adapters: 1 restored, 0 already present\n"
