"""Fixtures: a valid adapter to attack, and its backbone."""

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


@pytest.fixture(scope="session")
def run(backbone: Path, tmp_path_factory) -> Path:
    """The folder of a training run, with three labels."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b", "c"])
    adapter = ah.attach(model, "lora(rank=2)", name="default")
    adapter.metadata.training = {"recipe": {"task": "classification", "data": {"text": "text"}}}
    adapter.save(folder / "adapter")
    (folder / "recipe.yaml").write_text(f"backbone: {backbone}\n", encoding="utf-8")
    return folder


@pytest.fixture
def canary(tmp_path: Path):
    """A path that exists only if an attack's code has run."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code was executed"
