"""Files as they are downloaded: whole or in part, by a commit, a branch or a tag.

They are sent as bytes to keep, never as a page: whoever can push could otherwise write pages of
this hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO

from starlette.responses import Response, StreamingResponse

from adapterhub.hub.accounts import READ
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.calls import HubCall, HubRoute, in_thread
from adapterhub.hub.commits import commit_at
from adapterhub.hub.refusals import HubRefusal, MissingEntryError
from adapterhub.hub.trees import MAX_REGULAR_LISTED, read_tree

_PIECE = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_SAFE_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class SentPart:
    """The bytes of a file that are sent: from `first`, `size` of them."""

    first: int
    size: int
    is_part: bool = False


def download(call: HubCall) -> Response:
    """Send a file, or its headers alone."""
    path = call.values["rest"]
    with call.hub.database.reading() as connection:
        commit = commit_at(connection, call.repository.id, call.values["rev"])
        blob = read_tree(connection, commit.tree).get(path)
    headers = {"x-repo-commit": commit.oid}
    if blob is None:
        raise MissingEntryError(f"there is no file {path[:200]!r} in this revision").with_headers(
            headers
        )
    tag = f'"{blob.sha256 if blob.size > MAX_REGULAR_LISTED else blob.git_sha1}"'
    headers |= _headers(path, blob, tag)
    if call.request.headers.get("if-none-match") in (tag, "*"):
        return Response(b"", 304, headers)
    part = part_of(blob.size, call.request.headers.get("range", ""), call, tag)
    headers["content-length"] = str(part.size)
    if part.is_part:
        last = part.first + part.size - 1
        headers["content-range"] = f"bytes {part.first}-{last}/{blob.size}"
    status = 206 if part.is_part else 200
    if call.request.method == "HEAD":
        return Response(b"", status, headers)
    file = open(call.hub.blobs.path(blob.sha256), "rb")  # noqa: SIM115, see _pieces
    first = os.pread(file.fileno(), min(_PIECE, part.size), part.first)
    if len(first) == part.size:
        file.close()
        return Response(first, status, headers)
    return StreamingResponse(_pieces(file, part, first), status, headers)


def part_of(size: int, wanted: str, call: HubCall, tag: str) -> SentPart:
    """Return which bytes of a file a request wants.

    Raises:
        HubRefusal: it has no such bytes.
    """
    found = _RANGE.fullmatch(wanted.replace(" ", ""))
    condition = call.request.headers.get("if-range")
    if found is None or not (found[1] or found[2]) or condition not in (None, tag):
        return SentPart(0, size)
    if found[1]:
        first = int(found[1])
        last = min(int(found[2]), size - 1) if found[2] else size - 1
    else:
        first, last = max(0, size - int(found[2])), size - 1
    if first > last or first >= size:
        raise HubRefusal(
            "the file has no such bytes",
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
    if blob.size > MAX_REGULAR_LISTED:
        headers |= {"x-linked-etag": tag, "x-linked-size": str(blob.size)}
    return headers


async def _pieces(file: BinaryIO, part: SentPart, first: bytes) -> AsyncIterator[bytes]:
    """Yield the bytes of a part; the first ones were read already."""
    try:
        yield first
        place, end = part.first + len(first), part.first + part.size
        while place < end:
            piece = await in_thread(os.pread, file.fileno(), min(_PIECE, end - place), place)
            if not piece:
                raise OSError("the file is shorter than it was")
            place += len(piece)
            yield piece
    finally:
        file.close()


DOWNLOADS = (
    HubRoute("GET HEAD", "/{kind}/{owner}/{name}/resolve/{rev}/{rest}", download, READ),
    HubRoute("GET HEAD", "/{owner}/{name}/resolve/{rev}/{rest}", download, READ),
)
