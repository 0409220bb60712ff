"""Caches of a test's own, a working directory, and a server with the Hub's protocol."""

import pytest
from huggingface_hub import constants

from tests.kit import fake_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Start a server with the Hub's protocol at `hub.address`, with empty caches."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with fake_hub.serving() as (hub, address):
        hub.address = address
        yield hub


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, beside an empty registry of one's own."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Give each test an empty cache at `tmp_path / "cache"`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
