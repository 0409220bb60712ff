"""`adapterhub registry verify`, `index` and `gc`."""

from __future__ import annotations

import pytest

from adapterhub.errors import FileError, RegistryError
from tests.kit import registries


def test_a_damaged_version_is_found(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert "all versions are intact" in typed("registry verify")
    (stored,) = (tmp_path / "registry").rglob("adapter.safetensors")
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(FileError, match="problems in") as error:
        typed("registry verify")
    assert any("polite" in offender for offender in error.value.offenders)


def test_the_index_is_rebuilt_and_leftovers_are_counted(typed, tmp_path):
    registries.write_sample(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    assert "1 name indexed" in typed("registry index")
    assert "0 leftovers removed" in typed("registry gc")


MISTYPED = (
    "registry verify",
    "registry gc",
    "registry index",
    "list",
    "show polite",
    "pull polite",
    "lock polite",
    "sync",
    "sync --to present",
    "yank polite@v1 --reason x",
)


@pytest.mark.parametrize("command", MISTYPED)
def test_a_registry_that_does_not_exist_is_an_error(typed, tmp_path, command):
    registries.write_sample(tmp_path / "run" / "adapter", 0)
    typed("publish run --name polite --registry registry")
    typed("lock polite --registry registry")
    typed("sync --to present")
    with pytest.raises(RegistryError, match=r"no registry 'regstry'; did you mean 'registry'"):
        typed(f"{command} --registry regstry")
    assert not (tmp_path / "regstry").exists()
    (tmp_path / "regstry").write_text("a file")
    with pytest.raises(RegistryError, match="no registry"):
        typed(f"{command} --registry regstry")


def test_the_default_registry_may_be_missing(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "none-yet"))
    assert "intact" in typed("registry verify")
    assert "0 names" in typed("registry index")
    assert "0 leftovers" in typed("registry gc")
    assert "no adapter in the registry" in typed("list")
    with pytest.raises(RegistryError, match="has no adapter 'polite'"):
        typed("show polite")
    assert not (tmp_path / "none-yet").exists()
