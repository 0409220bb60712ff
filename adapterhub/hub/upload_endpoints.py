"""Uploads of large files before the commit that names them: LFS, whole or in parts.

The requests that carry bytes have no token, so their addresses are signed. A signature covers one
file of one repository. It is valid for a day, while the token that requested it may write there.
Parts are kept until the file is complete, even if the server restarts, so an upload can resume.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection
from starlette.responses import Response

from adapterhub.hub.accounts import UPLOAD_SECONDS, WRITE, read_sealed, sealed_text, visitor_of
from adapterhub.hub.blobs import BlobReceiver, StagedBlob, discard_staged
from adapterhub.hub.commits import grant, granted, promise
from adapterhub.hub.database import changes_of
from adapterhub.hub.gate import check_room, quota_of
from adapterhub.hub.repositories import repository_of_id
from adapterhub.hub.request import OPEN, REPOSITORY, HubCall, in_thread, json_answer
from adapterhub.web.errors import DeniedError, HubRefusal
from adapterhub.web.frame import Endpoint

PART_BYTES = 128 << 20
PROMISE_SECONDS = 2 * 3600.0  # how long space is reserved for an upload
_WHOLE_BYTES = 512 << 20  # larger files are sent in parts if the client supports it
_MOST_OBJECTS = 1_000
_BODY = 4 << 20
TOO_LARGE = "/file-too-large:set-HF_HUB_DISABLE_XET=1-or-use-adapterhub-push"
"""The only text that a client with Xet shows to its user: an address that responds with 404."""


def batch(call: HubCall) -> Response:
    """Return upload addresses for files; nothing for files that the repository has already."""
    fields = call.fields
    objects, transfers = fields.get("objects"), fields.get("transfers") or ["basic"]
    if fields.get("operation") != "upload":
        raise HubRefusal("files are downloaded at /OWNER/NAME/resolve/REVISION/PATH")
    if not isinstance(objects, list) or len(objects) > _MOST_OBJECTS:
        raise HubRefusal(f"the body has no list of at most {_MOST_OBJECTS} objects")
    requested, refused = [], []
    for each in objects:
        try:
            oid, size = _object(each)
        except HubRefusal as error:
            refused.append(_refused_object(each, 422, str(error.problem)))
            continue
        most = call.hub.options.max_file
        if size > most:
            message = f"the file has {size:,} bytes; this hub takes at most {most:,} (--max-file)"
            refused.append(_refused_object(each, 413, message))
        else:
            requested.append((oid, size))
    with call.hub.database.reading() as connection:
        known = granted(connection, call.repository.id, [oid for oid, _ in requested])
        absent = {oid: size for oid, size in requested if oid not in known}
        has_quota = quota_of(call.hub, connection, call.repository.namespace) is not None
    if absent and has_quota:
        with call.changing() as connection:
            repository = call.current(connection)
            promise(connection, repository.id, absent, PROMISE_SECONDS)
            size = sum(absent.values())
            check_room(call.hub, connection, repository.namespace, size, is_kept=True)
    intact = {oid for oid, info in known.items() if call.hub.blobs.is_intact(info)}
    new = {oid: size for oid, size in requested if oid not in intact}
    call.hub.blobs.require_room(2 * max(new.values(), default=0) + sum(new.values()))
    in_parts = isinstance(transfers, list) and "multipart" in transfers
    in_parts = in_parts and any(size > _WHOLE_BYTES for size in new.values())
    accepted = [
        {
            "oid": oid,
            "size": size,
            "authenticated": True,
            **_actions(call, oid, size, new, in_parts),
        }
        for oid, size in requested
    ]
    objects = [*accepted, *refused]
    answer = {"transfer": "multipart" if in_parts else "basic", "objects": objects}
    return json_answer(answer, headers={"content-type": "application/vnd.git-lfs+json"})


def _actions(
    call: HubCall, oid: str, size: int, new: dict[str, int], in_parts: bool
) -> dict[str, Any]:
    if oid not in new:
        return {}
    secret, parts = (
        call.hub.secret,
        [
            str(call.repository.id),
            oid,
            str(size),
            call.visitor.digest,
        ],
    )
    key = sealed_text(secret, "upload", parts, UPLOAD_SECONDS)
    place = call.repository.path
    actions: dict[str, Any] = {
        "verify": {"href": f"{call.base}/{place}.git/info/lfs/objects/verify"},
        "upload": {"href": f"{call.base}/lfs/{key}"},
    }
    if in_parts:
        numbers = range(1, -(-size // PART_BYTES) + 1)
        addresses = {f"{n:05}": f"{call.base}/lfs/{key}/{n}" for n in numbers}
        actions["upload"]["header"] = {"chunk_size": str(PART_BYTES), **addresses}
    return {"actions": actions}


async def put_whole(call: HubCall) -> Response:
    """Receive a file."""
    repository, oid, size = await in_thread(_key, call)
    with await in_thread(call.hub.blobs.receive, size, "as was announced") as receiver:
        await _receive(call, receiver)
        await in_thread(_keep, call, repository, oid, size, receiver)
    return json_answer({})


async def put_part(call: HubCall) -> Response:
    """Receive a part of a file."""
    repository, oid, size = await in_thread(_key, call)
    number = call.values["number"]
    count = -(-size // PART_BYTES)
    if not number.isdecimal() or not 1 <= int(number[:6]) <= count:
        raise HubRefusal(f"the file has {count} parts")
    expected = PART_BYTES if int(number) < count else size - (count - 1) * PART_BYTES
    upload = f"{repository}-{oid}"
    with await in_thread(call.hub.blobs.receive, expected, "as was announced") as receiver:
        await _receive(call, receiver)
        if receiver.size != expected:
            raise HubRefusal(f"the part has {receiver.size:,} bytes, {expected:,} were announced")
        sha256 = await in_thread(receiver.keep)
        await in_thread(call.hub.blobs.keep_part, upload, f"{int(number):05}", receiver.path)
    return Response(b"", 200, {"etag": f'"{sha256[:32]}"'})


def complete(call: HubCall) -> Response:
    """Join the parts of a file."""
    repository, oid, size = _key(call)
    upload, blobs = f"{repository}-{oid}", call.hub.blobs
    parts = [f"{number:05}" for number in range(1, -(-size // PART_BYTES) + 1)]
    if absent := sorted({*parts} - {*blobs.parts(upload)}):
        raise HubRefusal(f"these parts were not received: {', '.join(absent[:20])}")
    with blobs.receive(size, "as was announced") as receiver:
        for part in parts:
            for piece in blobs.read_part(upload, part):
                receiver.write(piece)
        _keep(call, repository, oid, size, receiver)
    blobs.drop_parts(upload)
    return json_answer({})


def verify_upload(call: HubCall) -> Response:
    """Confirm that the repository has a file."""
    oid, size = _object(call.fields)
    with call.hub.database.reading() as connection:
        known = granted(connection, call.repository.id, [oid])
    if oid not in known or known[oid].size != size:
        raise HubRefusal("this file was not received", status=404)
    return json_answer({})


def no_xet(call: HubCall) -> Response:
    """Show the user of a client with Xet how to proceed."""
    return Response(b"", 302, {"location": f"{call.base}{TOO_LARGE}"})


async def _receive(call: HubCall, receiver: BlobReceiver) -> None:
    async for piece in call.pieces(receiver.most):
        await in_thread(receiver.write, piece)


def _keep(call: HubCall, repository: int, oid: str, size: int, receiver: BlobReceiver) -> None:
    """Grant a received file to its repository, for a later commit.

    Raises:
        HubRefusal: it differs from the announced file, or the repository was deleted.
    """
    if receiver.size != size:
        raise HubRefusal(f"the file has {receiver.size:,} bytes, {size:,} were announced")
    staged: StagedBlob = receiver.finish()
    try:
        if staged.info.sha256 != oid:
            raise HubRefusal(f"the file has the sha256 {staged.info.sha256}, not {oid}")
        call.hub.blobs.send(staged)
        with call.changing() as connection:
            _check_key(call, connection)
            changes_of(connection).files.append(staged)
            grant(connection, repository, [staged.info], is_committed=False)
    finally:
        discard_staged(staged)


def _key(call: HubCall) -> tuple[int, str, int]:
    """Return the file and repository that an address was signed for.

    Raises:
        DeniedError: the signature is invalid or expired, or its token may no longer write there.
    """
    with call.hub.database.reading() as connection:
        return _check_key(call, connection)


def _check_key(call: HubCall, connection: Connection) -> tuple[int, str, int]:
    parts = read_sealed(call.hub.secret, "upload", call.values["key"])
    visitor = repository = None
    if parts is not None and len(parts) == 4:
        repository = repository_of_id(connection, int(parts[0]))
        visitor = visitor_of(connection, digest=parts[3], operator=call.hub.operator)
    if not (parts and visitor and repository and visitor.may(WRITE, repository.namespace)):
        raise DeniedError(
            "this address is not one of this hub's, has expired, or belongs to a token that may "
            "not write there any more; request it again"
        )
    return repository.id, parts[1], int(parts[2])


def _refused_object(value: object, code: int, message: str) -> dict[str, Any]:
    """Return the result for a refused object of a batch."""
    fields = value if isinstance(value, dict) else {}
    named = {name: fields[name] for name in ("oid", "size") if name in fields}
    return {**named, "error": {"code": code, "message": message}}


def _object(value: object) -> tuple[str, int]:
    fields = value if isinstance(value, dict) else {}
    oid, size = fields.get("oid"), fields.get("size")
    if not (isinstance(oid, str) and re.fullmatch("[0-9a-f]{64}", oid)):
        raise HubRefusal("an object has no sha256")
    if type(size) is not int or size < 0:
        raise HubRefusal("an object has no size")
    return oid, size


UPLOADS = (
    *(
        Endpoint(
            "POST", f"{start}/{{owner}}/{{name}}.git/info/lfs/objects/{verb}", answer, WRITE, _BODY
        )
        for start in ("/{kind:datasets|spaces}", "")
        for verb, answer in (("batch", batch), ("verify", verify_upload))
    ),
    Endpoint("PUT", "/lfs/{key}", put_whole, OPEN, reads_itself=True),
    Endpoint("POST", "/lfs/{key}", complete, OPEN, _BODY),
    Endpoint("PUT", "/lfs/{key}/{number}", put_part, OPEN, reads_itself=True),
    Endpoint("GET", REPOSITORY + "/xet-write-token/{rev}", no_xet, WRITE),
)
