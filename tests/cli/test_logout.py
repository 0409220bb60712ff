"""`adapterhub logout`."""

from __future__ import annotations

import pytest

from adapterhub.errors import ConfigError
from adapterhub.registry.tokens import login, token_for


def test_a_token_is_deleted(typed, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    login("https://one.example.org", "my-token-123")
    login("https://two.example.org", "my-token-456")
    assert typed("logout https://one.example.org") == (
        "deleted the token for https://one.example.org\n"
    )
    assert token_for("https://one.example.org") is None
    assert token_for("https://two.example.org") == "my-token-456"
    with pytest.raises(ConfigError, match="no token is stored"):
        typed("logout https://one.example.org")
