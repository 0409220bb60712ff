"""Collect, verify, back up, restore, upgrade: also while the hub serves, and when killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import threading
from contextlib import closing

import pytest
from sqlalchemy import select, text

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.hub import backups
from adapterhub.hub.backups import backup_hub, restore_hub, upgrade_hub
from adapterhub.hub.database import SCHEMA_REVISION, create_database_file, metadata
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.hub.import_export import export_registry, import_registry
from adapterhub.hub.state import open_database, open_hub, schema_revision, serving_alone
from adapterhub.registry import copying, hub_reader
from adapterhub.registry import hub as registry_hub
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Publication
from tests.kit import real_hub, registries
from tests.kit.real_hub import STATES, commit, create, place_of


def upload(client, data, name="acme/x"):
    oid = hashlib.sha256(data).hexdigest()
    body = {"operation": "upload", "objects": [{"oid": oid, "size": len(data)}]}
    found = client.post(f"/{name}.git/info/lfs/objects/batch", json=body).json()["objects"][0]
    assert client.put(found["actions"]["upload"]["href"], content=data).status_code == 200
    return oid


def test_what_no_commit_needs_is_collected_after_its_time(new_hub):
    hub = new_hub.hub
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        commit(client, "acme/x", {"a.md": b"first"})
        commit(client, "acme/x", {"a.md": b"second"})
        oid = upload(client, b"waiting")
        new_hub.overwrite("ab" * 32, b"of a transaction that was undone")
        assert collect(hub, dry_run=True).files == 1
        assert collect(hub).files == 1
        assert collect(hub).files == 0  # the upload waits for its commit
        assert collect(hub, dry_run=True, grace=-1).files == 1
        assert hub.blobs.size(oid) >= 0
        assert collect(hub, grace=-1).files == 1
        assert hub.blobs.size(oid) < 0
        assert commit(client, "acme/x", large={"b.md": (oid, 7)}).status_code == 400
        oid = upload(client, b"waiting")
        assert commit(client, "acme/x", large={"b.md": (oid, 7)}).status_code == 200
        assert collect(hub, grace=-1).files == 0
        body = {"name": "x", "organization": "acme"}
        client.request("DELETE", "/api/repos/delete", json=body)
        assert collect(hub).files >= 4
        assert list(hub.blobs.all()) == []
    assert verify_hub(hub) == []


def test_nothing_is_lost_to_a_collection_while_others_push(new_hub):
    hub, stop, problems = new_hub.hub, threading.Event(), []

    def keep_collecting():
        while not stop.is_set():
            collect(hub, grace=3600)

    thread = threading.Thread(target=keep_collecting)
    thread.start()
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        create(client, "acme/y")
        for number in range(12):  # the same bytes come and go
            data = {"a.md": b"same %d" % (number % 2)}
            problems += [commit(client, "acme/x", data).status_code != 200]
            problems += [commit(client, "acme/y", data).status_code != 200]
            body = {"name": "y", "organization": "acme"}
            client.request("DELETE", "/api/repos/delete", json=body)
            create(client, "acme/y")
        stop.set()
        thread.join()
        assert not any(problems)
        for item in client.get("/api/models/acme/x/commits/main").json()[:-1]:
            assert client.get(f"/acme/x/resolve/{item['id']}/a.md").status_code == 200
    assert verify_hub(hub) == []


def test_a_flipped_bit_is_found(new_hub):
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        commit(client, "acme/x", {"a.md": b"some text", "b.md": b"more"})
    first, second = (hashlib.sha256(data).hexdigest() for data in (b"some text", b"more"))
    new_hub.overwrite(first, b"some tex\xf4")
    new_hub.hub.blobs.remove(second)
    found = sorted(verify_hub(new_hub.hub))
    assert len(found) == 2
    assert {f"blobs/{first}: its bytes have changed (of acme/x)"} < {*found}
    assert {f"blobs/{second}: missing (of acme/x)"} < {*found}


def test_a_backup_of_a_hub_that_serves_is_a_hub(new_hub, tmp_path):
    target, again = tmp_path / "backup", tmp_path / "again"
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        commit(client, "acme/x", {"a.md": b"a"})
        assert backup_hub(new_hub.hub.place, target) == 2
        commit(client, "acme/x", {"b.md": b"b"})
        assert backup_hub(new_hub.hub.place, target) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    for function in (backup_hub, restore_hub):
        with pytest.raises(OutputError):
            function(target, tmp_path / "other")
    assert restore_hub(target, again) == 3
    with real_hub.serving(again) as hub:
        hub.tokens = new_hub.tokens
        with hub.client("ada") as client:
            assert client.get("/acme/x/resolve/main/b.md").content == b"b"
    path = next(path for path in (target / "blobs").rglob("*") if path.is_file())
    path.unlink()
    with pytest.raises(FileError, match="missing"):
        restore_hub(target, tmp_path / "damaged")


def test_a_backup_that_was_interrupted_is_the_old_one(new_hub, tmp_path, monkeypatch):
    target = tmp_path / "backup"
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        backup_hub(new_hub.hub.place, target)
        commit(client, "acme/x", {"b.md": b"b"})

        def fail(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(backups, "_copy_blob", fail)
            with pytest.raises(KeyboardInterrupt):
                backup_hub(new_hub.hub.place, target)
        with open_hub(target) as hub:
            assert verify_hub(hub) == []
        assert backup_hub(new_hub.hub.place, target) == 1


DAMAGE = {"other bytes": b"some tex\xf4", "shorter": b"some", "empty": b"", "missing": None}


def damage(hub, sha256, data):
    if data is None:
        hub.hub.blobs.remove(sha256)
    else:
        hub.overwrite(sha256, data)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("way", ["commit", "commit again elsewhere", "lfs", "stock client"])
def test_right_bytes_that_are_pushed_again_heal(new_hub, tmp_path, kind, way):
    data = b"some text"
    digest = hashlib.sha256(data).hexdigest()
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        create(client, "acme/y")
        commit(client, "acme/x", {"a.md": data})
        damage(new_hub, digest, DAMAGE[kind])
        if way == "commit":
            assert commit(client, "acme/x", {"a.md": data}).status_code == 200
        elif way == "commit again elsewhere":
            assert commit(client, "acme/y", {"b.md": data}).status_code == 200
        elif way == "lfs":
            assert upload(client, data) == digest
        else:
            asked = {"files": [{"path": "a.md", "size": len(data)}]}
            found = client.post("/api/models/acme/x/preupload/main", json=asked).json()
            assert "oid" not in found["files"][0]  # or else the client sends nothing
            assert commit(client, "acme/x", {"a.md": data}).status_code == 200
            found = client.post("/api/models/acme/x/preupload/main", json=asked).json()
            assert found["files"][0]["oid"]
        assert client.get("/acme/x/resolve/main/a.md").content == data
    assert verify_hub(new_hub.hub) == []


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_backup_repairs_what_is_damaged(new_hub, tmp_path, kind):
    digests = [hashlib.sha256(data).hexdigest() for data in (b"some text", b"more", b"new")]
    with new_hub.client("ada") as client:
        create(client, "acme/x")
        commit(client, "acme/x", {"a.md": b"some text", "b.md": b"more"})
        backup_hub(new_hub.hub.place, tmp_path / "backup")
        commit(client, "acme/x", {"c.md": b"new"})
        for digest in digests:
            damage(new_hub, digest, DAMAGE[kind])
        with open_hub(tmp_path / "backup") as backup:
            (problem,) = verify_hub(new_hub.hub, backup.blobs)  # what the backup does not have
        assert digests[2] in problem
        assert client.get("/acme/x/resolve/main/a.md").content == b"some text"


@pytest.fixture
def new_place(request, tmp_path):
    return place_of(request, tmp_path / "hub")


@pytest.fixture
def newer(tmp_path):
    return real_hub.write_changes(tmp_path / "versions")


def test_an_older_hub_is_upgraded_and_kept_as_it_was(tmp_path, newer):
    folder = tmp_path / "hub"
    with real_hub.serving(folder) as hub:
        hub.user("ada")
        with hub.client("ada") as client:
            create(client, "ada/x")
    assert upgrade_hub(folder) is None
    assert upgrade_hub(folder, newer) == SCHEMA_REVISION
    assert schema_revision(folder) == real_hub.NEXT
    with sqlite3.connect(folder / "hub.sqlite") as connection:
        assert [*connection.execute("SELECT name, reason FROM audit, repositories LIMIT 1")]
    connection.close()
    with pytest.raises(FileError, match="newer adapterhub"), open_hub(folder):
        pass
    with pytest.raises(FileError, match="newer adapterhub"):
        upgrade_hub(folder)
    (folder / f"before-{real_hub.NEXT}.sqlite").replace(folder / "hub.sqlite")
    with open_hub(folder) as hub:
        assert verify_hub(hub) == []


@pytest.mark.parametrize("new_place", STATES, indirect=True)
def test_a_hub_of_the_first_release_keeps_its_rows(new_place):
    place, blobs = new_place
    with real_hub.serving(place, blobs=blobs) as running:
        running.user("ada")
        with running.client("ada") as client:
            create(client, "ada/x")
            commit(client, "ada/x", {"a.md": b"a"})
        with running.hub.database.writing() as connection:
            real_hub.make_first(connection)
    new = ("sessions", "renamed", "promises")
    tables = [each for each in metadata.sorted_tables if each.name not in new]
    columns = [[c for c in table.c if c.name != "is_disabled"] for table in tables]

    def rows(connection):
        return [connection.execute(select(*each)).all() for each in columns]

    with closing(open_database(place)) as database, database.reading() as connection:
        before = rows(connection)
    assert upgrade_hub(place) == "0001"
    with open_hub(place) as hub, hub.database.reading() as connection:
        assert rows(connection) == before
        assert [each for each in compare_tables(connection) if each[0] != "remove_index"] == []
        assert verify_hub(hub) == []


def compare_tables(connection):
    """Return how a database differs from the tables of this release."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    found = compare_metadata(MigrationContext.configure(connection), metadata)
    return [each for each in found if each[0] != "remove_table"]


def test_an_upgrade_that_was_interrupted_has_changed_nothing(tmp_path, newer, monkeypatch):
    folder = tmp_path / "hub"
    with real_hub.serving(folder):
        pass
    replace = os.replace

    def fail(*paths):
        raise KeyboardInterrupt

    for name in ("_migrate", "_leave_wal"):
        with monkeypatch.context() as patch:
            patch.setattr(backups, name, fail)
            with pytest.raises(KeyboardInterrupt):
                upgrade_hub(folder, newer)
        with open_hub(folder) as hub:
            assert verify_hub(hub) == []
    assert os.replace is replace
    with serving_alone(folder), pytest.raises(ConfigError, match="another server"):
        upgrade_hub(folder, newer)
    assert upgrade_hub(folder, newer) == SCHEMA_REVISION


def test_a_copy_that_is_not_possible_is_told_in_a_sentence(tmp_path, newer, monkeypatch):
    folder = tmp_path / "hub"
    with real_hub.serving(folder):
        pass

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(backups, "_copy_file", full)
        for copy in (
            lambda: backup_hub(folder, tmp_path / "copy"),
            lambda: upgrade_hub(folder, newer),
        ):
            with pytest.raises(OutputError, match="disk is full"):
                copy()
    with closing(sqlite3.connect(folder / "hub.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE settings SET value = value")
        with pytest.raises(OutputError, match="locked"):
            upgrade_hub(folder, newer)
        other.execute("ROLLBACK")
    for revision, words in (("0000", "0000"), ("zzzz", "newer adapterhub")):
        with closing(sqlite3.connect(folder / "hub.sqlite")) as other, other:
            other.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        with pytest.raises((OutputError, FileError), match=words):
            upgrade_hub(folder, newer)
    with closing(sqlite3.connect(folder / "hub.sqlite")) as other, other:
        other.execute("UPDATE alembic_version SET version_num = ?", (SCHEMA_REVISION,))
    with open_hub(folder) as hub:
        assert verify_hub(hub) == []


def test_new_tables_are_those_of_the_changes(tmp_path):
    """What `database.py` says is what a database has that went through all changes."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    database = create_database_file(tmp_path / "new.sqlite")
    with database.reading() as connection:
        found = compare_metadata(MigrationContext.configure(connection), metadata)
        names = {each[1].name for each in found if each[0] == "remove_table"}
        assert all(name.startswith("listing_") for name in names)
        assert [each for each in found if each[0] not in ("remove_table", "remove_index")] == []
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2  # FULL
    database.close()


@pytest.mark.usefixtures("online")
def test_a_registry_goes_into_a_hub_and_comes_out_again(tmp_path):
    registry = LocalRegistry(tmp_path / "registry")
    registry.root.mkdir()
    for seed in range(3):
        folder = registries.write_sample(tmp_path / f"made-{seed}", seed)
        entry = registry.put(folder, Publication("polite", None, ("best",)))
    registry.yank(registry.resolve("polite", "v2"), "why not")
    registry.delete("polite", "v1")
    with real_hub.serving(tmp_path / "hub") as running:
        running.org("acme")
    out = LocalRegistry(tmp_path / "out")
    out.root.mkdir()
    with open_hub(tmp_path / "hub") as hub:
        assert len(import_registry(hub, str(registry.root), "acme").copied) == 2
        assert import_registry(hub, str(registry.root), "acme").copied == []
        assert len(export_registry(hub, str(out.root), None).copied) == 2
        with pytest.raises(ConfigError, match="no user or organisation"):
            import_registry(hub, str(registry.root), "nobody")
    before, after = registry.versions("polite"), out.versions("polite")
    assert [(e.version, e.digest, e.yanked) for e in before] == [
        (e.version, e.digest, e.yanked) for e in after
    ]
    assert after[-1].tags == ("best",)
    assert after[-1].digest == entry.digest
    assert out.verify() == []


@pytest.mark.usefixtures("online")
def test_an_export_has_everything_however_much_there_is(tmp_path, monkeypatch):
    """Lists are read to their end, and what is missing ends the command with its names."""
    monkeypatch.setattr(hub_reader, "MOST_RESULTS", 3)
    monkeypatch.setattr(registry_hub, "MOST_LOOKUPS", 2)
    monkeypatch.setattr(registry_hub, "MOST_VERSIONS", 2)
    registry = LocalRegistry(tmp_path / "registry")
    registry.root.mkdir()
    for seed in range(12):
        name = "many" if seed < 5 else f"name-{seed}"
        registry.put(registries.write_sample(tmp_path / f"made-{seed}", seed), Publication(name))
    registry.yank(registry.resolve("name-7"), "every version of it")
    for version in ("v1", "v4"):
        registry.yank(registry.resolve("many", version), "some")
    with real_hub.serving(tmp_path / "hub") as running:
        running.org("acme")

    def rows(root):
        found = LocalRegistry(root).everything().values()
        return sorted(
            (e.name, e.version, e.digest, e.tags, e.yanked) for each in found for e in each.entries
        )

    with open_hub(tmp_path / "hub") as hub:
        assert len(import_registry(hub, str(registry.root), "acme").copied) == 12
        out = tmp_path / "out"
        out.mkdir()
        with monkeypatch.context() as patch:
            put, done = LocalRegistry.put, []

            def fail(self, folder, publication):
                done.append(publication.name)
                if len(done) > 4:
                    raise OutputError("the disk is full")
                return put(self, folder, publication)

            patch.setattr(LocalRegistry, "put", fail)
            assert len(export_registry(hub, str(out), None).refused) == 8
        report = export_registry(hub, str(out), None)
        assert (len(report.copied), report.unchanged, report.refused) == (8, 4, {})
        assert rows(out) == rows(registry.root)
        monkeypatch.setattr(LocalRegistry, "yank", lambda *given: None)
        for lost, patched in (("name-7", "yank"), ("many", "put")):
            shutil.rmtree(out)
            out.mkdir()
            if patched == "put":
                monkeypatch.setattr(copying, "_copy", lambda *given: None)
            missing = export_registry(hub, str(out), None).refused
            assert any(lost in each for each in missing)
