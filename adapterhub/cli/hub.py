"""`adapterhub hub`: start, mirror, users and tokens, import and export, keeping house."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import (
    bytes_text,
    print_copied,
    print_json,
    print_result,
    print_table,
    say,
)
from adapterhub.cli._options import as_json_option
from adapterhub.errors import ConfigError, FileError, counted
from adapterhub.files.shown_table import ShownTable

if TYPE_CHECKING:
    from adapterhub.hub.database import HubPlace
    from adapterhub.hub.state import Hub


def _read_place(_: click.Context, __: click.Parameter, address: str) -> HubPlace:
    """Return the place of a hub: a folder, or a PostgreSQL database."""
    if not re.match("postgres(ql)?://", address):
        return Path(address)
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(address).set(drivername="postgresql")
    except (ArgumentError, ValueError):
        raise ConfigError(
            "the address of the database cannot be read",
            expected="postgresql://USER@HOST:PORT/DATABASE",
        ) from None


_place = click.argument("place", metavar="DIR", callback=_read_place)
_blobs = click.option(
    "--blobs", metavar="URL", help="Bucket for the files of a new hub in postgresql://..."
)
_TYPES = ("models", "datasets", "spaces")
_LIBRARIES = (
    "sqlalchemy",
    "alembic",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "pathspec",
    "nh3",
    "markdown_it",
)
_upstream_token = click.option(
    "--upstream-token",
    multiple=True,
    metavar="OWNER/NAME",
    help="Repository, or pattern, that is fetched with your token of the upstream; all who read "
    "here read it then.",
)
_CHANGES: dict[str, dict[str, bool]] = {
    "promote": {"is_admin": True},
    "demote": {"is_admin": False},
    "disable": {"is_disabled": True},
    "enable": {"is_disabled": False},
}
_roles = click.Choice(["read", "write", "admin"])


@click.group("hub")
def command() -> None:
    """Serve a hub of your own, with users and tokens, to any client of the Hub's protocol."""
    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise ConfigError(
            f"a hub needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed",
            hint='pip install "adapterhub[hub]"',
        )


@command.command()
@_place
@_blobs
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=8733, show_default=True, help="Port; 0 chooses a free one.")
@click.option("--public-url", metavar="URL", help="Address that clients use, behind a proxy.")
@click.option("--open-reading", is_flag=True, help="Let anyone read public repositories.")
@click.option(
    "--regular-max",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="Largest file that a client sends within a commit.",
)
@click.option(
    "--max-file", metavar="SIZE", default="64GiB", show_default=True, help="Largest file."
)
@click.option("--quota", metavar="SIZE", help="Most that a user or organisation may keep.")
@click.option(
    "--upstream", metavar="URL", help="Hub to fetch missing repositories from, and to mirror."
)
@_upstream_token
@click.option("--trust-user-header", metavar="NAME", help="Header with the user, of the proxy.")
@click.option(
    "--trusted-proxy",
    multiple=True,
    metavar="ADDRESS",
    help="Address or network of a proxy, whose X-Forwarded-For is read.",
)
def start(place: HubPlace, blobs: str | None, host: str, port: int, **options: Any) -> None:
    """Serve the hub in DIR until Ctrl-C; create it if it does not exist.

    DIR is a folder, or postgresql://HOST/DATABASE, which any number of processes may serve.
    """
    from adapterhub.hub.server import serve_hub
    from adapterhub.hub.state import HubOptions
    from adapterhub.web.connections import raise_file_limit

    header, proxies = options["trust_user_header"], options["trusted_proxy"]
    if header and not proxies:
        raise ConfigError(
            "the header of a user is accepted from configured proxies only",
            expected="--trust-user-header NAME --trusted-proxy ADDRESS",
        )
    if options["upstream_token"] and not options["upstream"]:
        raise ConfigError(
            "--upstream-token names repositories of an upstream", expected="--upstream URL"
        )
    chosen = HubOptions(
        options["public_url"],
        options["open_reading"],
        _size("--regular-max", options["regular_max"]),
        _size("--max-file", options["max_file"]),
        _size("--quota", options["quota"]) if options["quota"] else None,
        user_header=header,
        proxies=proxies,
        upstream=options["upstream"],
        upstream_token=options["upstream_token"],
    )
    files = raise_file_limit()

    def say_started(address: str) -> None:
        say(f"serving {place} at {address}")
        if files:
            say(files)

    serve_hub(place, host, port, chosen, say_started, blobs)


@command.command()
@_place
@click.argument("names", metavar="OWNER/NAME[@REVISION]...", nargs=-1, required=True)
@click.option("--upstream", metavar="URL", required=True, help="Hub that has them.")
@_upstream_token
@click.option("--type", default="models", show_default=True, type=click.Choice(_TYPES))
@_blobs
@as_json_option
def mirror(
    place: HubPlace,
    names: tuple[str, ...],
    upstream: str,
    upstream_token: tuple[str, ...],
    type: str,
    blobs: str | None,
    as_json: bool,
) -> None:
    """Fetch repositories of another hub ahead; the hub in DIR may be serving."""
    from adapterhub.hub.mirror_store import Copies
    from adapterhub.hub.server import check_address
    from adapterhub.hub.state import HubOptions, create_hub, open_hub

    check_address(upstream, "--upstream")
    create_hub(place, blobs)
    options = HubOptions(upstream=upstream, upstream_token=upstream_token)
    with open_hub(place, options) as hub:
        copies = Copies(hub)
        reports = []
        for name in names:
            own, _, revision = name.partition("@")
            report = copies.fetch_all(type, own, revision or "main", partial(say, err=True))
            reports.append(asdict(report))
            with hub.database.writing() as connection:
                _note(hub, connection, "mirror", f"{report.name}@{report.commit}")
            if not as_json:
                files = f"{counted(report.files, 'file')} ({bytes_text(report.size)})"
                say(f"{report.name}@{report.commit[:12]}: {files}, {report.fetched} fetched")
    if as_json:
        print_json(reports)


@command.command()
@_place
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--admin", is_flag=True, help="Let them change everything on this hub.")
@click.option("--promote", is_flag=True, help="Make users administrators.")
@click.option("--demote", is_flag=True, help="Make administrators users.")
@click.option("--disable", is_flag=True, help="Admit none of their tokens.")
@click.option("--enable", is_flag=True, help="Admit their tokens again.")
@click.option("--remove", is_flag=True, help="Remove users and their tokens.")
@_blobs
@as_json_option
def user(
    place: HubPlace,
    names: tuple[str, ...],
    admin: bool,
    blobs: str | None,
    as_json: bool,
    **changes: bool,
) -> None:
    """Create users, change them, or list all.

    The hub in DIR is created if it does not exist.
    """
    from adapterhub.hub.accounts import create_namespace, owners_of_kind, remove_user, set_user
    from adapterhub.hub.state import create_hub

    chosen = [name for name, value in changes.items() if value]
    change = chosen[0] if chosen else None
    if change and (admin or not names or len(chosen) > 1):
        raise ConfigError(
            f"--{change} changes users that exist, and stands alone",
            expected=f"DIR NAME... --{change}",
        )
    if names and not change:
        create_hub(place, blobs)
    with _opened(place) as hub, hub.database.writing() as connection:
        for name in names:
            if change == "remove":
                remove_user(connection, name)
            elif change:
                set_user(connection, name, **_CHANGES[change])
            else:
                create_namespace(connection, name, "user", is_admin=admin)
            _note(hub, connection, f"{change or 'create'} user", name)
        owners = owners_of_kind(connection, "user")
    if names:
        done = f"{(change or 'create').removesuffix('e')}ed"
        shown = f"{done} the user{'s' * (len(names) > 1)} {', '.join(names)}"
        print_result(shown, [*names], as_json=as_json)
    elif as_json:
        print_json([owner.name for owner in owners])
    else:
        for owner in owners:
            marks = [("admin", owner.is_admin), ("disabled", owner.is_disabled)]
            marked = ", ".join(mark for mark, holds in marks if holds)
            say(f"{owner.name}  {marked}".rstrip())


@command.command()
@_place
@click.argument("name", required=False)
@click.option("--member", "members", multiple=True, metavar="USER=ROLE", help="Add or change one.")
@click.option("--remove-member", "removed", multiple=True, metavar="USER", help="Remove one.")
@click.option("--quota", metavar="SIZE", help="Most that it may keep; none for no limit.")
@click.option("--allow", "allowed", multiple=True, metavar="RULE", help="Let a rule not hold here.")
@click.option(
    "--allow-finding", "findings", multiple=True, metavar="CODE", help="It is not a secret."
)
@click.option(
    "--protect", "protected", multiple=True, metavar="TAG", help="For admins only: 'prod*'."
)
@click.option("--signer", "signers", multiple=True, metavar="KEY", help="Require its signature.")
@click.option("--disallow", multiple=True, metavar="RULE", help="Let a rule hold here again.")
@click.option("--disallow-finding", multiple=True, metavar="CODE", help="It is a secret again.")
@click.option("--unprotect", multiple=True, metavar="TAG", help="Let writers move it again.")
@click.option("--remove-signer", multiple=True, metavar="KEY", help="Require it no longer.")
@as_json_option
def org(place: HubPlace, name: str | None, as_json: bool, **options: Any) -> None:
    """Create an organisation or change it, or a user's own namespace; without NAME, list all.

    The options are added to the current settings.
    """
    from adapterhub.hub.accounts import find_owner, owners_of_kind, set_member

    with _opened(place) as hub, hub.database.writing() as connection:
        if name is None:
            names = [each.name for each in owners_of_kind(connection, "org")]
            print_result("\n".join(names), names, as_json=as_json)
            return
        owner = find_owner(connection, name) or _new_org(hub, connection, name)
        for member in options["members"]:
            user, _, role = member.partition("=")
            if role not in _roles.choices:
                raise ConfigError(f"--member {member!r}", expected="USER=read, =write or =admin")
            set_member(connection, owner.name, user, role)
        for user in options["removed"]:
            set_member(connection, owner.name, user, None)
        facts = _change_owner(hub, connection, owner, options)
        _note(hub, connection, "change organisation", f"{owner.name} {_given()}".strip())
    if as_json:
        print_json(facts)
    else:
        for field, value in facts.items():
            if value:
                say(f"{field:10} {value if isinstance(value, str) else ', '.join(value)}")


@command.group()
def token() -> None:
    """Create, list or revoke the tokens of a hub's users."""


@token.command("create")
@_place
@click.option("--user", required=True, metavar="NAME", help="User whose token it is.")
@click.option("--name", help="Name of the token.  [default: the user's, with a number]")
@click.option("--role", type=_roles, default="write", show_default=True, help="Most it allows.")
@click.option("--scope", metavar="OWNER", help="Only namespace that it is for.")
@click.option("--expires", metavar="TIME", help="Validity: 90d, 12h.")
@as_json_option
def create_access(
    place: HubPlace,
    user: str,
    name: str | None,
    role: str,
    scope: str | None,
    expires: str | None,
    as_json: bool,
) -> None:
    """Create a token for a user and print it: it is not stored, only its digest."""
    from adapterhub.config.yaml import seconds_of
    from adapterhub.hub.accounts import create_hub_token, free_token_name

    seconds = seconds_of(expires) if expires else None
    if expires and seconds is None:
        raise ConfigError(f"--expires {expires!r} is not a duration", expected="90d or 12h")
    with _opened(place) as hub, hub.database.writing() as connection:
        chosen = name or free_token_name(connection, user)
        made = create_hub_token(connection, user, chosen, role, scope=scope, seconds=seconds)
        _note(hub, connection, "create token", f"{chosen} of {user}, {role}")
    print_result(made, {"token": made, "name": chosen}, as_json=as_json)


@token.command("list")
@_place
@as_json_option
def list_access(place: HubPlace, as_json: bool) -> None:
    """List the tokens with owner, permissions and last use."""
    from adapterhub.hub.accounts import token_rows

    with _opened(place) as hub, hub.database.reading() as connection:
        rows = token_rows(connection)
    if as_json:
        print_json(rows)
    elif rows:
        cells = [[str(value or "-") for value in row.values()] for row in rows]
        print_table(ShownTable([*rows[0]], cells))
    else:
        say("no tokens", err=True)


@token.command("revoke")
@_place
@click.argument("name")
def revoke_access(place: HubPlace, name: str) -> None:
    """Revoke a token. It becomes invalid immediately."""
    from adapterhub.hub.accounts import revoke_hub_token

    with _opened(place) as hub, hub.database.writing() as connection:
        revoke_hub_token(connection, name)
        _note(hub, connection, "revoke token", name)
    say(f"revoked {name}")


@command.command("import")
@_place
@click.argument("registry")
@click.option("--owner", required=True, metavar="NAME", help="Owner of the new repositories.")
@as_json_option
def import_versions(place: HubPlace, registry: str, owner: str, as_json: bool) -> None:
    """Copy all versions of a REGISTRY into the hub; existing versions are not changed."""
    from adapterhub.hub.import_export import import_registry

    with _opened(place) as hub:
        report = import_registry(hub, registry, owner, partial(say, err=True))
    print_copied(report, registry, str(place), as_json=as_json)


@command.command("export")
@_place
@click.argument("registry")
@click.option(
    "--owner", metavar="NAME", help="Owner of the repositories; required if there are several."
)
@as_json_option
def export_versions(place: HubPlace, registry: str, owner: str | None, as_json: bool) -> None:
    """Copy all versions of the hub into a REGISTRY: the way out."""
    from adapterhub.hub.import_export import export_registry

    with _opened(place) as hub:
        report = export_registry(hub, registry, owner, partial(say, err=True))
    print_copied(report, str(place), registry, as_json=as_json)


@command.command("verify")
@_place
@click.option(
    "--repair",
    "source",
    metavar="DIR",
    callback=lambda context, option, given: given and _read_place(context, option, given),
    help="Backup, or another hub, to take files from that are missing or damaged here.",
)
@as_json_option
def verify_all(place: HubPlace, source: HubPlace | None, as_json: bool) -> None:
    """Read all files, compare their digests, and list the problems."""
    from adapterhub.hub.gc import verify_hub

    with ExitStack() as stack:
        other = stack.enter_context(_opened(source)).blobs if source else None
        problems = verify_hub(stack.enter_context(_opened(place)), other)
    if as_json:
        print_json({"hub": str(place), "problems": problems})
    if problems:
        raise FileError(f"problems in {place}", offenders=problems)
    if not as_json:
        say(f"{place}: all files are intact")


@command.command("gc")
@_place
@click.option("--dry-run", is_flag=True, help="Remove nothing; print what would be removed.")
@as_json_option
def collect_garbage(place: HubPlace, dry_run: bool, as_json: bool) -> None:
    """Remove files that no commit needs, and uploads that did not end; the hub may be serving."""
    from adapterhub.hub.gc import collect

    with _opened(place) as hub:
        report = collect(hub, dry_run=dry_run)
    done = "would be removed" if dry_run else "removed"
    summary = f"{counted(report.files, 'file')} ({bytes_text(report.size)}) {done}"
    print_result(f"{place}: {summary}", asdict(report), as_json=as_json)


@command.command()
@_place
@click.argument("target", type=click.Path(path_type=Path))
@as_json_option
def backup(place: HubPlace, target: Path, as_json: bool) -> None:
    """Copy the hub to TARGET, also while it serves. A second backup copies only new files."""
    from adapterhub.hub.backups import backup_hub

    copied = backup_hub(place, target)
    summary = f"{target}: {counted(copied, 'file')} copied"
    print_result(summary, {"backup": str(target), "files": copied}, as_json=as_json)


@command.command("restore")
@click.argument("source", metavar="BACKUP", type=click.Path(path_type=Path))
@_place
@_blobs
@as_json_option
def restore_backup(source: Path, place: HubPlace, blobs: str | None, as_json: bool) -> None:
    """Make a hub in DIR of a BACKUP, and verify it."""
    from adapterhub.hub.backups import restore_hub

    copied = restore_hub(source, place, blobs)
    summary = f"{place}: {counted(copied, 'file')} restored and verified"
    print_result(summary, {"hub": str(place), "files": copied}, as_json=as_json)


@command.command("upgrade")
@_place
def upgrade_tables(place: HubPlace) -> None:
    """Bring the tables of an older hub to this release; the database as it was is kept."""
    from adapterhub.hub.backups import upgrade_hub

    before = upgrade_hub(place)
    say(f"{place}: upgraded from {before}" if before else f"{place} is of this release")


@command.command()
@_place
@click.option("--limit", default=100, show_default=True, help="Number of rows.")
@as_json_option
def audit(place: HubPlace, limit: int, as_json: bool) -> None:
    """Show who did what, the newest first."""
    from adapterhub.hub.state import audit_rows

    with _opened(place) as hub, hub.database.reading() as connection:
        rows = audit_rows(connection, limit)
    if as_json:
        for row in rows:
            print_json(row)
    elif rows:
        shown = ("time", "who", "token", "action", "target", "address")
        print_table(ShownTable(shown, [[row[name] or "-" for name in shown] for row in rows]))


@contextmanager
def _opened(place: HubPlace) -> Iterator[Hub]:
    from adapterhub.hub.state import open_hub

    with open_hub(place) as hub:
        yield hub


def _note(hub: Hub, connection: Any, action: str, target: str) -> None:
    """Record the action of a command in the audit log."""
    from adapterhub.hub.database import write_audit

    write_audit(connection, "", "command line", action, target)


def _given() -> str:
    """Return the options of this command as they were typed, for the audit log."""
    context = click.get_current_context()
    typed = []
    for option in context.command.params:
        values = context.params.get(option.name or "")
        if isinstance(values, tuple):
            typed += [f"{option.opts[0]} {value}" for value in values]
        elif option.name == "quota" and values:
            typed.append(f"{option.opts[0]} {values}")
    return " ".join(typed)


def _new_org(hub: Hub, connection: Any, name: str) -> Any:
    from adapterhub.hub.accounts import create_namespace

    _note(hub, connection, "create organisation", name)
    return create_namespace(connection, name, "org")


def _change_owner(hub: Hub, connection: Any, owner: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Store the rules and the quota of a namespace; return the current ones."""
    from adapterhub.files.signature import read_public_key
    from adapterhub.hub.accounts import MIRROR, change_owner, members_of
    from adapterhub.hub.gate import RULES, parse_rules, rules_text

    if unknown := sorted({*options["allowed"], *options["disallow"]} - {*RULES}):
        raise ConfigError(f"no such rule: {unknown[0]!r}", expected=", ".join(RULES))
    if options["signers"] and owner.kind == MIRROR:
        raise ConfigError(
            f"{owner.name} is another hub, whose repositories are mirrored as they are",
            hint="adapterhub trust --require-signatures, where adapters are loaded",
        )
    rules = parse_rules(owner.rules)
    keys, ended = (
        tuple(read_public_key(key).id for key in options[name])
        for name in ("signers", "remove_signer")
    )
    changes = {
        "allowed": (options["allowed"], options["disallow"]),
        "findings": (options["findings"], options["disallow_finding"]),
        "protected": (options["protected"], options["unprotect"]),
        "signers": (keys, ended),
    }
    values = {}
    for name, (added, removed) in changes.items():
        known = getattr(rules, name)
        if absent := sorted({*removed} - {*known}):
            raise ConfigError(
                f"{owner.name} has no {absent[0]!r} to take back", expected=", ".join(known)
            )
        values[name] = tuple(x for x in dict.fromkeys((*known, *added)) if x not in removed)
    changed = replace(rules, **values)
    quota = owner.quota
    if options["quota"]:
        quota = None if options["quota"] == "none" else _size("--quota", options["quota"])
    change_owner(connection, owner.id, rules_text(changed), quota)
    members = [f"{user}={role}" for user, role in members_of(connection, owner.id).items()]
    quotas = [bytes_text(quota)] if quota is not None else []
    return {"name": owner.name, "members": members, "quota": quotas, **asdict(changed)}


def _size(option: str, text: str) -> int:
    from adapterhub.config.yaml import size_in_bytes

    size = size_in_bytes(text)
    if size is None:
        raise ConfigError(f"{option} {text!r} is not a size", expected="256MiB, 10GB")
    return size
