"""Fixtures of the command-line tests."""

import os
import shutil

import pytest
from click.testing import CliRunner

from adapterhub import cli
from adapterhub.errors import AdapterhubError
from tests.kit.data import sentences, write_tsv
from tests.kit.session import home_in


@pytest.fixture(scope="session")
def trained_once(backbone, tmp_path_factory):
    """A folder with a run of two epochs and the user's state after it, and what it printed."""
    folder = tmp_path_factory.mktemp("trained-once")
    rows = sentences(64)
    words = ["train", "--backbone", backbone, "--output", folder / "run", "train.epochs=2"]
    words += ["--train", write_tsv(folder / "train.tsv", rows)]
    words += ["--eval", write_tsv(folder / "dev.tsv", rows[::3])]
    words += ["train.tensorboard=false"]
    with home_in(folder):
        result = CliRunner().invoke(cli.group, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return folder, result


@pytest.fixture
def trained(trained_once, data, tmp_path):
    """A copy of the output folder of a run of two epochs on data of the same content."""
    folder, _ = trained_once
    shutil.copytree(folder / "state", os.environ["ADAPTERHUB_STATE"])
    return shutil.copytree(folder / "run", tmp_path / "run")


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Run a command line with a registry of its own; return its output or raise its error."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def typed(line):
        result = CliRunner().invoke(cli.group, line.split())
        if isinstance(result.exception, AdapterhubError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return typed
