"""Claims on trained weights: `make real-test` fetches the models and runs these tests."""

import json
import os
from pathlib import Path

import pytest
import real_models


def real_model(name: str) -> str:
    """Return the folder of a model, or skip with the reason."""
    if "ADAPTERHUB_REAL" not in os.environ:
        pytest.skip("on trained weights: make real-test")
    if (folder := real_models.folder_of(name)) is None:
        pytest.skip(f"{name} is not in build/models: make real-models")
    return str(folder)


@pytest.fixture(scope="session")
def smollm2() -> str:
    return real_model("smollm2")


@pytest.fixture(scope="session")
def flan_t5() -> str:
    return real_model("flan-t5-small")


@pytest.fixture(scope="session")
def whisper() -> str:
    return real_model("whisper-tiny.en")


@pytest.fixture(scope="session")
def tickets(tmp_path_factory) -> tuple[Path, Path]:
    """Chats to train on, and others to ask."""
    from adapterhub.data.tickets import load_tickets

    folder = tmp_path_factory.mktemp("tickets")
    files = folder / "train.jsonl", folder / "held-out.jsonl"
    for file, chats in zip(files, load_tickets(), strict=True):
        file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return files
