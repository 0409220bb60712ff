"""Web pages of a hub: the list of adapters, an adapter, its files and commits, and the login.

The pages are read-only, require a login with a token, and have no scripts but our own. They look
like the pages of `adapterhub registry site`; here the server answers the search form, there a
script does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from sqlalchemy import Connection
from starlette.responses import Response

from adapterhub.errors import one_line
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES, own_text
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.hub.accounts import (
    COOKIE,
    READ,
    SESSION_SECONDS,
    begin_session,
    end_session,
    token_rows,
    visitor_of,
)
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.commits import (
    BRANCH,
    TAG,
    Tree,
    branch_head,
    commit_at,
    entries_below,
    history,
    read_tree,
    refs_of,
)
from adapterhub.hub.mirror_store import kept_tree
from adapterhub.hub.repositories import versions_of
from adapterhub.hub.request import OPEN, PAGE, HubCall, part_of_list, redirect
from adapterhub.hub.search_rows import (
    ORDERS,
    HubListing,
    HubQuery,
    search_listings,
    shown_version,
    values_of_facets,
)
from adapterhub.pages.site_pages import (
    AdapterLinks,
    ListPart,
    SitePlace,
    adapter_page,
    form_page,
    front_page,
    list_page,
)
from adapterhub.pages.versions import FIELDS, PublishedName, PublishedVersion, size_text
from adapterhub.web.connections import is_own_form
from adapterhub.web.errors import HubRefusal, MissingEntryError
from adapterhub.web.frame import Endpoint, page_response

_ON_A_PAGE = 50
_MOST_CHOICES = 60
_MOST_VERSIONS_READ = 60
_FORM_BODY = 16 << 10
_LOGIN = "/settings/tokens"
_ABOUT = "A hub of adapters, served by adapterhub. Log in to see its contents."
_TITLES = {401: "A login is needed", 403: "Not allowed", 404: "Not found"}


def front(call: HubCall) -> Response:
    """Show the newest adapters or the search results; show strangers an introduction."""
    if not (call.visitor.user or call.hub.options.open_reading):
        return page_response(_login_page(call, host_of(call), _ABOUT))
    params = dict(call.request.query_params)
    order = params.get("sort", "newest")
    offset, _ = part_of_list(call, _ON_A_PAGE, _ON_A_PAGE)
    labels = [(name, value) for name, value in params.items() if name in FIELDS and value]
    labels.append(("adapter", "yes"))
    if author := params.get("author"):
        labels.append(("author", author))
    query = HubQuery(
        "models",
        labels,
        params.get("q", ""),
        order if order in ORDERS else "newest",
        call.visitor.namespaces,
        call.visitor.scope,
        _ON_A_PAGE + 1,
        offset,
    )
    with call.hub.database.reading() as connection:
        listings = search_listings(connection, query)
        values = values_of_facets(connection, _MOST_CHOICES) if call.visitor.scope is None else {}
    page = front_page(
        _place(call),
        host_of(call),
        [each.listed for each in listings[:_ON_A_PAGE] if each.listed],
        dict(values.get("backbone", ())),
        (),
        chosen=params,
        choices={name: [value for value, _ in values.get(name, ())] for name in FIELDS},
        count=_count(listings, offset),
        links=_others(params, offset, len(listings)),
        first=_first_push(call) if not (listings or labels[1:] or query.text or offset) else "",
    )
    return page_response(page)


def host_of(call: HubCall) -> str:
    """Return the name of the hub: the host of the request and the hub's path prefix."""
    return call.base.partition("://")[2]


def _first_push(call: HubCall) -> str:
    owner = call.visitor.user or "OWNER"
    return f"adapterhub login {call.base}\nadapterhub push RUN {call.base}/{owner}/NAME"


def error_page(call: HubCall, error: HubRefusal) -> Response:
    """Return a refusal as a page for a browser, with a login form if a token is required."""
    title = _TITLES.get(error.status, "This does not work")
    problem = one_line(error.summary, 500)
    if error.status == 401:
        return page_response(_login_page(call, title, problem), 401)
    return page_response(list_page(_place(call), "", title, problem, []), error.status)


def repository_page(call: HubCall) -> Response:
    """Show an adapter with its versions, or the files and card of another repository."""
    read = call.hub.blobs.read
    with call.hub.database.reading() as connection:
        head = branch_head(connection, call.repository.id)
        tree: Tree = read_tree(connection, head.tree) if head else {}
        tree = kept_tree(connection, call.repository, tree)
        numbered = versions_of(connection, call.repository.id, read)
        versions: list[PublishedVersion] = []
        broken = {}
        for each in numbered[-_MOST_VERSIONS_READ:]:
            commit = commit_at(connection, call.repository.id, each.commit)
            own = read_tree(connection, commit.tree)
            version = shown_version(call.repository, each, commit, own, tree, read)
            if isinstance(version, PublishedVersion):
                versions.append(_named(call, version))
            elif version is None:
                broken[each.name] = "it has no adapter that can be read"
        if not numbered and head is not None:
            version = shown_version(call.repository, None, head, tree, tree, read)
            if isinstance(version, PublishedVersion):
                versions.append(_named(call, version))
    if not versions:
        return _files_page(call, "main", "")
    name = PublishedName("", call.repository.name, tuple(versions), broken)
    path = call.repository.path
    links = [
        ("files", f"{path}/tree/main"),
        ("commits", f"{path}/commits/main"),
        (f"all of {path.partition('/')[0]}", f"?{urlencode({'author': path.partition('/')[0]})}"),
    ]
    return page_response(adapter_page(_place(call), name, AdapterLinks(links)))


def tree_page(call: HubCall) -> Response:
    """Show the files of a revision or of a folder in it."""
    return _files_page(call, call.values["rev"], call.values.get("rest", "").strip("/"))


def commits_page(call: HubCall) -> Response:
    """Show the commits of a revision, newest first."""
    path = call.repository.path
    with call.hub.database.reading() as connection:
        start = commit_at(connection, call.repository.id, call.values["rev"])
        commits = history(connection, call.repository.id, start, _ON_A_PAGE)
    root = _root(call)
    rows = [
        (
            TableCell(each.oid[:12], link=f"{root}{path}/commit/{each.oid}"),
            each.title,
            each.author,
            _minute(each.created),
        )
        for each in commits
    ]
    table = ShownTable(("commit", "title", "by", "date"), rows)
    parts = [ListPart("Commits", table, kind="left dated")]
    return _list(call, path, "The newest commits", parts)


def commit_page(call: HubCall) -> Response:
    """Show the changes of a commit."""
    path = call.repository.path
    with call.hub.database.reading() as connection:
        commit = commit_at(connection, call.repository.id, call.values["rev"])
        tree = read_tree(connection, commit.tree)
        old: Tree = {}
        if commit.parent and (pair := history(connection, call.repository.id, commit, 2))[1:]:
            old = read_tree(connection, pair[1].tree)
    rows = [
        (name, _change(old.get(name), tree.get(name)))
        for name in sorted({*old, *tree})
        if old.get(name) != tree.get(name)
    ]
    facts = [("commit", commit.oid), ("by", commit.author), ("date", commit.created)]
    facts += [("parent", commit.parent)] if commit.parent else []
    parts = [
        ListPart(commit.title, ShownTable(("", ""), facts), commit.message[:2_000]),
        ListPart("Files", ShownTable(("file", "change"), rows)),
    ]
    return _list(call, path, f"Commit {commit.oid[:12]}", parts)


def tokens_page(call: HubCall) -> Response:
    """Show the login form; after the login, show the user."""
    place = _place(call)
    if not call.visitor.user:
        return page_response(_login_page(call, "Log in"))
    note = (
        f"You are logged in as {call.visitor.user}. These pages only read; to change something, "
        "give a token to a client."
    )
    with call.hub.database.reading() as connection:
        rows = _own_tokens(connection, call.visitor.user)
    table = ShownTable(("token", "role", "created", "expires", "last use"), rows)
    return page_response(form_page(place, "Your tokens", note, "logout", "Log out", table=table))


def _login_page(call: HubCall, title: str, about: str = "") -> str:
    note = (
        "Log in with a token of this hub, such as ah_..., which its operator has given to you. "
        "The operator creates it with adapterhub hub token create."
    )
    action = f"{_root(call)}settings/login"
    return form_page(_place(call), title, note, action, "Log in", field="Token", subtitle=about)


def log_in(call: HubCall) -> Response:
    """Log in with a token for read access to pages for some hours."""
    token = parse_qs(call.raw_body.decode("utf-8", "replace")).get("token", [""])[0].strip()
    if not is_own_form(call.request.headers, call.base):
        raise HubRefusal("another site may not log you in", status=403)
    with call.hub.database.reading() as connection:
        visitor = visitor_of(connection, token)
    if visitor is None:
        call.hub.note_failure(call.address, "log in")
        raise HubRefusal("this is not a token of this hub", status=401)
    with call.hub.database.writing() as connection:
        cookie = begin_session(connection, token)
        call.visitor = visitor
        call.note(connection, "log in", visitor.user)
    answer = redirect(call, "/")
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=int(SESSION_SECONDS),
        path=call.prefix or "/",
        secure=call.base.startswith("https:"),
        httponly=True,
        samesite="strict",
    )
    return answer


def log_out(call: HubCall) -> Response:
    """End a session, on the server and in the browser."""
    if not is_own_form(call.request.headers, call.base):
        raise HubRefusal("another site may not log you out", status=403)
    if cookie := call.request.cookies.get(COOKIE):
        with call.hub.database.writing() as connection:
            end_session(connection, cookie)
    answer = redirect(call, _LOGIN)
    answer.delete_cookie(COOKIE, path=call.prefix or "/", httponly=True, samesite="strict")
    return answer


def _files_page(call: HubCall, revision: str, folder: str) -> Response:
    repository, read = call.repository, call.hub.blobs.read
    with call.hub.database.reading() as connection:
        commit = commit_at(connection, repository.id, revision)
        tree = kept_tree(connection, repository, read_tree(connection, commit.tree))
        names = refs_of(connection, repository.id)
    entries = entries_below(tree, folder, recursive=False)
    if entries is None:
        raise MissingEntryError(f"no such folder: {folder[:200]!r} in this revision")
    start = f"{_root(call)}{repository.path}"
    rows = []
    for path, info in entries:
        action = "resolve" if isinstance(info, BlobInfo) else "tree"
        link = f"{start}/{action}/{quote(revision, safe='')}/{quote(path)}"
        sha256 = info.sha256 if isinstance(info, BlobInfo) else ""
        size = size_text(info.size) if isinstance(info, BlobInfo) else "folder"
        rows.append((TableCell(path.rpartition("/")[2], link=link), size, sha256))
    title = f"Files of {revision}" + (f", in {folder}" if folder else "")
    parts = [ListPart(title, ShownTable(("file", "size", "sha256"), rows))]
    refs = [(each, "branch") for each in names[BRANCH]] + [(each, "tag") for each in names[TAG]]
    cells = [
        (TableCell(each, link=f"{start}/tree/{quote(each, safe='')}"), kind) for each, kind in refs
    ]
    parts.append(ListPart("Revisions", ShownTable(("name", "kind"), cells)))
    card = ""
    if not folder and CARD_FILE in tree:
        card = own_text(read(tree[CARD_FILE].sha256, MAX_CARD_BYTES).decode("utf-8", "replace"))
    links = [("commits", f"{repository.path}/commits/{quote(revision, safe='')}")]
    if folder:
        above = folder.rpartition("/")[0]
        end = f"/{quote(above)}" if above else ""
        tree_path = f"{repository.path}/tree/{quote(revision, safe='')}{end}"
        links.append((f"up to {above or 'all files'}", tree_path))
    return _list(call, repository.path, f"at {commit.oid[:12]}", parts, links, card)


def _list(
    call: HubCall,
    title: str,
    subtitle: str,
    parts: Sequence[ListPart],
    links: Sequence[tuple[str, str]] = (),
    card: str = "",
) -> Response:
    links = [(call.repository.name, call.repository.path), *links]
    return page_response(
        list_page(_place(call), "", title, subtitle, parts, links=links, card=card)
    )


def _place(call: HubCall) -> SitePlace:
    navigation = [("Adapters", ""), ("Account", _LOGIN[1:])]
    return SitePlace(
        _root(call),
        navigation,
        None,
        True,
        lambda entry: entry.name,
        lambda backbone: f"?{urlencode({'backbone': backbone})}",
    )


def _named(call: HubCall, version: PublishedVersion) -> PublishedVersion:
    """Return a version with the reference that a reader types."""
    reference = f"{call.base}/{version.entry.reference}"
    return replace(version, entry=replace(version.entry, reference=reference))


def _root(call: HubCall) -> str:
    return f"{call.prefix}/"


def _count(listings: Sequence[HubListing], offset: int) -> str:
    if not listings:
        return "Nothing is found."
    count, is_part = min(len(listings), _ON_A_PAGE), len(listings) > _ON_A_PAGE
    if not (offset or is_part):
        return f"{count} adapter{'s' * (count != 1)}"
    return f"Adapters {offset + 1:,} to {offset + count:,}" + ", and there are more" * is_part


def _others(params: dict[str, str], offset: int, count: int) -> list[tuple[str, str]]:
    """Return the previous and next pages of a search."""
    query = {name: value for name, value in params.items() if name != "cursor"}
    links = []
    if offset:
        back = max(0, offset - _ON_A_PAGE)
        links.append(("previous", f"?{urlencode(query | {'cursor': back})}"))
    if count > _ON_A_PAGE:
        links.append(("next", f"?{urlencode(query | {'cursor': offset + _ON_A_PAGE})}"))
    return links


def _change(old: BlobInfo | None, new: BlobInfo | None) -> str:
    if new is None:
        return "removed"
    size = size_text(new.size)
    return f"added, {size}" if old is None else f"changed, {size_text(old.size)} to {size}"


def _minute(time: str | None) -> str:
    """Format a time for pages."""
    return time[:16].replace("T", " ") if time else "-"


def _own_tokens(connection: Connection, user: str) -> list[tuple[Any, ...]]:
    return [
        (
            row["name"],
            row["role"],
            (row["created"] or "-")[:10],
            (row["expires"] or "-")[:10],
            _minute(row["used"]),
        )
        for row in token_rows(connection)
        if row["user"] == user
    ]


PAGES = (
    Endpoint("GET HEAD", "/", front, PAGE),
    Endpoint("GET", _LOGIN, tokens_page, PAGE),
    Endpoint("POST", "/settings/login", log_in, OPEN, _FORM_BODY),
    Endpoint("POST", "/settings/logout", log_out, OPEN, _FORM_BODY),
    *(
        Endpoint("GET HEAD", f"{start}/{{owner}}/{{name}}{end}", answer, READ)
        for start in ("/{kind:datasets|spaces}", "")
        for end, answer in (
            ("", repository_page),
            ("/tree/{rev}", tree_page),
            ("/tree/{rev}/{rest:path}", tree_page),
            ("/commit/{rev}", commit_page),
            ("/commits/{rev}", commits_page),
        )
    ),
)
