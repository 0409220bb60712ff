"""Downloads of files: whole or in part, by commit, branch or tag.

Files are sent as attachments, never as pages: otherwise anyone with push access could publish pages
on this hub. Files in a bucket are downloaded from there, by an address signed for one file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from adapterhub.hub.accounts import READ
from adapterhub.hub.blobs import BlobFolder, BlobInfo
from adapterhub.hub.bucket_blobs import BlobBucket
from adapterhub.hub.commits import commit_at, read_tree
from adapterhub.hub.request import HubCall, in_thread
from adapterhub.web.errors import HubRefusal, MissingEntryError
from adapterhub.web.frame import Endpoint

_PIECE = 256 << 10
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_SAFE_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class SentPart:
    """The range of bytes to send: `size` bytes starting at `first`."""

    first: int
    size: int
    is_part: bool = False


async def download(call: HubCall) -> Response:
    """Send a file, or only its headers."""
    path = call.values["rest"]
    key = ("file", call.repository.id, call.values["rev"], path)
    commit, blob = await call.remembered(key, partial(_find, call))
    headers = {"x-repo-commit": commit}
    if blob is None:
        raise MissingEntryError(f"no such file: {path[:200]!r} in this revision").with_headers(
            headers
        )
    tag = f'"{blob.sha256 if blob.is_large else blob.git_sha1}"'
    headers |= _headers(path, blob, tag)
    if call.request.headers.get("if-none-match") in (tag, "*"):
        return Response(b"", 304, headers)
    part = part_of(blob.size, call.request.headers.get("range", ""), call, tag)
    headers["content-length"] = str(part.size)
    if part.is_part:
        last = part.first + part.size - 1
        headers["content-range"] = f"bytes {part.first}-{last}/{blob.size}"
    status = 206 if part.is_part else 200
    if call.request.method == "HEAD" or not part.size:
        return Response(b"", status, headers)
    sha256 = blob.sha256
    if call.repository.is_mirrored:
        sha256 = await call.mirror.file(call.repository, commit, path, blob)
    blobs = call.hub.blobs
    if isinstance(blobs, BlobBucket):
        if not part.is_part and "range" in call.request.headers:  # the bucket would send a part
            return StreamingResponse(blobs.pieces(sha256), status, headers)
        headers |= {"content-length": "0", "location": await in_thread(blobs.address, sha256)}
        return Response(b"", 302, headers)
    assert isinstance(blobs, BlobFolder)
    return SentFile(blobs.path(sha256), part, status, headers)


def _find(call: HubCall) -> tuple[str, BlobInfo | None]:
    """Return the commit of a revision and the file in it."""
    with call.hub.database.reading() as connection:
        commit = commit_at(connection, call.repository.id, call.values["rev"])
        return commit.oid, read_tree(connection, commit.tree).get(call.values["rest"])


class SentFile(Response):
    """A part of a file, sent piece by piece.

    A piece in the page cache is read at once; other pieces are read in a thread.
    """

    def __init__(self, path: Path, part: SentPart, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(None, status, headers)
        self.path, self.part = path, part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the part."""
        file = os.open(self.path, os.O_RDONLY)
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            place, end = self.part.first, self.part.first + self.part.size
            while place < end:
                piece = _piece_in_memory(file, min(_PIECE, end - place), place)
                if not piece:
                    piece = await in_thread(os.pread, file, min(_PIECE, end - place), place)
                if not piece:
                    raise OSError("the file is shorter than it was")
                place += len(piece)
                more = place < end
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            os.close(file)


def _piece_in_memory(file: int, size: int, place: int) -> bytes | bytearray:
    """Return the bytes of a file that can be read without waiting, possibly empty."""
    if not _NO_WAIT:
        return b""
    buffer = bytearray(size)
    try:
        count = os.preadv(file, [buffer], place, _NO_WAIT)
    except OSError:  # it would wait, or this file system cannot tell
        return b""
    return buffer if count == size else buffer[:count]


def part_of(size: int, header: str, call: HubCall, tag: str) -> SentPart:
    """Return the range of a file that a request wants.

    Raises:
        HubRefusal: the file does not have this range.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    condition = call.request.headers.get("if-range")
    if match is None or not (match[1] or match[2]) or condition not in (None, tag):
        return SentPart(0, size)
    if match[1]:
        first = int(match[1])
        last = min(int(match[2]), size - 1) if match[2] else size - 1
    else:
        first, last = max(0, size - int(match[2])), size - 1
    if first > last or first >= size:
        raise HubRefusal(
            "the range is outside the file",
            status=416,
            headers={"content-range": f"bytes */{size}"},
        )
    return SentPart(first, last - first + 1, True)


def _headers(path: str, blob: BlobInfo, tag: str) -> dict[str, str]:
    name = _SAFE_NAME.sub("_", path.rpartition("/")[2])
    headers = {
        "etag": tag,
        "accept-ranges": "bytes",
        # no-transform: a proxy that compresses would change the size that clients compare.
        "cache-control": "private, no-cache, no-transform",
        "content-type": "application/octet-stream",
        "content-disposition": f'attachment; filename="{name}"',
        "content-security-policy": "default-src 'none'; sandbox",
    }
    if blob.is_large:
        headers |= {"x-linked-etag": tag, "x-linked-size": str(blob.size)}
    return headers


DOWNLOADS = (
    Endpoint(
        "GET HEAD",
        "/{kind:datasets|spaces}/{owner}/{name}/resolve/{rev}/{rest:path}",
        download,
        READ,
        reads_itself=True,
    ),
    Endpoint(
        "GET HEAD", "/{owner}/{name}/resolve/{rev}/{rest:path}", download, READ, reads_itself=True
    ),
)
