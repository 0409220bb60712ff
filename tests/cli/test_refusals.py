"""What commands refuse in an empty folder, and what to type instead."""

from __future__ import annotations

import pytest

from tests.kit.session import refused


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pull some/polite", "hf:some/polite"),
        ("pull polite", "adapterhub list"),
        ("delete polite", "does not name one version"),
        ("lock one two --name ours", "--name takes a single REFERENCE"),
        ("publish nothing", "no such folder: 'nothing'"),
        ("push nothing polite", "hf:owner/name"),
        ("sync", "adapterhub lock"),
        ("yank polite --reason x", "polite@v1"),
        ("trian", "'train'"),
    ],
)
def test_what_a_command_refuses(adapterhub, tmp_path, monkeypatch, line, expected):
    monkeypatch.chdir(tmp_path)
    refused(adapterhub(*line.split()), expected)
