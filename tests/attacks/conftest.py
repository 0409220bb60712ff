"""A sound adapter to attack, and the model that it is for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forge import new_model, save_sound

import adapterhub as ah
from adapterhub.adapters.state import find_state


@pytest.fixture(scope="session")
def one_model():
    return new_model()


@pytest.fixture
def model(one_model):
    yield one_model
    if find_state(one_model):
        ah.detach(one_model)


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    return save_sound(tmp_path_factory.mktemp("sound") / "a")


@pytest.fixture
def saved(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "a"))


@pytest.fixture
def canary(tmp_path: Path):
    """A file that appears when code of an attack runs."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code was executed"
