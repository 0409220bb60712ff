"""`adapterhub delete`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from adapterhub.cli import delete
from adapterhub.errors import ConfigError, RegistryError
from tests.kit import registries


@pytest.fixture
def published(typed, tmp_path):
    for seed in (0, 1):
        registries.write_sample(tmp_path / f"made-{seed}", seed)
        typed(f"publish ./made-{seed} --name polite")


def test_delete_asks_first(typed, published, monkeypatch):
    with pytest.raises(ConfigError, match="not running in a terminal") as error:
        typed("delete polite@v1")
    assert "try: --yes" in str(error.value)
    assert typed("delete polite@v1 --yes") == "deleted polite@v1\n"
    assert json.loads(typed("delete polite@v2 --yes --json")) == {"deleted": "polite@v2"}
    assert "no adapter in the registry" in typed("list")


@pytest.mark.parametrize(("answer", "left"), [("y", False), ("", True)])
def test_the_answer_counts(typed, published, monkeypatch, answer, left):
    asked = []

    def confirm(question, **options):
        asked.append(question)
        if not answer:
            raise SystemExit(0)

    monkeypatch.setattr(delete.click, "confirm", confirm)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(delete, "sys", SimpleNamespace(stdin=terminal))
    typed("delete polite@v1")
    assert asked[0].startswith("Delete polite@v1 from ")
    assert ("polite@v1" in typed("list --all")) == left


def test_a_pinned_version_needs_force(typed, published):
    typed("lock polite@v1")
    with pytest.raises(RegistryError, match="pinned"):
        typed("delete polite@v1 --yes")
    typed("delete polite@v1 --yes --force")
