"""The record of versions that stores have given."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import replace
from multiprocessing import get_context

import pytest
import sample_adapters
from memory_store import MemoryStore

from adapterhub.errors import RegistryError
from adapterhub.registry import seen
from adapterhub.registry.seen import (
    check_changed,
    forget_version,
    record_version,
    seen_versions,
    warn_if_back,
)
from adapterhub.registry.store import Entry, Publication

HUB = "https://huggingface.co"
V1 = Entry("hf:acme/x@v1", "acme/x", "v1", "1" * 64, "acme/bert", "f", ("lora",), None)
V2, V3 = (replace(V1, reference=f"hf:acme/x@v{n}", version=f"v{n}") for n in (2, 3))


def record(*entries, place=HUB):
    for entry in entries:
        record_version(seen_versions(place, entry), entry)


@pytest.fixture
def store(tmp_path):
    return MemoryStore(tmp_path / "store")


def test_versions_are_recorded_by_store_and_name(store):
    record(V1, V3)
    found = seen_versions(HUB, V1)
    assert {n: digest for n, (digest, _) in found.versions.items()} == {1: "1" * 64, 3: "1" * 64}
    assert seen_versions("https://other.org", V1).versions == {}
    assert seen_versions(HUB, replace(V1, name="acme/y")).versions == {}
    local = replace(V1, name="x")
    record(local, place="/r")
    assert seen_versions("/r", local).versions.keys() == {1}
    assert seen_versions("/r", replace(local, backbone="acme/gpt")).versions == {}


def test_a_version_that_the_user_deleted_is_forgotten():
    record(V1, V3)
    forget_version(seen_versions(HUB, V1), "v3")
    assert seen_versions(HUB, V1).versions.keys() == {1}
    forget_version(seen_versions(HUB, V1), "v9")
    forget_version(seen_versions("https://other.org", V1), "v1")  # nothing is recorded


def test_a_store_that_goes_back_is_noticed(store):
    record(V1, V3)
    date = seen_versions(HUB, V1).versions[3][1]
    with pytest.warns(
        UserWarning, match=rf"x@v2 is the newest of its store, which had v3 on {date}"
    ):
        warn_if_back(seen_versions(HUB, V2), V2, store)
    commit = replace(V1, version="0" * 40)
    with pytest.warns(UserWarning, match="gone back"):
        warn_if_back(seen_versions(HUB, commit), commit, store)
    for newest in (V3, replace(V3, version="v4")):
        warn_if_back(seen_versions(HUB, newest), newest, store)


def test_a_yanked_newest_version_is_no_rollback(store, tmp_path):
    for seed in (0, 1):
        folder = sample_adapters.write(tmp_path / f"made-{seed}", seed)
        entry = store.put(folder, Publication("x"))
        record(entry, place="/r")
    store.yank(entry, "trained on the dev set")
    newest = store.resolve("x")
    with pytest.warns(UserWarning, match="was yanked: trained on the dev set") as caught:
        warn_if_back(seen_versions("/r", newest), newest, store)
    assert "gone back" not in str(caught[0].message)


def test_other_bytes_of_a_version_are_refused_from_a_hub():
    record(V1)
    check_changed(seen_versions(HUB, V1), V1)
    changed = replace(V1, digest="2" * 64)
    with pytest.raises(RegistryError, match=r"other bytes than on \d{4}-") as caught:
        check_changed(seen_versions(HUB, changed), changed)
    path = seen_versions(HUB, V1).path
    assert f"delete {path}" in str(caught.value)
    path.unlink()
    check_changed(seen_versions(HUB, changed), changed)


def test_other_bytes_in_ones_own_folder_are_a_warning_once():
    entry = replace(V1, name="x")
    record(entry, place="/r")
    changed = replace(entry, digest="2" * 64)
    with pytest.warns(UserWarning, match="other bytes than on"):
        check_changed(seen_versions("/r", changed), changed)
    record(changed, place="/r")
    check_changed(seen_versions("/r", changed), changed)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"[]", b'{"version": 2}', b"\0" * 40_000, b"[" * 10_000, "pipe", "folder"]
)
def test_a_damaged_record_is_a_warning(data, store):
    path = seen_versions(HUB, V1).path
    path.parent.mkdir(parents=True)
    if data == "pipe":
        os.mkfifo(path)
    elif data == "folder":
        path.mkdir()
    else:
        path.write_bytes(data)
    with pytest.warns(UserWarning, match="cannot be used"):
        found = seen_versions(HUB, V1)
    assert found.versions == {}
    if data == "folder":
        with pytest.warns(UserWarning, match="cannot record"):
            record_version(found, V1)
        return
    record_version(found, V1)
    assert seen_versions(HUB, V1).versions.keys() == {1}


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ADAPTERHUB_STATE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot"):
        record(V1)


def test_the_record_is_bounded(monkeypatch):
    monkeypatch.setattr(seen, "MOST_NAMES", 5)
    for number in range(8):
        record(replace(V1, name=f"acme/{number}"))
        time.sleep(0.002)  # so that the modification times differ
    files = list(seen_versions(HUB, V1).path.parent.glob("*.json"))
    assert len(files) == 5
    assert seen_versions(HUB, replace(V1, name="acme/7")).versions
    assert not seen_versions(HUB, replace(V1, name="acme/0")).versions
    for number in range(1, 71):
        record(replace(V1, name="acme/7", version=f"v{number}"))
    found = seen_versions(HUB, replace(V1, name="acme/7"))
    assert (len(found.versions), max(found.versions)) == (64, 70)
    assert found.path.stat().st_size < 10_000


def test_a_commit_is_not_recorded():
    record(replace(V1, version="0" * 40))
    assert not seen_versions(HUB, V1).path.parent.exists()


def test_the_record_holds_no_more_than_names_and_digests():
    record(V1)
    tree = json.loads(seen_versions(HUB, V1).path.read_bytes())
    today = tree["versions"]["v1"]["seen"]
    assert tree == {
        "version": 1,
        "place": HUB,
        "name": "acme/x",
        "versions": {"v1": {"digest": "1" * 64, "seen": today}},
    }


def test_what_was_seen_before_is_not_written_again():
    record(V1)
    path = seen_versions(HUB, V1).path
    os.utime(path, ns=(1, 1))
    start = time.perf_counter()
    for _ in range(100):
        record(V1)
    assert time.perf_counter() - start < 2.0  # 0.2 ms each on a quiet machine
    assert path.stat().st_mtime_ns == 1


def _record_many(versions):
    for number in versions:
        record(replace(V1, version=f"v{number}"))


def test_no_version_of_concurrent_processes_is_lost():
    context = get_context("fork")
    processes = [context.Process(target=_record_many, args=(range(n, 61, 4),)) for n in range(1, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads at a fork
        for process in processes:
            process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert seen_versions(HUB, V1).versions.keys() == set(range(1, 61))
