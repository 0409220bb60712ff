"""Endpoints that read repositories: user, lists, descriptions, trees, refs and commits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any
from urllib.parse import parse_qs

from sqlalchemy import Connection
from starlette.responses import Response

from adapterhub.hub.accounts import READ, WRITE
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.commits import (
    BRANCH,
    MAIN,
    TAG,
    CommitRecord,
    FolderInfo,
    Tree,
    commit_at,
    entries_below,
    history,
    last_commits,
    oid_of_folder,
    pointer_of,
    read_tree,
    refs_of,
)
from adapterhub.hub.mirror_store import kept_tree, sum_of_sizes
from adapterhub.hub.request import (
    OPEN,
    REPOSITORY,
    TOKEN,
    TYPE,
    HubCall,
    json_answer,
    listed_answer,
    part_of_list,
)
from adapterhub.hub.search_rows import (
    HubDescription,
    HubListing,
    HubQuery,
    describe_tree,
    listing_of,
    search_listings,
)
from adapterhub.web.errors import HubRefusal, MissingEntryError
from adapterhub.web.frame import Endpoint

_MOST_LISTED, _USUAL_LISTED = 1_000, 500
_MOST_IN_TREE, _USUAL_IN_TREE = 1_000, 1_000
_SMALL_BODY = 1 << 20


def whoami(call: HubCall) -> Response:
    """Return the user of the token."""
    visitor = call.visitor
    return json_answer(
        {
            "type": "user",
            "id": visitor.user,
            "name": visitor.user,
            "fullname": visitor.user,
            "email": None,
            "canPay": False,
            "isPro": False,
            "orgs": [{"type": "org", "name": name, "fullname": name} for name in visitor.orgs],
            "auth": {
                "type": "access_token",
                "accessToken": {
                    "displayName": visitor.token,
                    "role": "read" if visitor.role == READ else "write",
                },
            },
        }
    )


def list_repositories(call: HubCall) -> Response:
    """List the repositories that match the parameters, one page at a time."""
    params = call.request.query_params
    filters = params.getlist("filter")
    labels = [("tag", tag) for each in filters for tag in each.split(",") if tag]
    if author := call.query("author"):
        labels.append(("author", author))
    if pipeline := call.query("pipeline_tag"):
        labels.append(("pipeline", pipeline))
    offset, limit = part_of_list(call, _USUAL_LISTED, _MOST_LISTED)
    query = HubQuery(
        call.values["type"],
        labels,
        call.query("search"),
        "newest" if call.query("sort") else "name",
        call.visitor.namespaces,
        call.visitor.scope,
        limit + 1,
        offset,
    )
    with call.hub.database.reading() as connection:
        listings = search_listings(connection, query)
    full = call.is_asked("full") or bool(params.getlist("expand"))
    with_card = full or call.is_asked("cardData")
    items = [_listed(each, full=full, with_card=with_card) for each in listings]
    return listed_answer(call, items, offset, limit)


def repository_info(call: HubCall) -> Response:
    """Describe a repository at a revision."""
    with call.hub.database.reading() as connection:
        commit, tree = _commit_and_tree(call, connection)
        listing = listing_of(connection, call.repository.id)
        kept = kept_tree(connection, call.repository, tree)
    if listing is not None and listing.head == commit.oid:
        about = listing.about
    else:
        about = describe_tree(kept, call.hub.blobs.read)
    repository = call.repository
    info = {
        **_common(repository.name, repository.is_private, commit.oid, about),
        "cardData": about.card,
        "createdAt": repository.created,
        "lastModified": commit.created,
        "siblings": [*_siblings(tree, with_blobs=call.is_asked("blobs"))],
        "usedStorage": sum_of_sizes(tree),
        "spaces": [],
        "widgetData": None,
        "downloadsAllTime": 0,
    }
    if call.is_asked("securityStatus"):
        info["securityRepoStatus"] = {"scansDone": True, "filesWithIssues": []}
    return json_answer(info)


def list_tree(call: HubCall) -> Response:
    """List the files and folders of a revision or of a folder in it."""
    offset, limit = part_of_list(call, _USUAL_IN_TREE, _MOST_IN_TREE)
    folder = call.values.get("rest", "").strip("/")
    with call.hub.database.reading() as connection:
        commit, tree = _commit_and_tree(call, connection)
        entries = entries_below(tree, folder, recursive=call.is_asked("recursive"))
        if entries is None:
            raise MissingEntryError(f"no such folder: {folder[:200]!r} in this revision")
        shown = entries[offset : offset + limit + 1]
        last = _last(call, connection, commit, [path for path, _ in shown], call.is_asked("expand"))
    items = [_entry(path, info, last.get(path)) for path, info in shown]
    return listed_answer(call, items, offset, limit)


def paths_info(call: HubCall) -> Response:
    """Describe some files and folders of a revision; unknown paths are omitted."""
    if "json" in call.request.headers.get("content-type", ""):
        fields = call.fields
        paths, is_expanded = fields.get("paths", []), fields.get("expand") is True
    else:
        form = parse_qs(call.raw_body.decode("utf-8", "replace"))
        paths, is_expanded = form.get("paths", []), form.get("expand") == ["true"]
    if not isinstance(paths, list):
        raise HubRefusal("the body has no list of paths")
    with call.hub.database.reading() as connection:
        commit, tree = _commit_and_tree(call, connection)
        named = [path.strip("/") for path in paths if isinstance(path, str)]
        last = _last(call, connection, commit, named, is_expanded)
    entries = []
    for path in named:
        if path in tree:
            entries.append(_entry(path, tree[path], last.get(path)))
        elif path and entries_below(tree, path, recursive=False):
            folder = FolderInfo(path, oid_of_folder(tree, path))
            entries.append(_entry(path, folder, last.get(path)))
    return json_answer(entries)


def list_refs(call: HubCall) -> Response:
    """List the branches and tags."""
    with call.hub.database.reading() as connection:
        refs = refs_of(connection, call.repository.id)

    def items(kind: str, folder: str) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit}
            for name, commit in refs[kind].items()
        ]

    return json_answer(
        {
            "branches": items(BRANCH, "heads"),
            "converts": [],
            "tags": items(TAG, "tags"),
            "pullRequests": [],
            "highestVersion": call.repository.highest,  # our extension: the next version is higher
        }
    )


def list_commits(call: HubCall) -> Response:
    """List the commits of a revision, newest first."""
    offset, limit = part_of_list(call, 50, 1_000)
    with call.hub.database.reading() as connection:
        start = commit_at(connection, call.repository.id, call.values["rev"])
        commits = history(connection, call.repository.id, start, offset + limit + 1)[offset:]
    items = [
        {
            "id": each.oid,
            "title": each.title,
            "message": each.message,
            "date": each.created,
            "authors": [{"user": each.author, "avatar": ""}],
            **(_formatted(each) if "formatted" in call.request.query_params.values() else {}),
        }
        for each in commits
    ]
    return listed_answer(call, items, offset, limit)


def allowed(call: HubCall) -> Response:
    """Confirm that the visitor may perform the action in the path."""
    return json_answer({})


def no_harnesses(call: HubCall) -> Response:
    """Return an empty answer to a request that each client process sends."""
    return json_answer({"standardEnvVars": [], "harnesses": {}})


def nothing(call: HubCall) -> Response:
    """Accept telemetry and discard it."""
    return json_answer({})


def _formatted(commit: CommitRecord) -> dict[str, Any]:
    """Return the message of a commit as HTML."""
    return {"formatted": {"title": escape(commit.title), "message": escape(commit.message)}}


def _last(
    call: HubCall,
    connection: Connection,
    commit: CommitRecord,
    paths: Sequence[str],
    is_expanded: bool,
) -> dict[str, CommitRecord]:
    """Return the last commit that changed each path, if the client requests it."""
    return last_commits(connection, call.repository.id, commit, paths) if is_expanded else {}


def _commit_and_tree(call: HubCall, connection: Connection) -> tuple[CommitRecord, Tree]:
    commit = commit_at(connection, call.repository.id, call.values.get("rev", MAIN))
    return commit, read_tree(connection, commit.tree)


def _common(name: str, is_private: bool, head: str, about: HubDescription) -> dict[str, Any]:
    return {
        "_id": head[:24],
        "id": name,
        "modelId": name,
        "author": name.partition("/")[0],
        "sha": head,
        "private": is_private,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [*about.tags],
        **({"pipeline_tag": about.pipeline} if about.pipeline else {}),
        **({"library_name": about.library} if about.library else {}),
    }


def _listed(each: HubListing, *, full: bool, with_card: bool) -> dict[str, Any]:
    item = _common(each.name, each.is_private, each.head, each.about)
    item |= {"lastModified": each.modified, "createdAt": each.modified}
    if full:
        item["siblings"] = [{"rfilename": path} for path in each.about.files]
    if with_card:
        item["cardData"] = each.about.card
    return item


def _siblings(tree: Tree, *, with_blobs: bool) -> Iterator[dict[str, Any]]:
    for path, blob in sorted(tree.items()):
        item: dict[str, Any] = {"rfilename": path}
        if with_blobs:
            item |= {"size": blob.size, "blobId": blob.git_sha1}
            if blob.is_large:
                oid, size = pointer_of(blob.sha256, blob.size)
                item["blobId"] = oid
                item["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": size}
        yield item


def _entry(path: str, info: BlobInfo | FolderInfo, commit: CommitRecord | None) -> dict[str, Any]:
    item: dict[str, Any] = {"path": path}
    if isinstance(info, FolderInfo):
        item |= {"type": "directory", "oid": info.oid, "size": 0}
    else:
        item |= {"type": "file", "size": info.size, "oid": info.git_sha1}
        if info.is_large:
            oid, size = pointer_of(info.sha256, info.size)
            item["oid"] = oid
            item["lfs"] = {"oid": info.sha256, "size": info.size, "pointerSize": size}
    if commit is not None:
        item["lastCommit"] = {"id": commit.oid, "title": commit.title, "date": commit.created}
        if isinstance(info, BlobInfo):
            item["securityFileStatus"] = {
                "status": "safe",
                "avScan": None,
                "pickleImportScan": None,
            }
    return item


READS = (
    Endpoint("GET", "/api/whoami-v2", whoami, TOKEN),
    Endpoint("GET", f"/api/{TYPE}", list_repositories, READ),
    Endpoint("GET", "/api/agent-harnesses", no_harnesses, OPEN),
    Endpoint("GET HEAD POST", "/api/telemetry/{rest:path}", nothing, OPEN),
    Endpoint("POST", "/v1/telemetry", nothing, OPEN),
    Endpoint("GET", REPOSITORY, repository_info, READ),
    Endpoint("GET", REPOSITORY + "/revision/{rev}", repository_info, READ),
    Endpoint("GET", REPOSITORY + "/tree/{rev}", list_tree, READ),
    Endpoint("GET", REPOSITORY + "/tree/{rev}/{rest:path}", list_tree, READ),
    Endpoint("POST", REPOSITORY + "/paths-info/{rev}", paths_info, READ, _SMALL_BODY),
    Endpoint("GET", REPOSITORY + "/refs", list_refs, READ),
    Endpoint("GET", REPOSITORY + "/commits/{rev}", list_commits, READ),
    Endpoint("GET", REPOSITORY + "/auth-check", allowed, READ),
    Endpoint("GET", REPOSITORY + "/auth-check/write", allowed, WRITE),
)
