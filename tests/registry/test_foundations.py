"""An adapter is published and pulled with those that it was trained on, or not at all."""

import shutil
from pathlib import Path

import pytest
import torch
from forge import forge

import adapterhub as ah
from adapterhub.errors import AdapterhubError, FileError, MismatchError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, read_lock, sync, write_lock
from adapterhub.registry.publish import PublicationInfo
from adapterhub.registry.pull import Origins, foundation_of, pull_verified
from adapterhub.registry.store import Reference
from tests.kit import tiny_adapters, tiny_models


@pytest.fixture
def registry(here, tmp_path):
    return LocalRegistry(tmp_path / "registry")


def altered(file):
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")


DAMAGED = {
    "yanked": (lambda store, lang: store.yank(store.resolve("lang"), "it was on test data"),
               "lang@v1 was yanked: it was on test data"),
    "deleted": (lambda store, lang: store.delete("lang", "v1"), "has no adapter 'lang'"),
    "other tensors": (lambda store, lang: altered(lang / "adapter.safetensors"), "is damaged"),
    "another manifest": (lambda store, lang: forge(lang, lambda tree: tree.update(license="mit")),
                         "lang@v1 is not the one that was trained on"),
    "no tensors": (lambda store, lang: (lang / "adapter.safetensors").unlink(), "is damaged"),
}  # fmt: skip


@pytest.fixture
def published(registry, tmp_path):
    """Publish `lang`, and `task` on it; return the outputs of `task`."""
    ah.publish(tiny_adapters.save_alone(tmp_path / "lang"))
    expected = tiny_adapters.save_on(tmp_path / "task", ["lang"])
    ah.publish(tmp_path / "task")
    return expected


def version(registry, name):
    """Return the registry's folder of the first version of a name."""
    (folder,) = registry.root.glob(f"*/{name}/v1")
    return folder


def another_machine(tmp_path, monkeypatch, registry):
    """Move the registry to another folder, and forget all that this user has."""
    other = tmp_path / "another"
    other.mkdir()
    shutil.move(registry.root, other / "adapters")
    for folder in ("lang", "task", "here"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    for variable in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "ADAPTERHUB_STATE"):
        monkeypatch.setenv(variable, str(other / variable))
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(other / "adapters"))
    monkeypatch.chdir(other)


def test_the_name_alone_is_enough_on_another_machine(registry, published, tmp_path, monkeypatch):
    another_machine(tmp_path, monkeypatch, registry)
    model = tiny_models.model("bert")
    ah.load(model, "task")
    assert torch.equal(tiny_adapters.outputs(model), published)
    pulled = ah.pull("task", "mine")
    shutil.rmtree(tmp_path / "another" / "adapters")  # the folder is complete
    model = tiny_models.model("bert")
    ah.load(model, pulled)
    assert torch.equal(tiny_adapters.outputs(model), published)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_foundation_that_is_not_as_it_was_is_refused(registry, published, case):
    damage, text = DAMAGED[case]
    damage(registry, version(registry, "lang"))
    model = tiny_models.model("bert")
    uses = {
        "load": lambda: ah.load(model, "task"),
        "pull": lambda: ah.pull("task"),
        "pull to": lambda: ah.pull("task", "mine"),
    }
    for use in uses.values():
        with pytest.raises(AdapterhubError, match="'task' was trained on lang@v1") as error:
            use()
        assert text in "\n".join(error.value.offenders)
        assert ah.adapters(model) == {}
        assert not Path("mine").exists()


def test_an_altered_copy_in_a_folder_is_refused(tmp_path):
    tiny_adapters.save_on(tmp_path / "task", [tiny_adapters.save_alone(tmp_path / "lang")])
    (copy,) = (tmp_path / "task" / "on").iterdir()
    altered(copy / "adapter.safetensors")
    with pytest.raises(FileError, match="'task' was trained on lang, which cannot be used"):
        ah.load(tiny_models.model("bert"), tmp_path / "task")
    shutil.rmtree(copy)
    with pytest.raises(RegistryError) as error:
        ah.load(tiny_models.model("bert"), tmp_path / "task")
    assert "was not published when it was used" in error.value.offenders[0]


def test_a_circle_is_refused(registry, published, tmp_path, monkeypatch):
    """Only edited files can have one: a digest cannot be known before it is computed."""
    monkeypatch.setenv("ADAPTERHUB_STATE", str(tmp_path / "of-another-user"))
    lang, task = version(registry, "lang"), version(registry, "task")
    record = {"name": "task", "digest": "0" * 64, "version": "v1", "reference": "task@v1"}
    forge(lang, lambda tree: tree.update(on=[record]))
    forge(task, lambda tree: tree["on"][0].update(digest=Saved.at(lang).digest))
    with pytest.raises(FileError, match="'lang' is on task@v1, which is on 'lang': a circle"):
        ah.pull("task")


def test_a_tower_is_limited(registry, tmp_path):
    folder = tiny_adapters.save_alone(tmp_path / "a0")
    ah.publish(folder)
    for level in range(1, 20):
        ref = foundation_of(Reference("local", f"a{level - 1}", "v1"), Saved.at(folder)).ref
        record = {"name": ref.name, "digest": ref.digest, "version": "v1"}
        folder = shutil.copytree(tmp_path / "a0", tmp_path / f"a{level}")
        forge(
            folder,
            lambda tree, n=level, r=record, text=ref.reference: tree.update(
                name=f"a{n}", on=[{**r, "reference": text}]
            ),
        )
        ah.publish(folder)
    assert pull_verified("a10").own().on
    with pytest.raises(FileError, match="below too many adapters"):
        ah.pull("a19")


def test_another_host_is_not_called(tmp_path):
    tiny_adapters.save_on(tmp_path / "task", [tiny_adapters.save_alone(tmp_path / "lang")])
    shutil.rmtree(tmp_path / "task" / "on")
    elsewhere = {"version": "v1", "reference": "https://elsewhere.example/a/lang@v1"}
    forge(tmp_path / "task", lambda tree: tree["on"][0].update(elsewhere))
    with pytest.raises(RegistryError) as error:
        Origins(Reference("hub", "me/task", "v1")).bring(Saved.at(tmp_path / "task"))
    assert "is not on the hub that hf:me/task@v1 comes from" in error.value.offenders[0]


def test_a_source_of_a_fusion_cannot_be_on_others(tmp_path):
    lang = tiny_adapters.save_alone(tmp_path / "lang")
    tiny_adapters.save_on(tmp_path / "task", [lang], "pfeiffer(size=4)")
    spec = {"adapterfusion": {"adapters": [str(lang), str(tmp_path / "task")]}}
    with pytest.raises(AdapterhubError, match="on top of others cannot be copied"):
        ah.attach(tiny_models.model("bert"), spec)


def test_a_lock_pins_those_below_and_sync_restores_them(registry, published):
    registry.tag(registry.resolve("task"), "best")
    assert str(pull_verified("task@best").reference) == "task@v1"
    name, pinned = pin("task@best")
    (below,) = Saved.at(ah.pull("task")).manifest.on
    assert [(each.reference, each.digest) for each in pinned.on] == [("lang@v1", below.digest)]
    write_lock(Path("adapterhub.lock"), {name: pinned})
    pins = read_lock(Path("adapterhub.lock"))
    assert pins == {name: pinned}
    assert sync(pins, Path("adapters")) == ["task"]
    assert sync(pins, Path("adapters")) == []
    registry.yank(registry.resolve("lang"), "bad")
    with pytest.raises(RegistryError, match="lang@v1, which cannot be used"):
        pin("task")
    with pytest.warns(UserWarning, match="lang@v1 was yanked: bad"):
        assert sync(pins, Path("others")) == ["task"]  # what was locked stays
    registry.delete("lang", "v1")
    with pytest.raises(RegistryError, match="lang@v1, which cannot be used"):
        sync(pins, Path("nowhere"))
    model = tiny_models.model("bert")
    ah.load(model, Path("adapters") / "task")
    assert torch.equal(tiny_adapters.outputs(model), published)
    (copy,) = Path("adapters", "task", "on").iterdir()
    (copy / "adapter.safetensors").unlink()
    with pytest.raises(MismatchError) as error:
        sync(pins, Path("adapters"))
    assert "adapters/task lacks what task@v1 is on: lang@v1" in error.value.offenders[0]


# An adapter is published after those that it was trained on.


@pytest.fixture
def task(tmp_path):
    """An adapter on one that was trained in a folder; its outputs."""
    return tiny_adapters.save_on(tmp_path / "task", [tiny_adapters.save_alone(tmp_path / "lang")])


def test_one_on_an_unpublished_or_a_yanked_one_says_what_to_type(registry, task, tmp_path):
    (copy,) = (tmp_path / "task" / "on").iterdir()
    for withdraw in (lambda: None, lambda: registry.yank(ah.publish(tmp_path / "lang"), "bad")):
        withdraw()
        with pytest.raises(RegistryError, match="'lang', which is not published with it") as error:
            ah.publish(tmp_path / "task")
        assert error.value.hint == f"adapterhub publish {copy} --name lang first, then this one"
        assert not list(registry.root.glob("*/task"))


def test_a_folder_is_recognized_by_its_content_under_any_name(registry, task, tmp_path):
    """The licence is part of the manifest: the published digest is another one."""
    ah.publish(tiny_adapters.save_alone(tmp_path / "other", seed=9), "lang")
    info = PublicationInfo(license="apache-2.0")
    entry = ah.publish(tmp_path / "lang", "german", listing=info)
    assert entry.digest != Saved.at(tmp_path / "task").manifest.on[0].digest
    ah.publish(tmp_path / "task", listing=info)
    (ref,) = Saved.at(ah.pull("task")).manifest.on
    assert (ref.name, ref.version, ref.reference) == ("german", "v1", "german@v1")
    assert ref.digest == entry.digest
    expected = tiny_adapters.save_on(tmp_path / "third", [tmp_path / "task"], "houlsby(size=4)")
    ah.publish(tmp_path / "third")  # a chain, from below
    for name, outputs in (("task", task), ("third", expected)):
        model = tiny_models.model("bert")
        ah.load(model, name)
        assert torch.equal(tiny_adapters.outputs(model), outputs)


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
