"""Kill a hub's housekeeping before each of its lines.

    python crash_hub.py FOLDER MOST [SCENARIO ...]      prints one JSON object per scenario

A forked child collects, or backs up for the first or the second time, and is killed (SIGKILL)
before a given line of housekeeping.py. Then every commit that was acknowledged is whole
in the hub, and in the backup, if there is one; and the same command does its work without repair.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import crash

from adapterhub.hub import backups, housekeeping
from adapterhub.hub.accounts import create_namespace, find_owner
from adapterhub.hub.backups import backup_hub
from adapterhub.hub.commits import CommitChange, branch_head, grant, write_commit
from adapterhub.hub.housekeeping import collect, verify_hub
from adapterhub.hub.repositories import create_repository, delete_repository, find_repository
from adapterhub.hub.state import DATABASE, Hub, create_hub, open_hub
from adapterhub.hub.trees import read_tree

KEPT = {"a.md": b"a", "in/b.md": b"b"}


class Place:
    """A hub with two acknowledged commits, and what a collection has to do."""

    def __init__(self, folder: Path) -> None:
        self.template, self.hub, self.target = (
            folder / name for name in ("template", "hub", "copy")
        )
        create_hub(self.template)
        with open_hub(self.template) as hub:
            commit(hub, "acme/kept", {"a.md": b"a"})
            self.old = folder / "old"
            backup_hub(self.template, self.old)
            commit(hub, "acme/kept", KEPT)
            for number in range(3):
                commit(hub, f"acme/gone-{number}", {"x.md": b"x%d" % number})
            with hub.database.writing() as connection:
                for number in range(3):
                    found = find_repository(connection, "models", f"acme/gone-{number}")
                    delete_repository(connection, found)
                known = find_repository(connection, "models", "acme/kept")
                staged = hub.blobs.stage(b"never committed")
                hub.blobs.put(staged)
                grant(connection, known.id, [staged.info], is_committed=False)
            (hub.blobs.incoming / "half").write_bytes(b"half of a file")

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
            state = "new" if is_new(self.target) else "old"
            require_whole(self.target, KEPT if state == "new" else {"a.md": b"a"})
        self.back_up()
        require_whole(self.target, KEPT)
        return state


def commit(hub: Hub, name: str, files: dict[str, bytes]) -> None:
    """Commit files, as a push that was acknowledged."""
    with hub.database.writing() as connection:
        owner = find_owner(connection, "acme") or create_namespace(connection, "acme", "org")
        found = find_repository(connection, "models", name) or create_repository(
            connection, "models", name, owner, is_private=False
        )
        change = CommitChange(files={path: hub.blobs.stage(data) for path, data in files.items()})
        write_commit(connection, hub.blobs, found.id, "main", change, "ada")


def is_new(folder: Path) -> bool:
    """Return whether a hub has the second commit."""
    with open_hub(folder) as hub:
        return len(files_of(hub)) == len(KEPT)


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
    crash.TRACED = {backups.__file__, housekeeping.__file__}
    place = Place(folder)
    scenarios = {
        "collection": (place.prepare, place.collect, place.check_collected),
        "first backup": (place.prepare, place.back_up, place.check_backup),
        "second backup": (lambda: place.prepare(place.old), place.back_up, place.check_backup),
    }
    for name in names or scenarios:
        done = crash.killed_at_each_line(*scenarios[name], most)
        print(json.dumps({"scenario": name, **done}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
