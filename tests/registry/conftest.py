"""A local server with the Hub's protocol."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from tests.kit import fake_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Start a server with the Hub's protocol at `hub.address`, with empty caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with fake_hub.serving() as (hub, address):
        hub.address = address
        yield hub
