"""A hub for each module, with an organisation and users, and one for tests that change much."""

from __future__ import annotations

import pytest
import real_hub


def with_users(hub):
    hub.org("acme")
    hub.user("root", "admin", is_admin=True)
    hub.user("ada", "admin", acme="admin")
    hub.user("wil", acme="write")
    hub.user("eve")
    return hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with real_hub.serving(tmp_path_factory.mktemp("hub") / "hub") as running:
        yield with_users(running)


@pytest.fixture
def new_hub(tmp_path):
    with real_hub.serving(tmp_path / "hub") as running:
        yield with_users(running)


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Let huggingface_hub ask a server, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
