"""A hub for each module, with an organisation and users, and one for tests that change much.

`make test-all` has each of them in a folder and in PostgreSQL and a bucket.
"""

import pytest

from tests.kit import real_hub
from tests.kit.real_hub import STATES, place_of


def with_users(hub):
    hub.org("acme")
    hub.user("root", "admin", is_admin=True)
    hub.user("ada", "admin", acme="admin")
    hub.user("wil", acme="write")
    hub.user("eve")
    return hub


@pytest.fixture(scope="module", params=STATES)
def hub(request, tmp_path_factory):
    place, blobs = place_of(request, tmp_path_factory.mktemp("hub") / "hub")
    with real_hub.serving(place, blobs=blobs) as running:
        yield with_users(running)


@pytest.fixture(scope="module")
def client(hub):
    """The client of an administrator of acme."""
    return hub.as_user("ada")


@pytest.fixture(params=STATES)
def new_hub(request, tmp_path):
    place, blobs = place_of(request, tmp_path / "hub")
    with real_hub.serving(place, blobs=blobs) as running:
        yield with_users(running)


@pytest.fixture
def ada(new_hub):
    """The same of a new hub."""
    return new_hub.as_user("ada")


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Let huggingface_hub ask a server, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
