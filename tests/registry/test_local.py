"""A registry in a folder: its layout, concurrent writers, and the index that follows it."""

import itertools
import subprocess
import sys
import warnings
from multiprocessing import get_context

import pytest

from adapterhub.errors import FileError, RegistryError
from adapterhub.registry import local
from adapterhub.registry.local import LocalRegistry, default_root
from adapterhub.registry.store import Publication, Query
from adapterhub.registry.version_files import DATE_FILE, date_now, stamp_bytes
from tests.kit import registries
from tests.kit.selection import ALL

PATH = "acme--bert-small/polite"


@pytest.fixture
def registry(tmp_path):
    return LocalRegistry(tmp_path / "registry")


def put(registry, tmp_path, name="polite", seed=0, **options):
    folder = tmp_path / f"made-{name}-{seed}"
    if not folder.exists():
        registries.write_sample(folder, seed, **options)
    return registry.put(folder, Publication(name))


def names(registry, **query):
    return [entry.name for entry in registry.search(Query(**query))]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"x" * len(data), lambda data: data.replace(b'"fingerprint"', b'"print"', 1),
     lambda data: b"[]", lambda data: data[: len(data) // 2], lambda data: None],
    ids=["no JSON", "other fields", "a list", "truncated", "missing"],
)  # fmt: skip
def test_a_damaged_cache_is_rebuilt_from_the_folders(registry, tmp_path, damage):
    for name in ("a", "b", "c"):
        put(registry, tmp_path, name)
    assert names(registry) == ["a", "b", "c"]
    path = registry._cache_path()
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    again = LocalRegistry(registry.root)
    assert names(again, text="polite") == names(again) == ["a", "b", "c"]
    assert again.index() == 3


def test_names_that_differ_in_case_only_are_refused_and_stamps_follow_changes(registry, tmp_path):
    stamps = [registry.stamp(PATH)]  # of nothing
    entry = put(registry, tmp_path)
    stamps += [registry.stamp(PATH)]
    registry.tag(entry, "best")
    assert len({*stamps, registry.stamp(PATH)}) == 3
    with pytest.raises(RegistryError, match="only in case"):
        put(registry, tmp_path, "Polite")


def test_a_search_without_changes_writes_nothing(registry, tmp_path, monkeypatch):
    monkeypatch.delenv("ADAPTERHUB_REGISTRY", raising=False)
    assert default_root().parts[-2:] == ("adapterhub", "registry")
    put(registry, tmp_path)
    assert names(registry) == ["polite"]
    monkeypatch.setattr(local, "_TICK", 0)
    assert names(registry) == ["polite"]  # indexed with the stamp of an old change
    monkeypatch.setattr(local, "replace_file", None)
    assert names(registry) == ["polite"]


def test_words_and_the_start_of_cards_are_found(registry, tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    card = "# Grüße\n\n_tagged_ " + "x " * 3_000 + "unreachable"
    (folder / "README.md").write_text(card, encoding="utf-8")
    registry.put(folder, Publication("polite", tags=("best",)))
    for text in ("grusse", "GRÜ", "tagg", "polite best", "lora acme", "bert"):
        assert names(registry, text=text) == ["polite"], text
    for text in ("olite", "_tag_best", "unreachable", "polite nothing"):
        expected = ["polite"] if text == "_tag_best" else []
        assert names(registry, text=text) == expected, text


def in_processes(act, *arguments):
    """Start a process for each tuple of arguments; forked, so that it imports nothing."""
    context = get_context("fork")
    processes = [context.Process(target=act, args=each) for each in arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads at a fork
        for process in processes:
            process.start()
    return processes


def search_again_and_again(root, task, published):
    registry, numbers = LocalRegistry(root), itertools.count()
    while (number := next(numbers)) < (30 if ALL else 6) or not published.exists():
        if task == "index" and number % 3 == 0:
            registry.index()
        if task == "delete the index":
            registry._cache_path().unlink(missing_ok=True)
        entries = registry.search(Query("polite", limit=1000))
        assert len({entry.name for entry in entries}) == len(entries) > 0, entries


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_searches_during_publications_and_new_indexes(registry, tmp_path):
    """No process sees an error or an old state, whatever the others do with the index."""
    put(registry, tmp_path, "n")
    published, most = tmp_path / "published", 30 if ALL else 6
    tasks = [(registry.root, task, published) for task in ("search", "index", "delete the index")]
    searchers = in_processes(search_again_and_again, *tasks)
    folder = registries.write_sample(tmp_path / "new", 1)
    try:
        for number in range(1, most + 1):
            registry.put(folder, Publication(f"n{number}"))
            assert f"n{number}" in names(registry, text="polite", limit=1000)
    finally:
        published.touch()
    for searcher in searchers:
        searcher.join()
    assert [searcher.exitcode for searcher in searchers] == [0, 0, 0]
    assert len(names(registry, limit=1000)) == most + 1


def write_some(root, number):
    registry = LocalRegistry(root / "registry")
    for seed in (number, number, 100):
        folder = root / f"{number}-{seed}"
        if not folder.exists():
            registries.write_sample(folder, seed)
        entry = registry.put(folder, Publication("polite", tags=(f"by-{number}",)))
        assert registry.gc() == registry.verify() == []
        if seed == number:
            registry.yank(entry, f"by {number}")
            registry.tag(entry, f"yanked-{number}")


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_concurrent_writers(registry, tmp_path):
    writers = in_processes(write_some, *((tmp_path, number) for number in range(3)))
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    found = registry.versions("polite")
    # Each writer published one adapter of its own, and all three the same fourth one.
    assert [entry.version for entry in found] == ["v1", "v2", "v3", "v4"]
    tags = {f"{tag}-{number}" for tag in ("by", "yanked") for number in range(3)}
    assert {tag for entry in found for tag in entry.tags} == tags
    assert sorted(filter(None, (entry.yanked for entry in found))) == ["by 0", "by 1", "by 2"]
    assert registry.verify() == []
    assert registry.gc() == []


def test_a_clone_by_git_for_windows_is_the_same_registry(registry, tmp_path):
    put(registry, tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "core.autocrlf=true"]
    clone = ["clone", "-q", str(tmp_path), str(tmp_path / "to")]
    for words in (["init", "-q"], ["add", "-A", "registry"], ["commit", "-qm", "x"], clone):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    clone = LocalRegistry(tmp_path / "to" / "registry")
    assert names(clone) == ["polite"]
    assert clone.verify() == registry.verify() == []


@pytest.mark.parametrize("file", ["adapter.json", ".published", "README.md"])
def test_line_ends_that_git_changed_are_named(registry, tmp_path, file):
    """Registries that were written before have no .gitattributes."""
    entry = put(registry, tmp_path)
    (registry.root / ".gitattributes").unlink()
    path = registry.root / PATH / "v1" / file
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    problems = "\n".join(registry.verify())
    assert ("CRLF" in problems) == (file == "adapter.json")  # else nothing is wrong
    if problems:
        with pytest.raises(FileError, match="CRLF") as caught:
            registry.get(registry.resolve(entry.name, "v1"), None)
        assert "* -text" in str(caught.value)


def exchange(first, second):
    """Let two folders change places."""
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)


def test_versions_that_change_places_are_not_delivered(registry, tmp_path):
    entries = [put(registry, tmp_path, seed=seed) for seed in (0, 1)]
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
    date = f"{entries[0].published}\n"
    (folders[0] / DATE_FILE).write_text(date)  # of an older release
    entry = registry.resolve("polite", "v1")
    assert (entry.published, registry.get(entry)) == (entries[0].published, folders[0])
    (folders[0] / DATE_FILE).write_bytes(date_now() + stamp_bytes("v1", entries[1].digest))
    with pytest.raises(FileError, match="v1 is not what was published"):
        registry.get(entry)
    (folders[0] / DATE_FILE).unlink()
    assert registry.get(entry, tmp_path / "out") == tmp_path / "out"


def test_of_the_layout_leftovers_of_writers_are_removed(registry, tmp_path):
    registry.tag(put(registry, tmp_path), "best")
    assert registry.gc() == []
    folder = registry.root / PATH
    assert sorted(p.name for p in (folder / "v1").iterdir()) == [
        ".published", "README.md", "adapter.json", "adapter.safetensors",
    ]  # fmt: skip
    assert ".lock" in (registry.root / ".gitignore").read_text()
    (folder / ".names.json.0a1b2c3d.new").write_text("{")
    (folder / ".adapterhub-0").mkdir()
    (folder / ".adapterhub-1").symlink_to(tmp_path)
    assert names(registry) == ["polite"]
    assert len(registry.gc()) == 3
    assert registry.contents(PATH).names.tags == {"best": "v1"}
    assert (tmp_path / "made-polite-0").is_dir()


def test_a_folder_that_another_writer_makes_meanwhile_is_no_link(registry, tmp_path, monkeypatch):
    """Of many publishers of a new backbone at once, some were refused."""
    look = local.is_plain_folder

    def slow(path):
        seen = look(path)
        path.mkdir(parents=True, exist_ok=True)  # another writer, after we looked
        return seen

    monkeypatch.setattr(local, "is_plain_folder", slow)
    assert put(registry, tmp_path).version == "v1"
