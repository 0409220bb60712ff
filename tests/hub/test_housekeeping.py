"""Collect, verify, back up, restore, upgrade; registries that go in, come out, and are read."""

import shutil
import socket
import sqlite3
from contextlib import closing

import httpx2
import pytest
from sqlalchemy import select, text

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.hub import backups, readonly_registry
from adapterhub.hub.backups import backup_hub, restore_hub, upgrade_hub
from adapterhub.hub.commits import TAG, refs_of
from adapterhub.hub.database import SCHEMA_REVISION, create_database_file, metadata
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.hub.import_export import answering_in_thread, export_registry, import_registry
from adapterhub.hub.readonly_registry import is_registry, viewing
from adapterhub.hub.server import HubApp, known_hosts
from adapterhub.hub.state import HubOptions, open_database, open_hub, schema_revision, serving_alone
from adapterhub.registry import copying, hub_reader
from adapterhub.registry import hub as registry_hub
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Publication
from tests.kit import real_hub, registries
from tests.kit.real_hub import answered, commit, create, digest
from tests.kit.selection import cases_of
from tests.kit.session import Lines, wait_until


def test_what_no_commit_needs_is_collected_after_its_time(new_hub, ada):
    hub = new_hub.hub
    create(ada, "acme/x")
    commit(ada, "acme/x", {"a.md": b"first"})
    commit(ada, "acme/x", {"a.md": b"second"})
    oid = real_hub.upload(ada, "acme/x", b"waiting")
    new_hub.overwrite("ab" * 32, b"of a transaction that was undone")
    assert collect(hub, dry_run=True).files == 1
    assert collect(hub).files == 1
    assert collect(hub).files == 0  # the upload waits for its commit
    assert collect(hub, dry_run=True, grace=-1).files == 1
    assert hub.blobs.size(oid) >= 0
    assert collect(hub, grace=-1).files == 1
    assert hub.blobs.size(oid) < 0
    assert commit(ada, "acme/x", large={"b.md": (oid, 7)}).status_code == 400
    oid = real_hub.upload(ada, "acme/x", b"waiting")
    assert commit(ada, "acme/x", large={"b.md": (oid, 7)}).status_code == 200
    assert collect(hub, grace=-1).files == 0
    real_hub.delete(ada, "acme/x")
    assert collect(hub).files >= 4
    assert list(hub.blobs.all()) == []
    assert verify_hub(hub) == []


def test_nothing_is_lost_to_a_collection_while_others_push(new_hub, ada):
    real_hub.push_during_collections(new_hub.hub.place, ada)
    assert verify_hub(new_hub.hub) == []


def test_a_backup_of_a_hub_that_serves_is_a_hub(new_hub, ada, tmp_path):
    target, again = tmp_path / "backup", tmp_path / "again"
    create(ada, "acme/x")
    commit(ada, "acme/x", {"a.md": b"a"})
    assert backup_hub(new_hub.hub.place, target) == 2
    commit(ada, "acme/x", {"b.md": b"b"})
    assert backup_hub(new_hub.hub.place, target) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    for function in (backup_hub, restore_hub):
        with pytest.raises(OutputError):
            function(target, tmp_path / "other")
    assert restore_hub(target, again) == 3
    with real_hub.serving(again) as hub:
        hub.tokens = new_hub.tokens
        assert hub.as_user("ada").get("/acme/x/resolve/main/b.md").content == b"b"
    path = next(path for path in (target / "blobs").rglob("*") if path.is_file())
    path.chmod(0o600)
    path.write_bytes(b"x")
    with pytest.raises(FileError, match="damaged"):
        restore_hub(target, tmp_path / "damaged")
    path.unlink()
    with pytest.raises(FileError, match="missing"):
        restore_hub(target, tmp_path / "missing")


DAMAGE = {"changed": b"some tex\xf4", "shorter": b"some", "empty": b"", "missing": None}


def damage(hub, sha256, data):
    if data is None:
        hub.hub.blobs.remove(sha256)
    else:
        hub.overwrite(sha256, data)


@pytest.mark.parametrize("kind", DAMAGE)
def test_right_bytes_that_are_pushed_again_heal(hub, client, kind):
    ways = ("commit", "commit again elsewhere", "lfs", "stock client")
    create(client, f"acme/x-{kind}")
    create(client, f"acme/y-{kind}")
    for way in ways:
        data, path, name = f"{kind} {way}".encode(), f"{way[-6:]}.md", f"acme/x-{kind}"
        commit(client, name, {path: data})
        damage(hub, digest(data), DAMAGE[kind])
        if way == "commit again elsewhere":
            assert commit(client, f"acme/y-{kind}", {"b.md": data}).status_code == 200
        elif way == "lfs":
            assert real_hub.upload(client, name, data) == digest(data)
        else:
            url = f"/api/models/{name}/preupload/main"
            asked = {"files": [{"path": path, "size": len(data)}]}
            if way == "stock client":  # which sends nothing where there is an oid
                assert "oid" not in client.post(url, json=asked).json()["files"][0]
            assert commit(client, name, {path: data}).status_code == 200
            assert client.post(url, json=asked).json()["files"][0]["oid"]
        assert client.get(f"/{name}/resolve/main/{path}").content == data
    assert verify_hub(hub.hub) == []


def test_a_backup_repairs_what_is_damaged(new_hub, ada, tmp_path):
    kept = {f"{kind}.md": f"some text, {kind}".encode() for kind in DAMAGE}
    new = {f"new-{kind}.md": f"new, {kind}".encode() for kind in DAMAGE}
    create(ada, "acme/x")
    commit(ada, "acme/x", kept)
    backup_hub(new_hub.hub.place, tmp_path / "backup")
    commit(ada, "acme/x", new)
    for data, bytes_ in zip((*kept.values(), *new.values()), (*DAMAGE.values(),) * 2, strict=True):
        damage(new_hub, digest(data), bytes_)
    with open_hub(tmp_path / "backup") as backup:
        problems = verify_hub(new_hub.hub, backup.blobs)  # what the backup does not have
    assert len(problems) == len(new)
    for kind, data in zip(DAMAGE, new.values(), strict=True):
        said = "missing" if kind == "missing" else "its bytes have changed"
        assert f"blobs/{digest(data)}: {said} (of acme/x)" in problems
    for path, data in kept.items():
        assert ada.get(f"/acme/x/resolve/main/{path}").content == data


@pytest.fixture
def new_place(request, tmp_path):
    return real_hub.place_of(request, tmp_path / "hub")


@pytest.fixture
def newer(tmp_path):
    return real_hub.write_changes(tmp_path / "versions")


@pytest.fixture
def folder(tmp_path):
    """A hub in a folder, with a user and a repository."""
    with real_hub.serving(tmp_path / "hub") as hub:
        hub.user("ada")
        create(hub.as_user("ada"), "ada/x")
    return tmp_path / "hub"


def test_an_older_hub_is_upgraded_and_kept_as_it_was(folder, newer):
    assert upgrade_hub(folder) is None
    with serving_alone(folder), pytest.raises(ConfigError, match="another server"):
        upgrade_hub(folder, newer)
    assert upgrade_hub(folder, newer) == SCHEMA_REVISION
    assert schema_revision(folder) == real_hub.NEXT
    with closing(sqlite3.connect(folder / "hub.sqlite")) as connection:
        assert [*connection.execute("SELECT name, reason FROM audit, repositories LIMIT 1")]
    with pytest.raises(FileError, match="newer adapterhub"), open_hub(folder):
        pass
    with pytest.raises(FileError, match="newer adapterhub"):
        upgrade_hub(folder)
    (folder / f"before-{real_hub.NEXT}.sqlite").replace(folder / "hub.sqlite")
    with open_hub(folder) as hub:
        assert verify_hub(hub) == []


@pytest.mark.parametrize("new_place", real_hub.STATES, indirect=True)
def test_a_hub_of_the_first_release_keeps_its_rows(new_place):
    place, blobs = new_place
    with real_hub.serving(place, blobs=blobs) as running:
        running.user("ada")
        client = running.as_user("ada")
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
        found = [each[0] for each in compare_tables(connection)]
        assert {*found} <= {"remove_index", "remove_table"}
        assert verify_hub(hub) == []


def compare_tables(connection):
    """Return how a database differs from the tables of this release."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    return compare_metadata(MigrationContext.configure(connection), metadata)


WATCHED = {"collection": "hub/gc.py", "backup": "hub/backups.py", "upgrade": "hub/backups.py"}


@pytest.mark.parametrize("task", WATCHED)
def test_a_task_that_is_interrupted_before_a_line_loses_nothing(task, tmp_path, newer):
    """Every commit is whole after it, in the hub and in its backup; the task ends its work."""
    template, old, place, target = (tmp_path / n for n in ("template", "old", "hub", "target"))
    with real_hub.serving(template) as hub:
        hub.user("ada")
        client = hub.as_user("ada")
        for name in ("ada/x", "ada/gone"):
            create(client, name)
            commit(client, name, {"a.md": name.encode()})
        backup_hub(template, old)
        commit(client, "ada/x", {"b.md": b"b"})
        real_hub.delete(client, "ada/gone")
        real_hub.upload(client, "ada/x", b"never committed")

    def act():
        if task == "collection":
            with open_hub(place) as hub:
                collect(hub, grace=-60)
        elif task == "backup":
            backup_hub(place, target)
        elif schema_revision(place) == SCHEMA_REVISION:
            upgrade_hub(place, newer)

    def run(lines):
        for folder, source in ((place, template), (target, old)):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
        return lines.run(act)

    every = Lines()
    assert run(every) is None
    for place_of_line in cases_of(sorted(p for p in every.runs if p[0] == WATCHED[task]), 6, 2):
        line = place_of_line, 0
        assert isinstance(run(Lines(line, interrupt)), KeyboardInterrupt), line
        for folder in (place, target):
            if schema_revision(folder) == SCHEMA_REVISION:
                with open_hub(folder) as hub:
                    assert verify_hub(hub) == [], line
        act()
        if task == "upgrade":
            assert schema_revision(place) == real_hub.NEXT
            (place / f"before-{real_hub.NEXT}.sqlite").replace(place / "hub.sqlite")
        with open_hub(target if task == "backup" else place) as hub:
            assert verify_hub(hub) == []
            assert hub.blobs.size(digest(b"b")) == 1
            unused = hub.blobs.size(digest(b"never committed"))
            assert (unused < 0) == (task == "collection"), line


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_copy_that_is_not_possible_is_told_in_a_sentence(folder, tmp_path, newer, monkeypatch):
    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(backups, "_copy_file", full)
        for copy, place in ((backup_hub, tmp_path / "copy"), (upgrade_hub, newer)):
            with pytest.raises(OutputError, match="disk is full"):
                copy(folder, place)
    with closing(sqlite3.connect(folder / "hub.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE settings SET value = value")
        with pytest.raises(OutputError, match="locked"):
            upgrade_hub(folder, newer)
        other.execute("ROLLBACK")
    for revision, words in (("0000", "0000"), ("zzzz", "newer adapterhub"), (SCHEMA_REVISION, "")):
        with closing(sqlite3.connect(folder / "hub.sqlite")) as other, other:
            other.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        if words:
            with pytest.raises((OutputError, FileError), match=words):
                upgrade_hub(folder, newer)
    with open_hub(folder) as hub:
        assert verify_hub(hub) == []


def test_new_tables_are_those_of_the_changes(tmp_path):
    """What `database.py` says is what a database has that went through all changes."""
    database = create_database_file(tmp_path / "new.sqlite")
    with closing(database), database.reading() as connection:
        found = compare_tables(connection)
        assert all(each[0] == "remove_index" or is_listing(each) for each in found)
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2  # FULL


def is_listing(difference):
    """Return whether a difference is a table of SQLite's search alone."""
    return difference[0] == "remove_table" and difference[1].name.startswith("listing_")


@pytest.mark.usefixtures("online")
def test_an_export_has_everything_however_much_there_is(tmp_path, monkeypatch):
    """Lists are read to their end, and what is missing ends the command with its names."""
    monkeypatch.setattr(hub_reader, "MOST_RESULTS", 3)
    monkeypatch.setattr(registry_hub, "MOST_LOOKUPS", 2)
    monkeypatch.setattr(registry_hub, "MOST_VERSIONS", 2)
    registry = LocalRegistry(tmp_path / "registry")
    registry.root.mkdir()
    for seed in range(9):
        name = "many" if seed < 5 else f"name-{seed}"
        registry.put(registries.write_sample(tmp_path / f"made-{seed}", seed), Publication(name))
    registry.yank(registry.resolve("name-7"), "every version of it")
    for version in ("v1", "v4"):
        registry.yank(registry.resolve("many", version), "some")
    registry.delete("many", "v2")
    registry.tag(registry.resolve("many", "v3"), "best")
    with real_hub.serving(tmp_path / "hub") as running:
        running.org("acme")

    def rows(root):
        found = LocalRegistry(root).everything().values()
        return sorted(
            (e.name, e.version, e.digest, e.tags, e.yanked) for each in found for e in each.entries
        )

    with open_hub(tmp_path / "hub") as hub:
        assert len(import_registry(hub, str(registry.root), "acme").copied) == 8
        assert import_registry(hub, str(registry.root), "acme").copied == []
        with pytest.raises(ConfigError, match="no user or organisation"):
            import_registry(hub, str(registry.root), "nobody")
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
            assert len(export_registry(hub, str(out), None).refused) == 4
        report = export_registry(hub, str(out), None)
        assert (len(report.copied), report.unchanged, report.refused) == (4, 4, {})
        assert rows(out) == rows(registry.root)
        assert LocalRegistry(out).verify() == []
        monkeypatch.setattr(LocalRegistry, "yank", lambda *given: None)
        for lost, patched in (("name-7", "yank"), ("many", "put")):
            shutil.rmtree(out)
            out.mkdir()
            if patched == "put":
                monkeypatch.setattr(copying, "_copy", lambda *given: None)
            missing = export_registry(hub, str(out), None).refused
            assert any(lost in each for each in missing)


@pytest.mark.usefixtures("online")
def test_a_registry_is_a_hub_that_only_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(readonly_registry, "_LOOK_SECONDS", 0.05)
    registry = LocalRegistry(tmp_path / "registry")
    registry.root.mkdir()

    def publish(seed, **options):
        folder = registries.write_sample(tmp_path / f"made-{seed}", seed)
        options["published"] = f"2026-11-2{seed}T10:00:00Z"
        return registry.put(folder, Publication("polite", **options))

    assert not is_registry(registry.root)
    first, second = publish(0, tags=("best",)), publish(1)
    registry.yank(publish(2), "why not")
    assert is_registry(registry.root)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    options = HubOptions(hosts=known_hosts("127.0.0.1", port))
    with viewing(registry.root, options) as hub, answering_in_thread(HubApp(hub), listening):
        address = f"http://127.0.0.1:{port}"
        store = HubStore(address, token=False)
        assert [entry.version for entry in store.versions("registry/polite")] == ["v1", "v2", "v3"]
        assert store.resolve("registry/polite").digest == second.digest
        assert store.resolve("registry/polite", "best").digest == first.digest
        assert store.resolve("registry/polite", "v3").yanked == "why not"
        got = store.get(store.resolve("registry/polite", "best"))
        for file in ("adapter.safetensors", "adapter.json", "README.md"):
            version = registry.root / "acme--bert-small/polite/v1"
            assert (got / file).read_bytes() == (version / file).read_bytes()
        with httpx2.Client(base_url=address) as client:
            url = "/api/models/registry/polite/refs"
            tags = client.get(url).json()["tags"]
            answered(commit(client, "registry/polite", {"a.md": b"a"}), 403, "adapterhub publish")
            assert client.get("/registry/polite").status_code == 200
            publish(3)
            wait_until(lambda: client.get(url).json()["tags"] != tags)
        assert store.resolve("registry/polite").version == "v4"
    with viewing(registry.root, options) as again, again.database.reading() as connection:
        found = refs_of(connection, 1)[TAG]
    assert {each["name"]: each["targetCommit"] for each in tags}.items() <= found.items()
