"""Adapters that several tests serve, saved once."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import adapterhub as ah
from adapterhub.backbones.find import remember_folder
from adapterhub.files.native import Saved
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine
from tests.kit.server import busy, write_adapter


@pytest.fixture(autouse=True)
def known_backbone(backbone: Path, polite: str, no_home: None) -> None:
    """Let adapters that were saved for the session find their backbone from the home of a test."""
    remember_folder(Saved.at(Path(polite)).manifest.backbone.id, backbone)


@pytest.fixture
def held(engine: Engine) -> Iterator[threading.Event]:
    """Keep the compute thread of a test's engine busy until the event is set."""
    with busy(engine) as free:
        yield free


@pytest.fixture(scope="session")
def polite(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write one adapter."""
    return write_adapter(backbone, tmp_path_factory.mktemp("one") / "polite")


@pytest.fixture(scope="session")
def two_versions(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish two versions of `polite`; the tag `stable` is the first. Return their folder."""
    folder = tmp_path_factory.mktemp("published")
    for number in (1, 2):
        made = write_adapter(backbone, folder / f"v{number}", seed=number)
        ah.publish(made, "polite", registry=folder / "registry")
    store = LocalRegistry(folder / "registry")
    store.tag(store.resolve("polite", "v1"), "stable")
    return folder


@pytest.fixture
def published(two_versions: Path, tmp_path: Path) -> list[str]:
    """Copy the registry, for tests change it; return the folders of both versions."""
    shutil.copytree(two_versions / "registry", tmp_path / "registry")
    return [str(two_versions / f"v{number}") for number in (1, 2)]
