"""A record of the versions that stores have given, to notice when a store goes back.

    seen/HASH.json    {"name": "acme/polite", "place": "https://huggingface.co", "version": 1,
                       "versions": {"v3": {"digest": ..., "seen": "2026-11-22"}}}

One small file for each name in a store, in the user's state folder or `$ADAPTERHUB_STATE`. It is
read on each pull, and written only when a version is seen for the first time. It is no secret, and
may be deleted at any time: then nothing is known of older pulls.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from adapterhub.config.user_folders import state_folder
from adapterhub.errors import AdapterhubError, RegistryError, warn_user
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, read_file, replace_file
from adapterhub.registry.store import Entry, Store, version_number

MOST_VERSIONS, MOST_NAMES = 64, 4_096  # some 8 kB a name, 32 MB in all; the oldest go first
_MAX_BYTES = 32 << 10
_LOCK_SECONDS = 5.0  # a record is not worth a longer wait
_SCHEMA = schema.record(
    {
        "version": schema.integer(1, 1),
        "place": schema.text(r"(?s).{1,5000}", "a place"),
        "name": schema.text(r".{1,500}", "a name"),
        "versions": schema.mapping(
            schema.text(r"v[1-9][0-9]{0,8}", "a version"),
            schema.record(
                {
                    "digest": schema.text(r"[0-9a-f]{64}", "a sha256"),
                    "seen": schema.text(r"\d{4}-\d\d-\d\d", "a date"),
                }
            ),
            0,
            MOST_VERSIONS,
        ),
    }
)


@dataclass(frozen=True)
class SeenVersions:
    """What one store has given under one name: (digest, date) by version number."""

    place: str
    name: str
    versions: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file of this record."""
        key = hashlib.sha256(f"{self.place}\n{self.name}".encode()).hexdigest()[:32]
        return _folder() / f"{key}.json"


def place_of_folder(root: Path) -> str:
    """Return the place of a local registry, for its record."""
    return ascii(str(root.resolve()))[1:-1]  # a path may be no valid text


def seen_versions(place: str, entry: Entry) -> SeenVersions:
    """Read what a store has given under the name of an entry; a damaged record is a warning.

    Args:
        place: the origin of a hub, or the folder of a registry.
        entry: a version of the name.
    """
    # On a hub a name has one backbone.
    name = entry.name if "/" in entry.name else f"{entry.backbone}/{entry.name}"
    empty = SeenVersions(place, name)
    try:
        data = read_file(empty.path, 1, _MAX_BYTES, None)
    except UnreadableError as error:
        if str(error) != "missing":
            _warn_damaged(empty, str(error))
        return empty
    tree, problems = schema.parse_object(data, _MAX_BYTES)
    if problems := problems or _SCHEMA("", tree):
        _warn_damaged(empty, problems[0])
        return empty
    rows = tree["versions"].items()
    return SeenVersions(place, name, {int(v[1:]): (r["digest"], r["seen"]) for v, r in rows})


def check_changed(seen: SeenVersions, entry: Entry) -> None:
    """Refuse other bytes than a hub gave before for the same version; for a folder, warn.

    Raises:
        RegistryError: a hub gives other bytes.
    """
    digest, date = seen.versions.get(version_number(entry.version) or 0, (entry.digest, ""))
    if digest == entry.digest:
        return
    problem = f"{entry.reference} has other bytes than on {date}; a version never changes"
    if "://" not in seen.place:  # one's own folder, or git, may have been set back on purpose
        warn_user(f"{problem} (sha256 {digest[:12]}, now {entry.digest[:12]})", stacklevel=4)
        return
    raise RegistryError(
        problem,
        expected=f"sha256 {digest}",
        offenders=[f"sha256 {entry.digest}"],
        hint=f"ask the publisher; if the change is genuine, delete {seen.path}",
    )


def warn_if_back(seen: SeenVersions, entry: Entry, store: Store) -> None:
    """Warn if the newest version of a store is older than one that it gave before.

    Args:
        seen: what the store gave before.
        entry: the newest version that the store has now.
        store: the store, to look up whether the newer version was yanked.
    """
    highest = max(seen.versions, default=0)
    if highest <= (version_number(entry.version) or 0):
        return
    _, date = seen.versions[highest]
    reason = _yank_reason(store, entry, highest)
    if reason is None:
        what = f"is the newest of its store, which had v{highest} on {date}: it has gone back"
    else:
        what = f"is the newest; v{highest}, seen on {date}, was yanked: {reason}"
    warn_user(f"{entry.reference} {what}", stacklevel=4)


def record_version(seen: SeenVersions, entry: Entry) -> None:
    """Record a version that a store gave; a record that cannot be written is a warning."""
    number = version_number(entry.version)
    if number is None or seen.versions.get(number, ("", ""))[0] == entry.digest:
        return
    try:
        seen.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock(seen), timeout=_LOCK_SECONDS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a damaged record, already given
                latest = seen_versions(seen.place, entry)  # another process may have added some
            _write(latest, number, entry.digest)
            _forget_oldest(seen.path.parent)
    except (OSError, Timeout) as error:
        warn_user(f"cannot record that {entry.reference} was seen: {error}", stacklevel=4)


def forget_version(seen: SeenVersions, version: str) -> None:
    """Remove a version that the user deleted from the record, which then reports no step back."""
    if version_number(version) not in seen.versions:
        return
    left = {n: row for n, row in seen.versions.items() if n != version_number(version)}
    with contextlib.suppress(OSError, Timeout), FileLock(_lock(seen), timeout=_LOCK_SECONDS):
        _replace(replace(seen, versions=left))


def _lock(seen: SeenVersions) -> Path:
    return seen.path.parent / ".lock"


def _write(seen: SeenVersions, number: int, digest: str) -> None:
    today = datetime.now(timezone.utc).date().isoformat()
    versions = {**seen.versions, number: (digest, today)}
    newest = sorted(versions)[-MOST_VERSIONS:]
    _replace(replace(seen, versions={n: versions[n] for n in newest}))


def _replace(seen: SeenVersions) -> None:
    """Write a record."""
    rows = {f"v{n}": {"digest": d, "seen": date} for n, (d, date) in seen.versions.items()}
    tree = {"version": 1, "place": seen.place, "name": seen.name, "versions": rows}
    replace_file(seen.path, schema.canonical_json(tree))


def _forget_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.name.endswith(".json")]
    if len(files) <= MOST_NAMES:
        return
    for entry in sorted(files, key=lambda e: e.stat().st_mtime_ns)[: len(files) - MOST_NAMES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.path)


def _yank_reason(store: Store, entry: Entry, number: int) -> str | None:
    """Return the reason if the store says that it has a version, but yanked."""
    versions: Sequence[Entry] = ()
    with contextlib.suppress(AdapterhubError):
        versions = store.versions(entry.name, backbone=entry.fingerprint or None)
    reasons = (e.yanked for e in versions if version_number(e.version) == number)
    return next(reasons, None)


def _folder() -> Path:
    return state_folder() / "seen"


def _warn_damaged(seen: SeenVersions, problem: str) -> None:
    warn_user(
        f"the record {seen.path} of versions seen cannot be used: {problem}; it is written anew",
        stacklevel=5,
    )
