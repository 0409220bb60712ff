"""A registry in a folder: versions appear atomically, tags move, leftovers are removed."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

import adapterhub as ah
from adapterhub.errors import FileError, OutputError, RegistryError
from adapterhub.files import native
from adapterhub.files.native import Saved
from adapterhub.registry import local
from adapterhub.registry.local import Folder, LocalRegistry
from adapterhub.registry.store import ConflictError, Publication
from adapterhub.registry.version_files import DATE_FILE, date_now, stamp_bytes
from tests.kit import registries

PATH = "acme--bert-small/polite"


@pytest.fixture
def registry(tmp_path):
    return LocalRegistry(tmp_path / "registry")


def add(registry, folder, version=None, tags=()):
    return registry.put(folder, Publication("polite", version, tags))


def test_equal_bytes_keep_their_version(registry, tmp_path):
    made = [registries.write_sample(tmp_path / str(seed), seed) for seed in (0, 1)]
    assert [add(registry, folder).version for folder in made] == ["v1", "v2"]
    assert add(registry, made[0], "v7", ("best",)).version == "v1"
    assert [(e.version, e.tags) for e in registry.contents(PATH).entries] == [
        ("v1", ("best",)),
        ("v2", ()),
    ]


def test_the_stamp_changes_with_versions_tags_and_yanks(registry, tmp_path):
    stamps = [registry.stamp(PATH)]
    entry = add(registry, registries.write_sample(tmp_path / "made"))
    stamps.append(registry.stamp(PATH))
    registry.tag(entry, "best")
    stamps.append(registry.stamp(PATH))
    registry.yank(entry, "wrong")
    stamps.append(registry.stamp(PATH))
    registry.yank(entry, "wrong")
    assert len(set(stamps)) == 4
    assert registry.stamp(PATH) == stamps[-1]


def exchange(first, second):
    """Let two folders change places."""
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)


def test_versions_that_change_places_are_not_delivered(registry, tmp_path):
    made = [registries.write_sample(tmp_path / str(seed), seed) for seed in (0, 1)]
    entries = [add(registry, folder) for folder in made]
    folders = [registry.root / PATH / version for version in ("v1", "v2")]
    exchange(*folders)
    for version, other in (("v1", "v2"), ("v2", "v1")):
        for target in (None, tmp_path / "out"):
            with pytest.raises(FileError, match=f"{version} has the files of {other}"):
                registry.get(registry.resolve("polite", version), target)
    for entry, other in (entries, entries[::-1]):  # they were resolved before
        with pytest.raises(FileError, match=f"{entry.version} has the files of {other.version}"):
            registry.get(entry, tmp_path / "out")
    assert len(registry.verify()) >= 2
    exchange(*folders)
    assert [registry.get(entry) for entry in entries] == folders
    (folders[0] / DATE_FILE).write_bytes(date_now())  # of an older release
    entry = registry.resolve("polite", "v1")
    assert (entry.published, registry.get(entry)) == (entries[0].published, folders[0])
    (folders[0] / DATE_FILE).write_bytes(date_now() + stamp_bytes("v1", entries[1].digest))
    with pytest.raises(FileError, match="v1 is not what was published"):
        registry.get(entry)
    (folders[0] / DATE_FILE).unlink()
    assert registry.get(entry, tmp_path / "out") == tmp_path / "out"


def test_what_is_pulled_is_what_was_asked_while_versions_change_places(registry, tmp_path):
    digests = {}
    for seed in (0, 1):
        entry = add(registry, registries.write_sample(tmp_path / str(seed), seed))
        digests[entry.version] = entry.digest
    folders = [registry.root / PATH / version for version in digests]
    ended, pulled = threading.Event(), []

    def keep_exchanging():
        while not ended.is_set():
            exchange(*folders)

    thread = threading.Thread(target=keep_exchanging)
    thread.start()
    for number in range(150):
        with suppress(FileError, RegistryError):
            found = ah.pull("polite@v1", tmp_path / f"out{number}", registry=registry.root)
            pulled.append(Saved.at(found).digest)
    ended.set()
    thread.join()
    assert {*pulled} <= {digests["v1"]}


def test_an_interrupted_writer_leaves_no_version(registry, tmp_path, monkeypatch):
    folder = registries.write_sample(tmp_path / "made")

    def interrupted(staged, payload):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(native, "write_files", interrupted)
        with pytest.raises(OutputError):
            add(registry, folder)
    assert registry.contents(PATH).entries == []
    entry = add(registry, folder)
    assert (entry.version, entry.digest) == ("v1", Saved.at(folder).digest)


def test_leftovers_of_writers_are_removed(registry, tmp_path):
    add(registry, registries.write_sample(tmp_path / "made"), tags=("best",))
    assert registry.gc() == []
    folder = registry.root / PATH
    (folder / ".names.json.0a1b2c3d.new").write_text("{")
    (folder / ".adapterhub-0").mkdir()
    (folder / ".adapterhub-1").symlink_to(tmp_path)
    assert len(registry.gc()) == 3
    assert registry.contents(PATH).names.tags == {"best": "v1"}
    assert (tmp_path / "made").is_dir()


def test_a_broken_version_is_listed_with_its_error(registry, tmp_path):
    for seed in (0, 1):
        entry = add(registry, registries.write_sample(tmp_path / str(seed), seed))
    (registry.root / PATH / "v2" / "adapter.json").unlink()
    contents = registry.contents(PATH)
    assert [entry.version for entry in contents.entries] == ["v1"]
    assert list(contents.broken) == ["v2"]
    contents.raise_broken("polite", "v1")
    with pytest.raises(FileError, match="missing"):
        contents.raise_broken("polite", "2")
    with pytest.raises(FileError, match="the newest version, polite@v2, cannot be read"):
        contents.raise_broken("polite", None)
    registry.yank(entry, "broken")
    registry.contents(PATH).raise_broken("polite", None)


def test_only_what_was_read_is_replaced(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / "b" / "n").mkdir(parents=True)
    folder.replace("b/n/x", b"1", None)
    with pytest.raises(ConflictError):
        folder.replace("b/n/x", b"2", None)
    read = folder.read("b/n/x", 10)
    folder.replace("b/n/x", b"3", read)
    with pytest.raises(ConflictError):
        folder.replace("b/n/x", b"4", read)
    assert folder.read("b/n/x", 10).data == b"3"
    assert folder.files("b/n/") == folder.files() == {"b/n/x": ""}
    assert (folder.folders(), folder.folders("b/")) == (["b"], ["b/n"])


def test_a_folder_that_another_writer_makes_meanwhile_is_no_link(tmp_path, monkeypatch):
    """Of many publishers of a new backbone at once, some were refused."""
    registry = LocalRegistry(tmp_path / "registry")
    look = local.is_plain_folder

    def slow(path):
        seen = look(path)
        path.mkdir(parents=True, exist_ok=True)  # another writer, after we looked
        return seen

    monkeypatch.setattr(local, "is_plain_folder", slow)
    made = registries.write_sample(tmp_path / "made")
    assert registry.put(made, Publication("polite")).version == "v1"
