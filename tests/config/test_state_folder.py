"""The folder of what adapterhub remembers for a user."""

from __future__ import annotations

from pathlib import Path

from adapterhub.config.state_folder import STATE_VARIABLE, state_folder


def test_the_variable_comes_before_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    assert state_folder() == tmp_path
    monkeypatch.delenv(STATE_VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert state_folder().name == "adapterhub"
    assert isinstance(state_folder(), Path)
