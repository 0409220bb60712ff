"""`ah.pull` returns the verified files of a folder, a registry or a hub."""

from __future__ import annotations

import warnings

import pytest

import adapterhub as ah
from adapterhub.errors import FileError, OutputError, RegistryError
from adapterhub.files.native import Saved
from tests.kit import registries


@pytest.fixture
def registry(tmp_path):
    for seed in (0, 1):
        ah.publish(
            registries.write_sample(tmp_path / f"made-{seed}", seed), registry=tmp_path / "r"
        )
    return tmp_path / "r"


def test_a_name_is_pulled_from_the_registry(registry, tmp_path):
    stored = ah.pull("polite@v1", registry=registry)
    assert registry in stored.parents
    copy = ah.pull("polite@v1", tmp_path / "mine", registry=registry)
    assert copy == tmp_path / "mine"
    assert (
        Saved.at(copy).read()[0]
        == Saved.at(stored).read()[0]
        == Saved.at(tmp_path / "made-0").read()[0]
    )
    before = (copy / "adapter.json").stat().st_mtime_ns
    assert ah.pull("polite@v1", copy, registry=registry) == copy  # it has these files already
    assert (copy / "adapter.json").stat().st_mtime_ns == before
    with pytest.raises(OutputError):
        ah.pull("polite@v2", copy, registry=registry)
    (copy / "adapter.safetensors").chmod(0o644)
    (copy / "adapter.safetensors").write_bytes(b"changed")
    with pytest.raises(OutputError):
        ah.pull("polite@v1", copy, registry=registry)
    assert (copy / "adapter.safetensors").read_bytes() == b"changed"
    with pytest.raises(RegistryError, match="no version v3"):
        ah.pull("polite@v3", registry=registry)


def test_a_tag_on_a_hub_is_pulled(hub, tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    ah.push(folder, f"{hub.address}/acme/polite", tags=("best",), peft=False)
    copy = ah.pull(f"{hub.address}/acme/polite@best", tmp_path / "mine")
    assert Saved.at(copy).read()[0] == Saved.at(folder).read()[0]


def test_a_folder_is_returned_as_it_is(tmp_path):
    folder = registries.write_sample(tmp_path / "run" / "adapter")
    assert ah.pull(folder) == ah.pull(tmp_path / "run") == folder
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "adapter_config.json").write_text("{}")
    assert ah.pull(tmp_path / "foreign") == tmp_path / "foreign"
    with pytest.raises(FileError):
        ah.pull(tmp_path)


def test_a_yanked_version_comes_with_a_warning(registry):
    ah.yank("polite@v1", "trained on the dev set", registry=registry)
    with pytest.warns(UserWarning, match="polite@v1 was yanked: trained on the dev set"):
        ah.pull("polite@v1", registry=registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ah.pull("polite", registry=registry)
