"""A reference selects a folder or its store."""

from __future__ import annotations

import shutil

import pytest

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry, store_of
from adapterhub.registry.publish import publish
from adapterhub.registry.pull import pull, read_reference
from adapterhub.registry.store import Reference, parse_reference
from tests.kit import registries


def test_each_kind_of_reference_has_its_store(tmp_path):
    local = store_of(parse_reference("polite"), tmp_path)
    assert isinstance(local, LocalRegistry)
    assert local.root == tmp_path
    hub = store_of(parse_reference("hf:some/polite"), allow_pickle=True)
    assert isinstance(hub, HubStore)
    assert (hub.prefix, hub.allow_pickle) == ("hf:", True)
    server = store_of(parse_reference("https://h.org/some/polite@v1"))
    assert isinstance(server, HubStore)
    assert server.prefix == "https://h.org/"
    with pytest.raises(ConfigError, match="is a folder"):
        store_of(parse_reference("./polite"))


def test_a_folder_never_stands_for_a_hub(tmp_path, monkeypatch):
    """A cloned project may contain folders of any name."""
    monkeypatch.chdir(tmp_path)
    for text in ("hf:acme/polite", "https://h.org/acme/polite", "some/polite"):
        (tmp_path / text).mkdir(parents=True)
    assert read_reference("hf:acme/polite").kind == "hub"
    assert read_reference("https://h.org/acme/polite").kind == "server"
    assert read_reference("some/polite") == Reference("folder", "some/polite")
    assert read_reference("./hf:acme/polite").kind == "folder"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, beside an empty registry of one's own."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_bare_name_is_the_folder_with_an_adapter(here):
    for folder in ("mine/adapter", "plain", "my run"):
        registries.write_sample(here / folder)
    (here / "theirs").mkdir()
    (here / "theirs" / "adapter_config.json").write_text("{}")
    for name in ("mine", "plain", "my run", "theirs"):
        assert read_reference(name) == Reference("folder", f"./{name}")
    assert read_reference("mine@v1") == Reference("local", "mine", "v1")
    assert read_reference("mine", here.parent / "registry").kind == "local"
    assert read_reference("missing").kind == "local"


def test_the_registry_has_the_name_too(here):
    registries.write_sample(here / "mine" / "adapter", 1)
    publish(registries.write_sample(here.parent / "made", 2), "mine")
    with pytest.warns(UserWarning, match=r"'mine' is the folder \./mine here; write mine@VERSION"):
        assert pull("mine").name == "adapter"
    assert Saved.at(pull("mine@v1")).digest == Saved.at(here.parent / "made").digest
    assert (
        Saved.at(pull("mine", registry=here.parent / "registry")).digest
        == Saved.at(pull("mine@v1")).digest
    )
    assert Saved.at(pull("./mine")).digest == Saved.at(here / "mine" / "adapter").digest


def test_a_folder_of_something_else_hides_no_published_adapter(here):
    (here / "mine" / "checkpoints").mkdir(parents=True)
    (here / "mine" / "recipe.yaml").write_text("backbone: x\n")
    with pytest.raises(FileError) as error:
        pull("mine")
    assert str(error.value) == (
        "the folder mine has no adapter\n  - in it: checkpoints/, recipe.yaml\n"
        "  expected: the folder of an adapter, or the output folder of a finished run\n"
        "  try: adapterhub train mine/recipe.yaml --resume, if the run was stopped"
    )
    publish(registries.write_sample(here.parent / "made"), "mine")
    assert read_reference("mine").kind == "local"


def test_a_name_that_must_be_signed_is_never_a_folder(here):
    """A cloned project has a folder that is called as an adapter of the user."""
    folder = registries.write_sample(here / "polite" / "adapter", 1)
    key = registries.new_key()
    registries.require_key(key)
    with pytest.raises(RegistryError, match="has no adapter 'polite'"):
        pull("polite")
    publish(registries.write_sample(here.parent / "made"), "polite", sign=key)
    assert Saved.at(pull("polite")).digest != Saved.at(folder).digest
    assert read_reference("POLITE").kind == "local"
    shutil.move(here / "polite", here / "other")
    assert read_reference("other").kind == "local"
    assert read_reference("./other").kind == "folder"


def test_an_argument_that_requires_a_signature_counts_too(here):
    registries.write_sample(here / "polite" / "adapter")
    assert read_reference("polite").kind == "folder"
    assert read_reference("polite", signed=True).kind == "local"


def test_an_unknown_name_suggests_folders(here):
    registries.write_sample(here / "runs" / "mine" / "adapter")
    for name, folder in (("mine", "runs/mine"), ("mime", "runs/mine")):
        with pytest.raises(RegistryError) as error:
            pull(name)
        assert f"the folder {folder} has an adapter" in str(error.value)
        assert f"try: {folder} for that folder; adapterhub publish {folder}" in str(error.value)


def test_a_folder_is_copied_to_a_new_one(here):
    made = registries.write_sample(here / "mine" / "adapter")
    copy = pull("mine", "copy")
    assert Saved.at(copy).digest == Saved.at(made).digest
    assert sorted(p.name for p in copy.iterdir()) == sorted(p.name for p in made.iterdir())
