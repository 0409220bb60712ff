"""A running server with an adapter for each form of answers, and what `predict` prints for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapterhub.serving import Engine
from adapterhub.serving.adapter_cache import BareBackbone
from adapterhub.serving.http.request import Service
from tests.kit import server as kit
from tests.kit.server import NAMED, TaskExample


@dataclass(frozen=True)
class Served:
    """A server: its address, its service, and the folders of its adapters."""

    url: str
    service: Service
    folders: dict[str, str]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the backbone."""
        bare = self.service.engine.adapters.find(BareBackbone.VECTORS)
        return bare.result().predictor.tokenizer

    def expected(self, name: str, *inputs: Any) -> list[dict[str, Any]]:
        """Return what `predict --json` prints; by default for the inputs of the task."""
        return kit.expected_answers(self.folders[name], inputs or NAMED[name].inputs)


@pytest.fixture(scope="session")
def server(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve an adapter for each form of answers."""
    folders = kit.write_named(backbone, tmp_path_factory.mktemp("named"))
    with Engine(str(backbone)) as engine:
        service = kit.service_of(engine, folders)
        with kit.running(service) as url:
            yield Served(url, service, folders)


@pytest.fixture(scope="session")
def writing(backbones: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve two adapters that write, and one that has classes; return address, folders, service."""
    backbone, folder = backbones("llama"), tmp_path_factory.mktemp("written")
    short = TaskExample("causal-lm(new_tokens=8)", "causal-lm")
    folders = {
        "writer": kit.write_wordy(backbone, folder / "one", short),
        "other": kit.write_wordy(backbone, folder / "two", short, "prefix(length=3)"),
        "classes": kit.write_adapter(backbone, folder / "three"),
    }
    with Engine(str(backbone)) as engine:
        service = kit.service_of(engine, folders)
        with kit.running(service) as url:
            yield url, folders, service


@pytest.fixture(scope="session")
def llama_folders(backbones: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write adapters of a backbone whose tokenizer adds no token to a text."""
    folder = tmp_path_factory.mktemp("of-llama")
    examples = {
        "writer": TaskExample("causal-lm(new_tokens=4)", "causal-lm"),
        "vectors": TaskExample("embedding", "embedding"),
        "classes": TaskExample("classification", "classification", ("neg", "pos")),
        "tags": TaskExample("tagging", "tagging", ("O", "B-x")),
    }
    llama = backbones("llama")
    return {
        name: kit.write_adapter(llama, folder / name, example=e) for name, e in examples.items()
    }


@pytest.fixture
def url(service):
    """Serve a test's service, and return its address."""
    with kit.running(service) as url:
        yield url
