"""A checkpoint that peft trained, for tests that alter it."""

import shutil

import pytest


@pytest.fixture(scope="session")
def trained_checkpoint(tmp_path_factory):
    from tests.kit.peers import lora_config, trained

    config = lora_config(r=8, lora_alpha=8, target_modules=["query"])
    return trained(tmp_path_factory.mktemp("trained") / "theirs", "bert", config)


@pytest.fixture
def checkpoint(trained_checkpoint, tmp_path):
    """Return a copy of a LoRA checkpoint of a BERT classifier."""
    return shutil.copytree(trained_checkpoint, tmp_path / "theirs")
