"""A commit in two requests: which way each file goes, and the commit itself."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import pathspec
from sqlalchemy import Connection
from starlette.responses import Response

from adapterhub.errors import one_line
from adapterhub.hub.accepted import (
    NamespaceRules,
    check_contents,
    check_name_of_file,
    check_signed,
)
from adapterhub.hub.accounts import WRITE, namespace_of
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.calls import HubCall, HubRoute, in_thread, json_answer
from adapterhub.hub.commit_lines import CommitLines
from adapterhub.hub.commits import (
    CommitChange,
    branch_head,
    commit_at,
    granted,
    used_bytes,
    write_commit,
)
from adapterhub.hub.listings import refresh_listing
from adapterhub.hub.refusals import HubRefusal, TooManyBytesError
from adapterhub.hub.trees import Tree, read_tree

_BODY = 4 << 20
_MOST_FILES = 256
_MOST_IGNORE = 64 << 10
_ALWAYS_LARGE = (".parquet",)
"""Dataset.push_to_hub deletes its file before the commit, so it cannot be sent within one."""
_IGNORE = ".gitignore"


def preupload(call: HubCall) -> Response:
    """Say for each file whether it is sent within the commit or before, or not at all.

    What would be refused later is refused here, before anything is sent.
    """
    fields = call.fields
    files = fields.get("files")
    if not isinstance(files, list) or len(files) > _MOST_FILES:
        raise HubRefusal(f"the body has no list of at most {_MOST_FILES} files")
    with call.hub.database.reading() as connection:
        head = branch_head(connection, call.repository.id, call.values["rev"])
        if head is None:
            commit_at(connection, call.repository.id, call.values["rev"])
        tree: Tree = read_tree(connection, head.tree) if head else {}
        rules = call.rules(connection)
        sizes = [_size_of(file) for file in files]
        check_quota(call, connection, sum(sizes))
    call.hub.blobs.require_room(sum(sizes))
    ignored = _ignored(call, fields.get("gitIgnore"), tree)
    found = [
        _way(call, file, size, tree, rules, ignored)
        for file, size in zip(files, sizes, strict=True)
    ]
    return json_answer({"files": found})


async def commit(call: HubCall) -> Response:
    """Commit what the body says; it is read as it arrives."""
    options = call.hub.options
    if call.query("create_pr") not in ("", "0", "false", "False"):
        raise HubRefusal("this hub has no pull requests: commit to a branch")
    lines = CommitLines(call.hub.blobs, min(options.regular_max, options.max_file))
    try:
        length = call.request.headers.get("content-length", "")
        if length.isdecimal():
            call.hub.blobs.require_room(int(length[:20]) * 3 // 4)
        async for piece in call.pieces():
            await in_thread(lines.feed, piece)
        change = await in_thread(lines.finish)
        return await in_thread(_commit, call, change)
    finally:
        await in_thread(lines.discard)


def _commit(call: HubCall, change: CommitChange) -> Response:
    """Check the files, and commit them."""
    folder = call.hub.blobs
    with call.hub.database.reading() as connection:
        rules = call.rules(connection)
        sent = granted(
            connection, call.repository.id, {sha256 for sha256, _ in change.large.values()}
        )
    check_large(call, change, sent, rules)
    for path, staged in change.files.items():
        check_contents(path, staged.path, staged.info.size, rules)
        folder.send(staged)
    with call.hub.database.writing() as connection:
        repository = call.current(connection)
        new = {staged.info.sha256: staged.info.size for staged in change.files.values()}
        known = granted(connection, repository.id, [*new])
        check_quota(call, connection, sum(s for d, s in new.items() if d not in known))
        done = write_commit(
            connection,
            folder,
            repository.id,
            call.values["rev"],
            change,
            call.visitor.user,
            check=lambda tree: check_signed(tree, change.reader(folder), repository.name, rules),
        )
        if done.is_new:
            refresh_listing(connection, repository, change.reader(folder))
            call.note(connection, "commit", f"{repository.path}@{done.commit.oid[:12]}")
    url = f"{call.base}/{repository.path}/commit/{done.commit.oid}"
    return json_answer(
        {"success": True, "commitOid": done.commit.oid, "commitUrl": url, "hookOutput": ""}
    )


def check_large(
    call: HubCall, change: CommitChange, sent: Mapping[str, BlobInfo], rules: NamespaceRules
) -> None:
    """Check the files that were sent before the commit, now that their names are known.

    Raises:
        HubRefusal: one is not accepted.
    """
    for path, (sha256, _) in change.large.items():
        check_name_of_file(path, rules)
        if sha256 in sent:  # the commit refuses others
            with call.hub.blobs.file(sha256) as file:
                check_contents(path, file, sent[sha256].size, rules)


def check_quota(call: HubCall, connection: Connection, size: int) -> None:
    """Refuse what a namespace has no room for.

    Raises:
        TooManyBytesError: it has not.
    """
    owner = namespace_of(connection, call.repository.namespace)
    quota = call.hub.options.quota if owner.quota is None else owner.quota
    if quota is None or not size:
        return
    used = used_bytes(connection, owner.id)
    if used + size > quota:
        raise TooManyBytesError(
            f"{owner.name} has used {used:,} of its {quota:,} bytes, so {size:,} more do not fit; "
            "adapterhub hub org DIR NAME --quota SIZE changes it"
        )


def _way(
    call: HubCall,
    file: dict[str, Any],
    size: int,
    tree: Tree,
    rules: NamespaceRules,
    ignored: pathspec.PathSpec[Any] | None,
) -> dict[str, Any]:
    path = file.get("path")
    if not isinstance(path, str):
        raise HubRefusal("a file of the body has no path")
    if ignored is not None and ignored.match_file(path):
        return {"path": path, "uploadMode": "regular", "shouldIgnore": True}
    check_name_of_file(path, rules)
    _check_sample(path, file.get("sample"), rules)
    if size > call.hub.options.max_file:
        raise TooManyBytesError(
            f"{one_line(path, 200)} has {size:,} bytes; this hub takes at most "
            f"{call.hub.options.max_file:,} (--max-file)"
        )
    is_large = size > call.hub.options.regular_max or path.lower().endswith(_ALWAYS_LARGE)
    found: dict[str, Any] = {
        "path": path,
        "uploadMode": "lfs" if is_large else "regular",
        "shouldIgnore": False,
    }
    if path in tree and call.hub.blobs.is_intact(tree[path]):
        found["oid"] = tree[path].sha256 if is_large else tree[path].git_sha1
    return found


def _check_sample(path: str, sample: object, rules: NamespaceRules) -> None:
    """Refuse a pickle by its first bytes, before the rest is sent."""
    if not isinstance(sample, str) or "pickle" in rules.allowed:
        return
    try:
        start = base64.b64decode(sample[:1024])
    except (binascii.Error, ValueError):
        return
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 1:
        raise HubRefusal(
            f"{one_line(path, 200)} is a pickle, which can run any code when it is loaded"
        )


def _ignored(call: HubCall, given: object, tree: Tree) -> pathspec.PathSpec[Any] | None:
    """Return what is not to be uploaded: by the file that comes along, or by the repository's."""
    text = given if isinstance(given, str) else ""
    if not text and _IGNORE in tree:
        text = call.hub.blobs.read(tree[_IGNORE].sha256, _MOST_IGNORE).decode("utf-8", "replace")
    if not text:
        return None
    try:
        return pathspec.PathSpec.from_lines("gitignore", text[:_MOST_IGNORE].splitlines())
    except ValueError as error:
        raise HubRefusal(f"{_IGNORE} cannot be read: {one_line(str(error), 200)}") from None


def _size_of(file: object) -> int:
    size = file.get("size") if isinstance(file, dict) else None
    if type(size) is not int or size < 0:
        raise HubRefusal("a file of the body has no size")
    return size


COMMITS = (
    HubRoute("POST", "/api/{type}/{owner}/{name}/preupload/{rev}", preupload, WRITE, _BODY),
    HubRoute("POST", "/api/{type}/{owner}/{name}/commit/{rev}", commit, WRITE, reads_itself=True),
)
