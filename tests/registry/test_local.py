"""A registry in a folder: its layout, concurrent writers, and the index that follows it."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
import warnings
from multiprocessing import get_context

import pytest

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.registry import local
from adapterhub.registry.local import LocalRegistry, default_root
from adapterhub.registry.store import Publication, Query
from tests.kit import registries
from tests.kit.selection import ALL


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return LocalRegistry(tmp_path / "registry")


def put(registry, tmp_path, name="polite", seed=0, **options):
    folder = tmp_path / f"made-{name}-{seed}"
    if not folder.exists():
        registries.write_sample(folder, seed, **options)
    return registry.put(folder, Publication(name))


def names(registry, **query):
    return [entry.name for entry in registry.search(Query(**query))]


def test_the_layout_of_the_folders(registry, tmp_path):
    put(registry, tmp_path)
    version = registry.root / "acme--bert-small" / "polite" / "v1"
    assert sorted(p.name for p in version.iterdir()) == [
        ".published", "README.md", "adapter.json", "adapter.safetensors",
    ]  # fmt: skip
    seen = {p.name for p in registry.root.rglob("*") if not p.name.startswith(".")}
    assert "v1" in seen
    assert ".lock" in (registry.root / ".gitignore").read_text()


def test_the_default_is_in_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("ADAPTERHUB_REGISTRY", raising=False)
    assert default_root().parts[-2:] == ("adapterhub", "registry")
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path))
    assert LocalRegistry().root == tmp_path


def test_a_missing_index_is_rebuilt_from_the_folders(registry, tmp_path):
    put(registry, tmp_path, "a")
    put(registry, tmp_path, "b")
    assert names(registry) == ["a", "b"]
    shutil.rmtree(tmp_path / "cache")
    assert names(registry) == ["a", "b"]
    assert registry.index() == 2
    assert names(registry) == ["a", "b"]


def test_changes_made_by_other_programs_are_found(registry, tmp_path):
    put(registry, tmp_path, "a")
    assert names(registry) == ["a"]
    home = registry.root / "acme--bert-small"
    shutil.copytree(home / "a", home / "b")
    assert names(registry) == ["a", "b"]
    registries.write_sample(home / "b" / "v2", 7, accuracy=0.5)
    assert names(registry, metric="accuracy") == ["b"]
    shutil.rmtree(home / "a")
    assert names(registry) == ["b"]


@pytest.mark.parametrize("damage", ["no JSON", "other fields", "a list", "truncated"])
def test_a_corrupted_index_is_rebuilt(registry, tmp_path, damage):
    for number in range(40):
        put(registry, tmp_path, f"n{number:02}")
    expected = [f"n{number:02}" for number in range(40)]
    assert names(registry) == expected
    path = registry._cache_path()
    data = path.read_bytes()
    damaged = {
        "no JSON": b"x" * len(data),
        "other fields": data.replace(b'"fingerprint"', b'"print"', 1),
        "a list": b"[]",
        "truncated": data[: len(data) // 2],
    }
    path.write_bytes(damaged[damage])
    assert names(registry, text="polite") == expected
    assert names(registry) == expected


def test_a_search_without_changes_writes_nothing(registry, tmp_path, monkeypatch):
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
    while (number := next(numbers)) < (30 if ALL else 12) or not published.exists():
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
    published, most = tmp_path / "published", 30 if ALL else 12
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


def test_verify_names_each_damaged_version(registry, tmp_path):
    put(registry, tmp_path, "a")
    entry = put(registry, tmp_path, "b")
    assert registry.verify() == []
    tensors = registry.root / "acme--bert-small" / "b" / "v1" / "adapter.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    (problem,) = registry.verify()
    assert problem.startswith("acme--bert-small/b/v1: ")
    with pytest.raises(FileError):
        registry.get(entry)


def test_a_version_with_other_bytes_than_published_is_refused(registry, tmp_path):
    entry = put(registry, tmp_path)
    kept = registry.get(entry)
    shutil.rmtree(kept)
    registries.write_sample(kept, seed=9)
    with pytest.raises(FileError, match="not what was published"):
        registry.get(entry)


def test_gc_removes_what_an_interrupted_writer_left(registry, tmp_path):
    put(registry, tmp_path)
    left = registry.root / "acme--bert-small" / "polite" / ".adapterhub-0"
    left.mkdir()
    assert names(registry) == ["polite"]
    assert registry.gc() == [left]
    assert not left.exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a..b", "x" * 97, "-x", "a@b"])
def test_invalid_names_are_refused(registry, tmp_path, name):
    folder = registries.write_sample(tmp_path / "made")
    with pytest.raises(ConfigError):
        registry.put(folder, Publication(name))
    assert not registry.root.exists()


@pytest.mark.parametrize("tag", ["", "v2", "2", "a b", "../x"])
def test_invalid_tags_are_refused(registry, tmp_path, tag):
    folder = registries.write_sample(tmp_path / "made")
    with pytest.raises(ConfigError):
        registry.put(folder, Publication("polite", tags=(tag,)))
    with pytest.raises(RegistryError):
        registry.versions("polite")


def test_names_that_differ_in_case_only_are_refused(registry, tmp_path):
    put(registry, tmp_path, "polite")
    with pytest.raises(RegistryError, match="only in case"):
        put(registry, tmp_path, "Polite")


def test_a_tag_moves(registry, tmp_path):
    first = put(registry, tmp_path, seed=0)
    second = put(registry, tmp_path, seed=1)
    registry.tag(first, "best")
    registry.tag(second, "best")
    assert registry.resolve("polite", "best").version == "v2"
    written = json.loads((registry.root / "acme--bert-small/polite/names.json").read_bytes())
    assert written == {"highest": 2, "tags": {"best": "v2"}, "yanked": {}}


def test_a_broken_file_of_tags_is_named(registry, tmp_path):
    put(registry, tmp_path)
    path = registry.root / "acme--bert-small/polite/names.json"
    path.write_text("{")
    with pytest.raises(FileError, match=r"names\.json"):
        registry.resolve("polite")


def test_a_search_in_many_adapters_is_fast(registry, tmp_path):
    """benchmarks/registry.py has the full measurement."""
    folder = registries.write_sample(tmp_path / "made", accuracy=0.5)
    home = registry.root / "acme--bert-small"
    for number in range(300):
        shutil.copytree(folder, home / f"n{number}" / "v1")
    assert len(names(registry, limit=1000)) == 300
    start = time.process_time()
    assert len(names(registry, sort="accuracy", text="polite", limit=5)) == 5
    assert time.process_time() - start < 1


def with_crlf(path):
    """Write a text as git for Windows checks it out."""
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def clone_with_crlf(tmp_path, *names):
    """Commit folders, and clone them as git for Windows does."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "-A", *names], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    clone = [*git, "-c", "core.autocrlf=true", "clone", "-q", str(tmp_path), str(tmp_path / "to")]
    subprocess.run(clone, check=True)
    return tmp_path / "to"


def test_a_clone_by_git_for_windows_is_the_same_registry(registry, tmp_path):
    put(registry, tmp_path)
    clone = clone_with_crlf(tmp_path, "registry") / "registry"
    assert names(LocalRegistry(clone)) == ["polite"]
    assert LocalRegistry(clone).verify() == registry.verify() == []


@pytest.mark.parametrize("file", ["adapter.json", ".published", "README.md"])
def test_line_ends_that_git_changed_are_named(registry, tmp_path, file):
    """Registries that were written before have no .gitattributes."""
    entry = put(registry, tmp_path)
    (registry.root / ".gitattributes").unlink()
    with_crlf(registry.root / "acme--bert-small" / "polite" / "v1" / file)
    problems = "\n".join(registry.verify())
    assert ("CRLF" in problems) == (file == "adapter.json")  # else nothing is wrong
    if problems:
        with pytest.raises(FileError, match="CRLF") as caught:
            registry.get(registry.resolve(entry.name, "v1"), None)
        assert "* -text" in str(caught.value)
