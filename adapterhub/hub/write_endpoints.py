"""Changes to repositories other than commits: create, move, delete, settings, branches and tags."""

from __future__ import annotations

from starlette.responses import Response

from adapterhub.hub.accounts import ADMIN, READ, WRITE
from adapterhub.hub.blobs import discard_staged
from adapterhub.hub.commits import (
    BRANCH,
    MAIN,
    CommitChange,
    commit_at,
    move_ref,
    refs_of,
    write_commit,
)
from adapterhub.hub.gate import check_moved, parse_rules
from adapterhub.hub.repositories import (
    check_ref_name,
    create_repository,
    create_tag,
    delete_branch,
    delete_repository,
    delete_tag,
    find_repository,
    move_repository,
    owner_for_writing,
    set_private,
    visible_repository,
)
from adapterhub.hub.request import REPOSITORY, TOKEN, HubCall, json_answer
from adapterhub.hub.search_rows import refresh_listing, remove_listing
from adapterhub.web.errors import HubRefusal, TakenError
from adapterhub.web.frame import Endpoint

_BODY = 1 << 20
_TYPES = {"model": "models", "dataset": "datasets", "space": "spaces"}
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
"""The first file of each repository, so that a repository always has a commit."""


def add_repository(call: HubCall) -> Response:
    """Create a repository; if it exists, the refusal names it, as clients expect."""
    fields = call.fields
    type, name = _type_of(call), _full_name(call)
    visibility = fields.get("visibility")
    is_private = visibility in ("private", "protected") or bool(fields.get("private"))
    staged = call.hub.blobs.stage(ATTRIBUTES)
    try:
        with call.changing() as connection:
            owner = owner_for_writing(connection, name, call.visitor)
            existing = find_repository(connection, type, name)
            if existing is not None:
                answer = {
                    "url": f"{call.base}/{existing.path}",
                    "error": f"{existing.name} exists already",
                }
                return json_answer(answer, 409)
            repository = create_repository(connection, type, name, owner, is_private=is_private)
            change = CommitChange("Create the repository", files={".gitattributes": staged})
            user = call.visitor.user
            write_commit(connection, repository.id, MAIN, change, user)
            refresh_listing(connection, repository, call.hub.blobs.read)
            call.note(connection, "create repository", repository.path)
    finally:
        discard_staged(staged)
    return json_answer(
        {
            "url": f"{call.base}/{repository.path}",
            "name": repository.name,
            "private": repository.is_private,
        }
    )


def remove_repository(call: HubCall) -> Response:
    """Delete a repository."""
    type, name = _type_of(call), _full_name(call)
    with call.changing() as connection:
        repository = visible_repository(connection, type, name, call.visitor, ADMIN)
        remove_listing(connection, repository.id)
        delete_repository(connection, repository)
        call.note(connection, "delete repository", repository.path)
    return json_answer({})


def rename_repository(call: HubCall) -> Response:
    """Rename a repository, within namespaces where the visitor may create one."""
    source, target, type = call.text("fromRepo"), call.text("toRepo"), _type_of(call)
    with call.hub.database.reading() as connection:
        repository = visible_repository(connection, type, source, call.visitor, ADMIN)
        owner = owner_for_writing(connection, target, call.visitor)
    checked = None
    if owner.id != repository.namespace:
        checked = check_moved(call.hub, repository, parse_rules(owner.rules))
    with call.changing(checked) as connection:
        repository = visible_repository(connection, type, source, call.visitor, ADMIN)
        owner = owner_for_writing(connection, target, call.visitor)
        moved = move_repository(connection, repository, target, owner)
        refresh_listing(connection, moved, call.hub.blobs.read)
        call.note(connection, "move repository", f"{repository.path} to {moved.path}")
    return json_answer({"url": f"{call.base}/{moved.path}"})


def change_settings(call: HubCall) -> Response:
    """Make a repository private or public."""
    fields = call.fields
    if fields.get("gated") not in (None, False):
        raise HubRefusal("this hub has no gated repositories; a private one has members")
    visibility = fields.get("visibility")
    private = visibility == "private" if visibility is not None else fields.get("private")
    if isinstance(private, bool):
        with call.changing() as connection:
            repository = call.current(connection)
            set_private(connection, repository, private)
            repository = call.current(connection)
            refresh_listing(connection, repository, call.hub.blobs.read)
            call.note(connection, "make private" if private else "make public", repository.path)
    return json_answer({})


def add_tag(call: HubCall) -> Response:
    """Create a tag of a revision."""
    tag = call.text("tag")
    with call.changing() as connection:
        repository = call.current(connection)
        commit = commit_at(connection, repository.id, call.values["rev"])
        create_tag(connection, repository, tag, commit.oid)
        refresh_listing(connection, repository, call.hub.blobs.read)
        call.note(connection, "create tag", f"{repository.path}@{tag}")
    return json_answer({})


def remove_tag(call: HubCall) -> Response:
    """Delete a tag."""
    tag = call.values["rev"]
    with call.changing() as connection:
        repository = call.current(connection)
        delete_tag(connection, repository, tag)
        refresh_listing(connection, repository, call.hub.blobs.read)
        call.note(connection, "delete tag", f"{repository.path}@{tag}")
    return json_answer({})


def add_branch(call: HubCall) -> Response:
    """Create a branch at a revision, or at the head of `main`."""
    name, start = call.values["rev"], call.text("startingPoint", MAIN)
    check_ref_name(name)
    if name.startswith("v") and name[1:].isdecimal():
        raise HubRefusal(f"{name} is the name of a version, not of a branch")
    with call.changing() as connection:
        repository = call.current(connection)
        refs = refs_of(connection, repository.id)
        if any(name in each for each in refs.values()):
            raise TakenError(f"{name} exists already")
        commit = commit_at(connection, repository.id, start)
        move_ref(connection, repository.id, BRANCH, name, commit.oid)
        call.note(connection, "create branch", f"{repository.path}@{name}")
    return json_answer({})


def remove_branch(call: HubCall) -> Response:
    """Delete a branch other than `main`."""
    name = call.values["rev"]
    with call.changing() as connection:
        repository = call.current(connection)
        delete_branch(connection, repository, name)
        call.note(connection, "delete branch", f"{repository.path}@{name}")
    return json_answer({})


def no_discussions(call: HubCall) -> Response:
    """Refuse a feature that this hub does not have."""
    raise HubRefusal("this hub has no pull requests and no discussions: commit to a branch")


def _type_of(call: HubCall) -> str:
    type = call.text("type", "model")
    if type not in _TYPES:
        raise HubRefusal(f"this hub has no repositories of the type {type[:40]!r}")
    return _TYPES[type]


def _full_name(call: HubCall) -> str:
    """Return OWNER/NAME from one field or from two."""
    name = call.text("name", "")
    owner = call.fields.get("organization") or call.visitor.user
    if not isinstance(owner, str):
        raise HubRefusal("the body has no text 'organization'")
    return name if "/" in name else f"{owner}/{name}"


WRITES = (
    Endpoint("POST", "/api/repos/create", add_repository, TOKEN, _BODY),
    Endpoint("DELETE", "/api/repos/delete", remove_repository, TOKEN, _BODY),
    Endpoint("POST", "/api/repos/move", rename_repository, TOKEN, _BODY),
    Endpoint("PUT", REPOSITORY + "/settings", change_settings, ADMIN, _BODY),
    Endpoint("POST", REPOSITORY + "/tag/{rev}", add_tag, WRITE, _BODY),
    Endpoint("DELETE", REPOSITORY + "/tag/{rev}", remove_tag, WRITE, _BODY),
    Endpoint("POST", REPOSITORY + "/branch/{rev}", add_branch, WRITE, _BODY),
    Endpoint("DELETE", REPOSITORY + "/branch/{rev}", remove_branch, WRITE, _BODY),
    Endpoint("GET POST", REPOSITORY + "/discussions", no_discussions, READ, _BODY),
)
