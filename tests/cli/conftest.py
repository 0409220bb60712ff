"""Fixtures of the command-line tests."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from adapterhub import cli
from adapterhub.errors import AdapterhubError


@pytest.fixture
def trained(train, tmp_path):
    """The output folder of a run of one epoch."""
    assert train("train.epochs=1")[0] == 0
    return tmp_path / "run"


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
