"""A project's adapters, pinned by digest and restored exactly."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import sample_adapters

from adapterhub.errors import ConfigError, FileError, MismatchError, RegistryError
from adapterhub.files.native import read_adapter
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, read_lock, sync, with_pins, write_lock
from adapterhub.registry.pull import pull
from adapterhub.registry.store import Publication


@pytest.fixture
def registry(tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    for seed in (0, 1):
        store.put(sample_adapters.write(tmp_path / f"made-{seed}", seed), Publication("polite"))
    store.tag(store.resolve("polite", "v1"), "best")
    return store


def test_a_tag_is_pinned_as_its_version(registry, tmp_path):
    name, pinned = pin("polite@best", registry.root)
    assert (name, pinned.reference) == ("polite", "polite@v1")
    registry.tag(registry.resolve("polite", "v2"), "best")
    write_lock(tmp_path / "adapterhub.lock", {name: pinned})
    again = read_lock(tmp_path / "adapterhub.lock")
    assert again == {name: pinned}
    assert sync(again, tmp_path / "adapters", registry.root) == ["polite"]
    _, tensors = read_adapter(tmp_path / "adapters" / "polite")
    assert float(next(iter(tensors.values()))[0, 0]) == 0.0
    assert sync(again, tmp_path / "adapters", registry.root) == []


def test_other_bytes_are_refused_and_nothing_is_replaced(registry, tmp_path):
    pins = dict([pin("polite@v1", registry.root)])
    kept = registry.root / "acme--bert-small" / "polite" / "v1"
    shutil.rmtree(kept)
    sample_adapters.write(kept, seed=9)
    with pytest.raises(MismatchError, match="lock file") as caught:
        sync(pins, tmp_path / "adapters", registry.root)
    assert "polite@v1" in str(caught.value)
    assert not (tmp_path / "adapters").exists()
    sample_adapters.write(tmp_path / "adapters" / "polite", seed=9)
    with pytest.raises(MismatchError):
        sync(pins, tmp_path / "adapters", registry.root)


def test_a_missing_adapter_is_an_error(registry, tmp_path):
    pins = dict([pin("polite", registry.root)])
    with pytest.raises(RegistryError):
        sync(pins, tmp_path / "adapters", tmp_path / "empty")


def test_a_folder_cannot_be_pinned(registry, tmp_path):
    with pytest.raises(ConfigError, match="publish"):
        pin(str(tmp_path / "made-0"), registry.root)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "adapters": {}}', '{"version": 1}'])
def test_an_invalid_lock_file_is_an_error(tmp_path, text):
    (tmp_path / "adapterhub.lock").write_text(text)
    with pytest.raises(FileError, match="not a lock file"):
        read_lock(tmp_path / "adapterhub.lock")


def test_a_name_in_a_lock_file_is_never_a_path(tmp_path):
    good = '{"backbone": "a/b", "digest": "%s", "fingerprint": "x", "reference": "polite@v1"}'
    for name in ("../x", "/etc/x", "a/b", "."):
        pinned = good % ("0" * 64)
        text = f'{{"adapters": {{"{name}": {pinned}}}, "version": 1}}'
        (tmp_path / "adapterhub.lock").write_text(text)
        with pytest.raises(FileError):
            read_lock(tmp_path / "adapterhub.lock")


def test_two_adapters_cannot_share_a_name(registry, tmp_path):
    first = pin("polite@v1", registry.root)
    pins = with_pins({}, [first])
    assert with_pins(pins, [pin("polite@v2", registry.root)])["polite"].reference == "polite@v2"
    theirs = ("polite", replace(first[1], reference="hf:someone/polite@v1"))
    with pytest.raises(ConfigError, match="same name") as caught:
        with_pins(pins, [theirs])
    assert "hf:someone/polite@v1" in str(caught.value)
    name, pinned = pin("polite@v1", registry.root, name="second")
    assert with_pins(pins, [(name, pinned)]).keys() == {"polite", "second"}
    for wrong in ("../x", "a/b", ""):
        with pytest.raises(ConfigError):
            pin("polite", registry.root, name=wrong)


def test_a_yanked_version_is_pinned_with_a_warning(registry, tmp_path):
    registry.yank(registry.resolve("polite", "v1"), "trained on the dev set")
    for act in (pin, lambda name, root: pull(name, registry=root)):
        with pytest.warns(UserWarning, match=r"polite@v1 was yanked: trained on the dev set"):
            act("polite@v1", registry.root)
