"""A Hub of one's own."""

from __future__ import annotations

import hub_server
import pytest
from huggingface_hub import constants


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server that speaks the Hub's protocol, at `hub.address`; caches are empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server.serving() as (hub, address):
        hub.address = address
        yield hub
