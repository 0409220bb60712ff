"""An adapter is published after those that it was trained on."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.publish import PublicationInfo
from tests.kit import tiny_adapters, tiny_models


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    return LocalRegistry(tmp_path / "registry")


@pytest.fixture
def task(tmp_path):
    """An adapter on one that was trained in a folder; its outputs."""
    return tiny_adapters.save_on(tmp_path / "task", [tiny_adapters.save_alone(tmp_path / "lang")])


def test_one_on_an_unpublished_one_says_what_to_type(registry, task, tmp_path):
    with pytest.raises(RegistryError, match="'lang', which is not published with it") as error:
        ah.publish(tmp_path / "task")
    (copy,) = (tmp_path / "task" / "on").iterdir()
    assert error.value.hint == f"adapterhub publish {copy} --name lang first, then this one"
    ah.publish(copy, "lang")
    ah.publish(tmp_path / "task")
    model = tiny_models.model("bert")
    ah.load(model, "task")
    assert torch.equal(tiny_adapters.outputs(model), task)


def test_a_folder_is_recognized_by_its_content_under_any_name(registry, task, tmp_path):
    """The licence is part of the manifest: the published digest is another one."""
    ah.publish(tiny_adapters.save_alone(tmp_path / "other", seed=9), "lang")
    info = PublicationInfo(license="apache-2.0")
    entry = ah.publish(tmp_path / "lang", "german", listing=info)
    assert entry.digest != Saved.at(tmp_path / "task").manifest.on[0].digest
    ah.publish(tmp_path / "task")
    (ref,) = Saved.at(ah.pull("task")).manifest.on
    assert (ref.name, ref.version, ref.reference) == ("german", "v1", "german@v1")
    assert ref.digest == entry.digest
    model = tiny_models.model("bert")
    ah.load(model, "task")
    assert torch.equal(tiny_adapters.outputs(model), task)


def test_a_yanked_one_is_not_used(registry, task, tmp_path):
    registry.yank(ah.publish(tmp_path / "lang"), "bad")
    with pytest.raises(RegistryError, match="not published with it"):
        ah.publish(tmp_path / "task")
    assert not registry.has("task")


def test_a_chain_is_published_from_below(registry, tmp_path):
    tiny_adapters.save_on(
        tmp_path / "domain", [tiny_adapters.save_alone(tmp_path / "lang")], "houlsby(size=4)"
    )
    expected = tiny_adapters.save_on(tmp_path / "task", [tmp_path / "domain"])
    info = PublicationInfo(license="mit")
    for name in ("lang", "domain", "task"):
        ah.publish(tmp_path / name, listing=info)
    model = tiny_models.model("bert")
    ah.load(model, "task")
    assert torch.equal(tiny_adapters.outputs(model), expected)


def test_a_hub_has_them_with_the_same_owner(hub, task, tmp_path, monkeypatch):
    folder = tmp_path / "task"
    target = f"{hub.address}/me/task"
    with pytest.raises(RegistryError, match="not published with it") as error:
        ah.push(folder, target, peft=False)
    (copy,) = (folder / "on").iterdir()
    hint = f"adapterhub push {copy} {hub.address}/me/lang first, then this one"
    assert error.value.hint == hint
    assert "me/task" not in hub.repositories
    ah.push(copy, f"{hub.address}/me/lang", peft=False, listing=PublicationInfo(license="mit"))
    notes: list[str] = []
    ah.push(folder, target, peft=True, note=notes.append)
    assert notes == [
        "plain peft cannot load it: it is on top of lang: peft's files contain one adapter"
    ]
    for variable in ("XDG_CACHE_HOME", "ADAPTERHUB_STATE"):
        monkeypatch.setenv(variable, str(tmp_path / "another-machine" / variable))
    model = tiny_models.model("bert")
    ah.load(model, target)
    assert torch.equal(tiny_adapters.outputs(model), task)
    (ref,) = Saved.at(ah.pull(target)).manifest.on
    assert (ref.name, ref.reference) == ("me/lang", f"{hub.address}/me/lang@{ref.version}")
