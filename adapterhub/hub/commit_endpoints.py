"""A commit in two requests: which way each file goes, and the commit itself."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import pathspec
from starlette.responses import Response

from adapterhub.errors import one_line
from adapterhub.hub.accepted import NamespaceRules, check_name_of_file
from adapterhub.hub.accounts import WRITE
from adapterhub.hub.calls import HubCall, HubRoute, in_thread, json_answer
from adapterhub.hub.changes import received_reader
from adapterhub.hub.commit_lines import CommitLines
from adapterhub.hub.commits import (
    MAIN,
    CommitChange,
    branch_head,
    granted,
    no_branch,
    write_commit,
)
from adapterhub.hub.gate import check_files, check_room
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
        if head is None and call.values["rev"] != MAIN:
            raise no_branch(connection, call.repository.id, call.values["rev"])
        tree: Tree = read_tree(connection, head.tree) if head else {}
        rules = call.rules(connection)
        sizes = [_size_of(file) for file in files]
        check_room(call.hub, connection, call.repository.namespace, sum(sizes), is_early=True)
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
    folder, own, rev = call.hub.blobs, call.repository.id, call.values["rev"]
    with call.hub.database.reading() as connection:
        rules = call.rules(connection)
        sent = granted(connection, own, {sha256 for sha256, _ in change.large.values()})
        new = {staged.info.sha256: staged.info.size for staged in change.files.values()}
        known = granted(connection, own, [*new])
        size = sum(size for sha256, size in new.items() if sha256 not in known)
        check_room(call.hub, connection, call.repository.namespace, size, is_early=True)
    named = [(path, s, sent[s].size) for path, (s, _) in change.large.items() if s in sent]
    infos = {path: staged.info for path, staged in change.files.items()}
    files = [*named, *((path, info.sha256, info.size) for path, info in infos.items())]
    checked = check_files(call.hub, files, rules, change.files)
    for staged in change.files.values():
        folder.send(staged)
    with call.changing(checked) as connection:
        repository = call.current(connection)
        done = write_commit(connection, own, rev, change, call.visitor.user)
        if done.is_new:
            refresh_listing(connection, repository, received_reader(connection, folder))
            call.note(connection, "commit", f"{repository.path}@{done.commit.oid[:12]}")
    url = f"{call.base}/{repository.path}/commit/{done.commit.oid}"
    return json_answer(
        {"success": True, "commitOid": done.commit.oid, "commitUrl": url, "hookOutput": ""}
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
