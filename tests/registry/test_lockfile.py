"""A project's adapters, pinned by digest and restored exactly."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from adapterhub.errors import ConfigError, FileError, MismatchError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry import lockfile
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, read_lock, sync, with_pins, write_lock
from adapterhub.registry.pull import pull
from adapterhub.registry.store import Publication, parse_reference
from tests.kit import registries


@pytest.fixture
def registry(tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    for seed in (0, 1):
        store.put(registries.write_sample(tmp_path / f"made-{seed}", seed), Publication("polite"))
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
    _, tensors = Saved.at(tmp_path / "adapters" / "polite").read()
    assert float(next(iter(tensors.values()))[0, 0]) == 0.0
    assert sync(again, tmp_path / "adapters", registry.root) == []


def test_other_bytes_are_refused_and_nothing_is_replaced(registry, tmp_path):
    with pytest.raises(ConfigError, match="publish"):
        pin(str(tmp_path / "made-0"), registry.root)  # a folder
    pins = dict([pin("polite@v1", registry.root)])
    with pytest.raises(RegistryError):
        sync(pins, tmp_path / "adapters", tmp_path / "empty")
    kept = registry.root / "acme--bert-small" / "polite" / "v1"
    shutil.rmtree(kept)
    registries.write_sample(kept, seed=9)
    for given in (registry.root, None):  # the recorded one, too
        with pytest.raises(MismatchError, match="lock file") as caught:
            sync(pins, tmp_path / "adapters", given)
        assert "polite@v1" in str(caught.value)
        assert not (tmp_path / "adapters").exists()
    registries.write_sample(tmp_path / "adapters" / "polite", seed=9)
    with pytest.raises(MismatchError):
        sync(pins, tmp_path / "adapters", registry.root)


LOCAL = {"reference": "polite@v1"}


HUB = {"reference": "hf:a/b@v1"}


WRONG = (
    *({"reference": each} for each in ("./polite", "/etc", "~/polite", "polite", "hf:a/b", "a b")),
    *(LOCAL | {"registry": each} for each in (r"\\host\share", "//host/share", r"\\?\C:\x",
                                              "https://host.org", "a\nb", "", 3)),
    *(HUB | {"registry": each} for each in ("folder", "http://host.org", "https://host.org/x",
                                            "https://user:secret@host.org")),
    {"reference": "https://host.org/a/b@v1", "registry": "https://other.org"},
    *(LOCAL | {"name": name} for name in ("../x", "/etc/x", "a/b", ".")),
    *(LOCAL | {"text": text} for text in ("", "[]", '{"version": 2, "adapters": {}}',
                                          '{"version": 1}')),
)  # fmt: skip


def write_stranger(path, name="x", text=None, **fields):
    pinned = {"backbone": "a/b", "digest": "0" * 64, "fingerprint": "x", **fields}
    tree = {"adapters": {name: pinned}, "version": 1}
    path.write_text(json.dumps(tree) if text is None else text)


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


def project_of(tmp_path, name="project"):
    """Make a project with a registry of its own."""
    store = LocalRegistry(tmp_path / name / "registry")
    store.put(registries.write_sample(tmp_path / f"{name}-made", 3), Publication("polite"))
    return tmp_path / name, store


@pytest.fixture
def other_machine(tmp_path, monkeypatch):
    """Set the default registry to an empty one."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("given", ["option", "variable"])
def test_a_registry_in_a_project_is_found_where_it_is_moved(tmp_path, monkeypatch, given):
    project, store = project_of(tmp_path)
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(store.root))
    name, pinned = pin("polite", store.root if given == "option" else None, project=project)
    write_lock(project / "adapterhub.lock", {name: pinned})
    (written,) = json.loads((project / "adapterhub.lock").read_text())["adapters"].values()
    assert written == {**pinned.record(), "registry": "registry"}
    moved = project.rename(tmp_path / "moved")
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "elsewhere"))
    pins = read_lock(moved / "adapterhub.lock")
    assert pins == {name: pinned}
    assert sync(pins, moved / "adapters", project=moved) == ["polite"]


def test_a_registry_outside_of_the_project_is_kept_as_given(tmp_path, monkeypatch, other_machine):
    project, store = project_of(tmp_path)
    (tmp_path / "project" / "sub").mkdir()
    name, pinned = pin("polite", store.root, project=project / "sub")
    assert pinned.registry == str(store.root)
    assert sync({name: pinned}, tmp_path / "a", project=project / "sub") == ["polite"]
    monkeypatch.chdir(project)
    name, pinned = pin("polite", "registry", project=project / "sub")
    assert pinned.registry == "../registry"
    assert sync({name: pinned}, tmp_path / "b", project=project / "sub") == ["polite"]


@pytest.mark.parametrize("own", [True, False], ids=["the user's", "a project's"])
def test_a_registry_that_is_not_here(tmp_path, monkeypatch, own):
    """A user's own one is not recorded, so it is another one for another user."""
    project, store = project_of(tmp_path)
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(store.root if own else tmp_path / "elsewhere"))
    name, pinned = pin("polite", None if own else store.root, project=project / "apart")
    assert (pinned.registry is None) == own
    pins = {name: pinned}
    assert sync(pins, tmp_path / "here", project=project / "apart") == ["polite"]
    moved = store.root.rename(tmp_path / "registry-moved")
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "elsewhere"))
    problem = "own registry" if own else r"polite@v1(.|\n)*registry"
    with pytest.raises(RegistryError, match=rf"{problem}(.|\n)*sync --registry FOLDER"):
        sync(pins, tmp_path / "a", project=project)
    assert sync(pins, tmp_path / "a", moved, project=project) == ["polite"]
    # The digest is what counts: one's own registry serves as well.
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(moved))
    assert sync(pins, tmp_path / "b", project=project) == ["polite"]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_lock_file_of_a_stranger_is_checked(tmp_path, fields):
    write_stranger(tmp_path / "lock", **fields)
    place = r"(.|\n)*adapters.x" if fields.keys() <= {"reference", "registry"} else ""
    with pytest.raises(FileError, match=f"not a lock file{place}"):
        read_lock(tmp_path / "lock")


def test_lock_files_of_older_versions_are_read(registry, tmp_path, other_machine):
    """They named a hub as its registry, and no registry of a folder."""
    write_stranger(tmp_path / "lock", reference="hf:a/b@v1", registry="https://hub.org")
    (pinned,) = read_lock(tmp_path / "lock").values()
    assert (pinned.registry, pinned.endpoint) == (None, "https://hub.org")
    name, pinned = pin("polite@v1", registry.root)
    fields = {key: value for key, value in vars(pinned).items() if key != "registry"}
    write_stranger(tmp_path / "lock", name, **fields)
    pins = read_lock(tmp_path / "lock")
    assert pins == {name: replace(pinned, registry=None)}
    assert sync(pins, tmp_path / "a", registry.root) == ["polite"]


def test_another_hub_is_recorded_and_gets_no_token(hub, tmp_path, monkeypatch):
    default, path = constants.ENDPOINT, "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + path)
    HubStore().put(registries.write_sample(tmp_path / "made", 3), Publication("acme/polite"))
    name, pinned = pin("hf:acme/polite")
    assert (pinned.reference, pinned.endpoint) == ("hf:acme/polite@v1", hub.address)
    assert pinned.registry is None
    monkeypatch.setattr(constants, "ENDPOINT", default)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", default + path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    shutil.rmtree(tmp_path / "cache")
    hub.authorizations.clear()
    assert sync({name: pinned}, tmp_path / "adapters") == ["polite"]
    assert set(hub.authorizations) == {None}


ORIGINS = [
    ("hf:a/b", "https://huggingface.co", "https://huggingface.co"),
    ("hf:a/b", "https://mirror.org", "https://mirror.org"),
    ("hf:a/b", "http://intern:8080", None),  # no reference could name it
    ("hf:a/b", "https://mirror.org/hf", None),
    ("https://H.org:443/a/b", "https://huggingface.co", "https://h.org"),
]


@pytest.mark.parametrize(("reference", "variable", "endpoint"), ORIGINS)
def test_the_origin_of_the_hub_is_recorded(reference, variable, endpoint, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", variable)
    parsed = parse_reference(reference)
    assert lockfile.recorded_endpoint(parsed) == endpoint
    assert lockfile.recorded_registry(parsed, None, Path()) is None


def test_a_yanked_version_is_pinned_with_a_warning(registry, tmp_path):
    registry.yank(registry.resolve("polite", "v1"), "trained on the dev set")
    for act in (pin, lambda name, root: pull(name, registry=root)):
        with pytest.warns(UserWarning, match=r"polite@v1 was yanked: trained on the dev set"):
            act("polite@v1", registry.root)
