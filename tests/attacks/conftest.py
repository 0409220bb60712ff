"""Fixtures: a valid adapter to attack, and its backbone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forge import new_model, save_valid

import adapterhub as ah
from adapterhub.adapters.state import find_state


@pytest.fixture(scope="session")
def session_model():
    return new_model()


@pytest.fixture
def model(session_model):
    yield session_model
    if find_state(session_model):
        ah.detach(session_model)


@pytest.fixture(scope="session")
def valid(tmp_path_factory) -> Path:
    return save_valid(tmp_path_factory.mktemp("valid") / "a")


@pytest.fixture
def saved(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "a"))


@pytest.fixture
def canary(tmp_path: Path):
    """A path that exists only if an attack's code has run."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code was executed"
