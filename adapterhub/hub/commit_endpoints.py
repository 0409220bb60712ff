"""Commits in three requests: check the card, ask how to send each file, and commit.

The body of a commit is parsed as it arrives. It has lines of JSON; some contain a file in base64. A
file may have hundreds of megabytes. Its text is decoded and written piece by piece, so memory never
holds more than a piece. All other lines have at most a mebibyte each, and a limit on their total:
`CommitLines`.
"""

from __future__ import annotations

import base64
import binascii
import re
from contextlib import suppress
from typing import Any

import pathspec
from starlette.responses import Response

from adapterhub.errors import one_line
from adapterhub.hub.accounts import WRITE
from adapterhub.hub.blobs import BlobReceiver, Blobs, StagedBlob, discard_staged
from adapterhub.hub.commits import (
    MAIN,
    MOST_PATH,
    CommitChange,
    Tree,
    branch_head,
    granted,
    no_branch,
    read_tree,
    write_commit,
)
from adapterhub.hub.database import received_reader
from adapterhub.hub.gate import NamespaceRules, check_files, check_name_of_file, check_room
from adapterhub.hub.request import OPEN, REPOSITORY, HubCall, in_thread, json_answer, json_fields
from adapterhub.hub.search_rows import card_problem, refresh_listing
from adapterhub.web.errors import HubRefusal, TooManyBytesError
from adapterhub.web.frame import Endpoint

MOST_LINE = 1 << 20
MOST_LINES = 25_000  # a repository has at most 20,000 files
MOST_WORDS = 32 << 20  # bytes of all lines, without the contents of files
_MOST_DEPTH, _MOST_TITLE, _MOST_MESSAGE = 8, 400, 20_000
_MOST_PREFIX = 8192
_TEXT = rb'"(?:[^"\\]|\\.)*"'
# A line up to the text of a file: {"key": "file", "value": {"content": "
_CONTENT = re.compile(
    rb'\s*\{\s*"key"\s*:\s*"file"\s*,\s*"value"\s*:\s*\{'
    rb'(?:\s*"(?!content")(?:[^"\\]|\\.)*"\s*:\s*(?:' + _TEXT + rb"|[a-z0-9.]+)\s*,)*"
    rb'\s*"content"\s*:\s*"'
)
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=]")


class CommitLines:
    """Parser of a commit body; the caller discards staged files that it does not use.

    Args:
        blobs: the store that receives files.
        most_file: the largest size of a file in bytes.
    """

    def __init__(self, blobs: Blobs, most_file: int) -> None:
        self.change = CommitChange()
        self._blobs, self._most_file = blobs, most_file
        self._line = bytearray()  # its bytes so far, without the text of its file
        self._receiver: BlobReceiver | None = None
        self._staged: StagedBlob | None = None  # the file of this line
        self._rest = b""  # undecoded text, less than eight characters
        self._has_header = False
        self._lines = self._words_read = 0

    def feed(self, data: bytes) -> None:
        """Parse more of the body.

        Raises:
            HubRefusal: it is not a commit.
            TooManyBytesError: a line or a file is too large, or there are too many lines.
        """
        place = 0
        while place < len(data):
            read = self._text if self._receiver is not None else self._words
            place = read(data, place)

    def finish(self) -> CommitChange:
        """End the body and return the change.

        Raises:
            HubRefusal: it is incomplete.
        """
        if self._receiver is not None:
            raise HubRefusal("the body of the commit ends within a file")
        if self._line.strip():
            self._end_line()
        if not self._has_header:
            raise HubRefusal("the commit has no header")
        return self.change

    def discard(self) -> None:
        """Remove the received files; stored files stay."""
        if self._receiver is not None:
            self._receiver.discard()
        for staged in (*self.change.files.values(), *filter(None, [self._staged])):
            discard_staged(staged)

    def _words(self, data: bytes, place: int) -> int:
        """Parse to the end of the line or the text of a file; return the position."""
        end = data.find(b"\n", place)
        before = len(self._line)
        self._line += data[place:] if end < 0 else data[place:end]
        if self._staged is None and before < _MOST_PREFIX:
            match = _CONTENT.match(self._line[:_MOST_PREFIX])
            if match is not None:
                del self._line[match.end() :]
                self._receiver = self._blobs.receive(
                    self._most_file, "the most that this hub takes"
                )
                return place + match.end() - before
        if len(self._line) > MOST_LINE:
            raise TooManyBytesError(f"a line of the commit has more than {MOST_LINE:,} bytes")
        if end < 0:
            return len(data)
        self._end_line()
        return end + 1

    def _text(self, data: bytes, place: int) -> int:
        """Decode the text of a file up to its end; return the position."""
        assert self._receiver is not None
        end = data.find(b'"', place)
        text = self._rest + (data[place:] if end < 0 else data[place:end])
        if b"\\" in text:
            text = text.replace(b"\\/", b"/")
        # The last four characters wait: they may be the end, which alone has padding.
        whole = max(0, len(text) - len(text) % 4 - 4) if end < 0 else len(text)
        self._rest = text[whole:]
        self._receiver.write(_decoded(text[:whole], is_last=end >= 0))
        if end < 0:
            return len(data)
        self._staged, self._receiver = self._receiver.finish(), None
        self._line += b'"'
        return end + 1

    def _end_line(self) -> None:
        line, self._line = bytes(self._line), bytearray()
        self._lines, self._words_read = self._lines + 1, self._words_read + len(line)
        if self._lines > MOST_LINES or self._words_read > MOST_WORDS:
            raise TooManyBytesError(
                f"a commit has at most {MOST_LINES:,} lines of {MOST_WORDS >> 20} MiB together, "
                "without the contents of files; commit in several steps"
            )
        if not line.strip():
            return
        item = json_fields(line, "a line of the commit", _MOST_DEPTH)
        key, value = item.get("key"), item.get("value")
        if not isinstance(value, dict):
            raise HubRefusal("a line of the commit has no value")
        if key == "header":
            self._header(value)
        elif key == "file":
            self._file(value)
        elif key == "lfsFile":
            self._large_file(value)
        elif key == "deletedFile":
            self.change.removed.append(_path(value))
        elif key == "deletedFolder":
            self.change.removed_folders.append(_path(value))
        else:
            raise HubRefusal(f"a line of the commit has the unknown key {one_line(str(key), 40)!r}")

    def _header(self, value: dict[str, Any]) -> None:
        title, message = value.get("summary") or "", value.get("description") or ""
        parent = value.get("parentCommit")
        if not (isinstance(title, str) and isinstance(message, str)):
            raise HubRefusal("the header of the commit has no summary")
        if not (parent is None or isinstance(parent, str)):
            raise HubRefusal("the parent of the commit is not a commit")
        self.change.title = one_line(title, _MOST_TITLE)
        self.change.message = message[:_MOST_MESSAGE]
        self.change.parent, self._has_header = parent, True

    def _file(self, value: dict[str, Any]) -> None:
        path = _path(value)
        if value.get("encoding") != "base64":
            raise HubRefusal(f"{one_line(path, 200)}: the encoding is not base64")
        if self._staged is None:
            content = value.get("content")
            if not isinstance(content, str):
                raise HubRefusal(f"{one_line(path, 200)} has no content")
            with self._blobs.receive(self._most_file, "the most that this hub takes") as receiver:
                receiver.write(_decoded(content.encode("ascii", "replace"), is_last=True))
                self._staged = receiver.finish()
        if (earlier := self.change.files.get(path)) is not None:
            discard_staged(earlier)
        self.change.files[path], self._staged = self._staged, None

    def _large_file(self, value: dict[str, Any]) -> None:
        path, sha256, size = _path(value), value.get("oid"), value.get("size", -1)
        is_digest = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)
        if not is_digest or type(size) is not int or value.get("algo", "sha256") != "sha256":
            raise HubRefusal(f"{one_line(path, 200)}: no sha256 or no size")
        self.change.large[path] = (str(sha256), size)


def _decoded(text: bytes, *, is_last: bool) -> bytes:
    is_wrong = _NOT_BASE64.search(text) or (not is_last and b"=" in text)
    with suppress(binascii.Error, ValueError):
        if not is_wrong:
            return base64.b64decode(text, validate=True)
    raise HubRefusal("the content of a file is not base64")


def _path(value: dict[str, Any]) -> str:
    path = value.get("path")
    if not isinstance(path, str):
        raise HubRefusal("a line of the commit has no path")
    if len(path) > MOST_PATH:
        raise HubRefusal(f"{one_line(path, 100)}: a path has at most {MOST_PATH:,} bytes")
    return path


_BODY = 4 << 20
_MOST_FILES = 256
_MOST_IGNORE = 64 << 10
_ALWAYS_LARGE = (".parquet",)
"""Dataset.push_to_hub deletes its file before the commit, so it cannot be part of a commit."""
_IGNORE = ".gitignore"


def validate_yaml(call: HubCall) -> Response:
    """Check the metadata of a card."""
    problem = card_problem(call.text("content", "").replace("\r\n", "\n"))
    errors = [{"message": problem}] if problem else []
    return json_answer({"errors": errors, "warnings": []}, 400 if errors else 200)


def preupload(call: HubCall) -> Response:
    """Return for each file whether to send it in the commit, before it, or not at all.

    Files that the commit would refuse are refused here, before anything is sent.
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
        sizes = [_size_of(file) for file in files]
        own = call.repository.namespace
        rules = check_room(call.hub, connection, own, sum(sizes), is_early=True)
    call.hub.blobs.require_room(sum(sizes))
    ignored = _ignored(call, fields.get("gitIgnore"), tree)
    answers = [
        _way(call, file, size, tree, rules, ignored)
        for file, size in zip(files, sizes, strict=True)
    ]
    return json_answer({"files": answers})


async def commit(call: HubCall) -> Response:
    """Commit the changes in the body, which is parsed as it arrives."""
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
    """Check and commit the files."""
    folder, own, rev = call.hub.blobs, call.repository.id, call.values["rev"]
    with call.hub.database.reading() as connection:
        sent = granted(connection, own, {sha256 for sha256, _ in change.large.values()})
        new = {staged.info.sha256: staged.info.size for staged in change.files.values()}
        known = granted(connection, own, [*new])
        size = sum(size for sha256, size in new.items() if sha256 not in known)
        namespace = call.repository.namespace
        rules = check_room(call.hub, connection, namespace, size, is_early=True)
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
    answer: dict[str, Any] = {
        "path": path,
        "uploadMode": "lfs" if is_large else "regular",
        "shouldIgnore": False,
    }
    if path in tree and call.hub.blobs.is_intact(tree[path]):
        answer["oid"] = tree[path].sha256 if is_large else tree[path].git_sha1
    return answer


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


def _ignored(call: HubCall, value: object, tree: Tree) -> pathspec.PathSpec[Any] | None:
    """Return the ignore patterns, from the request's ignore file or the repository's."""
    text = value if isinstance(value, str) else ""
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
    Endpoint("POST", "/api/validate-yaml", validate_yaml, OPEN, _BODY),
    Endpoint("POST", REPOSITORY + "/preupload/{rev}", preupload, WRITE, _BODY),
    Endpoint("POST", REPOSITORY + "/commit/{rev}", commit, WRITE, reads_itself=True),
)
