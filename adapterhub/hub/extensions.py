"""Extensions of the Hub's protocol: capabilities, versions, and health of this hub."""

from __future__ import annotations

import re

from sqlalchemy import ColumnElement, func, select
from starlette.responses import Response

from adapterhub._version import __version__
from adapterhub.hub.accounts import ADMIN, READ, WRITE
from adapterhub.hub.commits import Tree, commit_at
from adapterhub.hub.database import blobs, repositories, versions
from adapterhub.hub.gate import signature_problem
from adapterhub.hub.repositories import delete_version, move_tag, versions_of
from adapterhub.hub.request import OPEN, TOKEN, TYPE, HubCall, json_answer
from adapterhub.hub.search_rows import refresh_listing
from adapterhub.hub.state import audit_rows
from adapterhub.web.errors import DeniedError, HubRefusal
from adapterhub.web.frame import Endpoint

_BODY = 64 << 10
CAN = ("versions", "move-tag", "delete-version", "audit")
_MOST_AUDIT = 1_000


def about(call: HubCall) -> Response:
    """Return the capabilities of this hub."""
    return json_answer({"adapterhub": __version__, "can": CAN})


def list_versions(call: HubCall) -> Response:
    """List the versions of an adapter, oldest first."""
    with call.hub.database.reading() as connection:
        versions = versions_of(connection, call.repository.id, call.hub.blobs.read)
    items = [
        {
            "version": each.name,
            "commit": each.commit,
            "digest": each.digest,
            "tags": each.tags,
            "yanked": each.yanked,
        }
        for each in versions
    ]
    return json_answer({"versions": items, "highest": call.repository.highest})


def put_tag(call: HubCall) -> Response:
    """Point a tag at a revision, in one step."""
    revision = call.text("revision")
    with call.changing() as connection:
        repository, tag = call.current(connection), call.values["rev"]
        commit = commit_at(connection, repository.id, revision)
        move_tag(connection, repository, tag, commit.oid)
        refresh_listing(connection, repository, call.hub.blobs.read)
        call.note(connection, "move tag", f"{repository.path}@{tag}")
    return json_answer({})


def remove_version(call: HubCall) -> Response:
    """Delete a version for good; its number is not used again."""
    number = re.fullmatch(r"v([1-9][0-9]{0,8})", call.values["rev"])
    if number is None:
        raise HubRefusal("a version is v1, v2, ...")
    read = call.hub.blobs.read
    with call.changing() as connection:
        repository, rules = call.current(connection), call.rules(connection)

        def is_signed(tree: Tree) -> bool:
            return not signature_problem(tree, read, repository.name, rules)

        user = call.visitor.user
        delete_version(connection, repository, int(number[1]), user, read, is_signed)
        refresh_listing(connection, repository, read)
        call.note(connection, "delete version", f"{repository.path}@{call.values['rev']}")
    return json_answer({})


def read_audit(call: HubCall) -> Response:
    """Return the newest rows of the audit log to an administrator."""
    if not call.visitor.is_operator:
        raise DeniedError("only an administrator of this hub reads the audit log")
    with call.hub.database.reading() as connection:
        return json_answer([*audit_rows(connection, _MOST_AUDIT)])


def health(call: HubCall) -> Response:
    """Report that the process responds."""
    return json_answer({"status": "ok"})


def ready(call: HubCall) -> Response:
    """Report that the database is writable."""
    with call.hub.database.writing():
        pass
    return json_answer({"status": "ok"})


def metrics(call: HubCall) -> Response:
    """Return the metrics; private ones only to an administrator."""
    with call.hub.database.reading() as connection:
        gauges = {
            "repositories": select(func.count()).select_from(repositories),
            "versions": select(func.count())
            .select_from(versions)
            .join(repositories, repositories.c.id == versions.c.repository),
        }
        if call.visitor.is_operator:
            gauges["blob_bytes"] = select(func.coalesce(func.sum(blobs.c.size), 0))
        else:
            conditions: list[ColumnElement[bool]] = [repositories.c.is_private.is_(False)]
            if call.visitor.scope is not None:
                conditions.append(repositories.c.namespace == call.visitor.scope)
            gauges = {name: each.where(*conditions) for name, each in gauges.items()}
        values = {name: connection.execute(each).scalar_one() for name, each in gauges.items()}
    text = call.hub.metrics.text(values)
    return Response(text, media_type="text/plain; version=0.0.4")


OWN = (
    Endpoint("GET", "/api/adapterhub", about, OPEN),
    Endpoint("GET", "/api/adapterhub/audit", read_audit, TOKEN),
    Endpoint("GET", f"/api/adapterhub/{TYPE}" + "/{owner}/{name}/versions", list_versions, READ),
    Endpoint(
        "DELETE",
        f"/api/adapterhub/{TYPE}" + "/{owner}/{name}/versions/{rev}",
        remove_version,
        ADMIN,
    ),
    Endpoint("PUT", f"/api/adapterhub/{TYPE}" + "/{owner}/{name}/tag/{rev}", put_tag, WRITE, _BODY),
    Endpoint("GET HEAD", "/health", health, OPEN),
    Endpoint("GET HEAD", "/ready", ready, OPEN),
    Endpoint("GET", "/metrics", metrics, TOKEN),
)
