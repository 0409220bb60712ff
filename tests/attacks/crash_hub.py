"""Kill a hub's housekeeping, or what a mirror fetches, before each of its lines.

    python crash_hub.py FOLDER MOST [SCENARIO ...]      prints one JSON object per scenario

A forked child collects, backs up for the first or the second time, upgrades, or fetches from an
upstream, and is killed (SIGKILL) before a given line of the modules that do it. Then every commit
that was acknowledged is whole in the hub, and in the backup, if there is one; and the same command
does its work without repair.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import crash
from alembic.operations import batch
from alembic.runtime import migration

from adapterhub.hub import backups, blobs, database, gc, mirror_client, mirror_store, state
from adapterhub.hub.accounts import create_namespace, find_owner
from adapterhub.hub.backups import backup_hub, upgrade_hub
from adapterhub.hub.commits import CommitChange, branch_head, grant, read_tree, write_commit
from adapterhub.hub.database import changes_of
from adapterhub.hub.gate import changing
from adapterhub.hub.gc import collect, verify_hub
from adapterhub.hub.mirror_store import Copies
from adapterhub.hub.repositories import create_repository, delete_repository, find_repository
from adapterhub.hub.state import DATABASE, Hub, HubOptions, create_hub, open_hub
from adapterhub.registry import hub_client, hub_reader
from tests.kit import fake_hub, real_hub
from tests.kit.real_hub import digest

KEPT = {"a.md": b"a", "in/b.md": b"b"}
MIRRORED = "far/away"
FAR = {"README.md": b"# A card\n", "adapter_config.json": b"{}", "in/c.txt": b"c" * 9_000}
UPGRADING = (backups, state, database, migration, batch)
MIRRORING = (mirror_store, blobs, mirror_client, hub_client, hub_reader)


class Place:
    """A hub with two acknowledged commits, and what a collection has to do."""

    def __init__(self, folder: Path, upstream: str) -> None:
        self.upstream = HubOptions(upstream=upstream)
        self.versions = real_hub.write_changes(folder / "versions")
        self.template, self.hub, self.target = (
            folder / name for name in ("template", "hub", "copy")
        )
        made = folder / "made"
        create_hub(made)
        with open_hub(made) as hub:
            commit(hub, "acme/kept", {"a.md": b"a"})
            self.old = folder / "old"
            backup_hub(made, self.old)
            commit(hub, "acme/kept", KEPT)
            for number in range(3):
                commit(hub, f"acme/gone-{number}", {"x.md": b"x%d" % number})
            with changing(hub) as connection:
                for number in range(3):
                    found = find_repository(connection, "models", f"acme/gone-{number}")
                    delete_repository(connection, found)
                known = find_repository(connection, "models", "acme/kept")
                staged = hub.blobs.stage(b"never committed")
                changes_of(connection).files.append(staged)
                grant(connection, known.id, [staged.info], is_committed=False)
            (hub.blobs.incoming / "half").write_bytes(b"half of a file")
            shutil.copytree(made, self.template)  # as a server that was killed leaves it
        assert (self.template / f"{DATABASE}-wal").stat().st_size > 0

    def prepare(self, target: Path | None = None) -> None:
        """Begin anew, with a backup or without."""
        for folder, source in ((self.hub, self.template), (self.target, target)):
            shutil.rmtree(folder, ignore_errors=True)
            if source is not None:
                shutil.copytree(source, folder, symlinks=True)

    def collect(self) -> None:
        """Collect, without time of grace."""
        with open_hub(self.hub) as hub:
            collect(hub, grace=-60)

    def back_up(self) -> None:
        """Back up to the target."""
        backup_hub(self.hub, self.target)

    def check_collected(self) -> str:
        """Check the hub after a kill; say how far it was, and finish."""
        require_whole(self.hub, KEPT)
        with open_hub(self.hub) as hub:
            left = [*hub.blobs.all(), *hub.blobs.incoming.iterdir()]
        self.collect()
        require_whole(self.hub, KEPT)
        with open_hub(self.hub) as hub:
            assert len([*hub.blobs.all()]) == 2
            assert not [*hub.blobs.incoming.iterdir()]
        return f"{len(left)} files left"

    def check_backup(self) -> str:
        """Check the hub and the backup after a kill; say which one it was, and finish."""
        require_whole(self.hub, KEPT)
        state = "none"
        if (self.target / DATABASE).exists():
            with open_hub(self.target) as hub:
                state = "new" if files_of(hub) == KEPT else "old"
            require_whole(self.target, KEPT if state == "new" else {"a.md": b"a"})
        self.back_up()
        require_whole(self.target, KEPT)
        return state

    def upgrade(self) -> None:
        """Change the tables to those of the next release."""
        upgrade_hub(self.hub, self.versions)

    def check_upgraded(self) -> str:
        """Check the hub after a kill; say which one it was, finish, and go back."""
        found = state.schema_revision(self.hub)
        if found == state.SCHEMA_REVISION:
            require_whole(self.hub, KEPT)
        assert upgrade_hub(self.hub, self.versions) == (
            found if found == state.SCHEMA_REVISION else None
        )
        with patch.object(state, "SCHEMA_REVISION", real_hub.NEXT):
            require_whole(self.hub, KEPT)
        assert not [*self.hub.glob("upgrading*")]
        (self.hub / f"before-{real_hub.NEXT}.sqlite").replace(self.hub / DATABASE)
        require_whole(self.hub, KEPT)
        return "old" if found == state.SCHEMA_REVISION else "new"

    def mirror(self) -> None:
        """Fetch all that the upstream has of a repository."""
        with open_hub(self.hub, self.upstream) as hub:
            Copies(hub).fetch_all("models", MIRRORED)

    def check_mirrored(self) -> str:
        """Check the hub after a kill; say what of the repository was here, and fetch the rest."""
        require_whole(self.hub, KEPT)
        with open_hub(self.hub) as hub:
            here = mirrored_files(hub)
        with state.serving_alone(self.hub):
            assert not [*(self.hub / "incoming").iterdir()]
            self.mirror()
            assert not [*(self.hub / "incoming").iterdir()]
        require_whole(self.hub, KEPT)
        with open_hub(self.hub) as hub:
            assert mirrored_files(hub) == FAR
            collect(hub, grace=-60)
            found = {*map(digest, FAR.values()), *map(digest, KEPT.values())}
            assert {*hub.blobs.all()} == found
        return "nothing" if here is None else f"files: {len(here)}"


def mirrored_files(hub: Hub) -> dict[str, bytes] | None:
    """Return the files that are kept of the mirrored repository, or None; its list is whole."""
    with hub.database.reading() as connection:
        found = find_repository(connection, "models", MIRRORED)
        if found is None:
            return None
        tree = read_tree(connection, branch_head(connection, found.id).tree)
    assert tree.keys() == FAR.keys()
    kept = {path: Copies(hub).kept(found, blob) for path, blob in tree.items()}
    here = {path: hub.blobs.read(sha256, 1 << 30) for path, sha256 in kept.items() if sha256}
    assert all(FAR[path] == data for path, data in here.items())
    return here


@contextmanager
def other_hub() -> Iterator[str]:
    """Run an upstream in a child, whose threads are not in the children that are killed."""
    (reader, writer), (ends, held) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        with fake_hub.serving() as (hub, address):
            hub.repositories[MIRRORED] = fake_hub.Repository()
            hub.repositories[MIRRORED].commit(FAR)
            os.write(writer, address.encode())
            os.read(ends, 1)  # until this process has ended, however it ends
        os._exit(0)
    try:
        yield os.read(reader, 1000).decode()
    finally:
        os.close(held)
        os.waitpid(child, 0)


def commit(hub: Hub, name: str, files: dict[str, bytes]) -> None:
    """Commit files, as a push that was acknowledged."""
    with changing(hub) as connection:
        owner = find_owner(connection, "acme") or create_namespace(connection, "acme", "org")
        found = find_repository(connection, "models", name) or create_repository(
            connection, "models", name, owner, is_private=False
        )
        change = CommitChange(files={path: hub.blobs.stage(data) for path, data in files.items()})
        write_commit(connection, found.id, "main", change, "ada")


def files_of(hub: Hub) -> dict[str, bytes]:
    """Return the files of the head."""
    with hub.database.reading() as connection:
        found = find_repository(connection, "models", "acme/kept")
        tree = read_tree(connection, branch_head(connection, found.id).tree)
    return {path: hub.blobs.read(blob.sha256, 100) for path, blob in tree.items()}


def require_whole(folder: Path, files: dict[str, bytes]) -> None:
    """Require that a hub opens, has no problem, and has the files that were acknowledged."""
    with open_hub(folder) as hub:
        problems = verify_hub(hub)
        assert problems == [], problems
        assert files_of(hub) == files


def main(folder: Path, most: int, names: list[str]) -> None:
    """Run some scenarios, or all."""
    if most < 1000:  # unlike a power cut, a kill loses nothing that was written
        os.fsync = lambda descriptor: None
    with other_hub() as address:
        place = Place(folder, address)
        collection = (place.prepare, place.collect, place.check_collected)
        upgrade = (place.prepare, place.upgrade, place.check_upgraded)
        mirror = (place.prepare, place.mirror, place.check_mirrored)
        again = (lambda: place.prepare(place.old), place.back_up, place.check_backup)
        scenarios = {
            "collection": ((gc,), collection),
            "first backup": ((backups,), (place.prepare, place.back_up, place.check_backup)),
            "second backup": ((backups,), again),
            "upgrade": (UPGRADING, upgrade),
            "mirror": (MIRRORING, mirror),
        }
        for name in names or scenarios:
            modules, (prepare, act, check) = scenarios[name]
            prepare()
            act()  # what is remembered from the first time on takes fewer lines
            crash.TRACED = {module.__file__ for module in modules}
            done = crash.killed_at_each_line(prepare, act, check, most)
            print(json.dumps({"scenario": name, **done}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
