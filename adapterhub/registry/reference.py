"""References: the one syntax for naming an adapter, shared by all commands and functions.

    ./folder    ../x   /abs   ~/x        a folder on this machine
    name[@version]                       the local registry; see open_store.py for names of folders
    hf:owner/name[@revision]             the Hugging Face Hub
    https://host/owner/name[@revision]   a self-hosted hub; http only for the local host

In the local registry a version is a number (`3` or `v3`) or a tag; a revision is a commit, branch
or tag.

Names of folders in a local registry are valid and distinct on every file system. The folder of a
backbone is its id with `/` written as `--`, which Hub ids cannot contain. Names of local backbones
end in `--` and the start of their fingerprint, and are used unchanged. An id that would share its
folder with another one is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError, RegistryError
from adapterhub.files.native import PEFT_FILES, find_adapter
from adapterhub.files.run_folder import names_in

_MOST_FOLDERS = 2_000  # folders to inspect for a hint in an error
_MOST_FOUND = 3


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter, including those in runs or of other libraries."""
    return find_adapter(folder) is not None or (folder / PEFT_FILES[0]).is_file()


def nearby_adapters(name: str) -> list[str]:
    """Return the folders with an adapter of this or a similar name, here or one folder below."""
    folders = {path: Path(path).name for path in islice(_folders(), _MOST_FOLDERS)}
    similar = difflib.get_close_matches(name, {*folders.values()}, n=_MOST_FOUND, cutoff=0.75)
    found = (path for near in similar for path in folders if folders[path] == near)
    return [*islice((path for path in found if holds_adapter(Path(path))), _MOST_FOUND)]


def _folders() -> Iterator[str]:
    """Yield the folders here and one level below, as a user would type them."""
    here = _subfolders(Path())
    yield from (f"./{name}" for name in here)
    for name in here:
        yield from (f"{name}/{inner}" for inner in _subfolders(Path(name)))


def _subfolders(folder: Path) -> list[str]:
    return [name.removesuffix("/") for name in names_in(folder) if name.endswith("/")]


ReferenceKind = Literal["folder", "local", "hub", "server"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}"
_LOOKS_LIKE_FOLDER = re.compile(r"\.{1,2}([/\\]|$)|[/~\\]|[A-Za-z]:[/\\]")
_BUCKETS = ("s3", "gs", "az", "abfss")
_REMOTE = re.compile(r"hf:|[A-Za-z][A-Za-z0-9+.-]*://")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_HUB = "https://huggingface.co"  # the host of hf:, and the only one known to support Xet
INDEX_FILE = "index.json"  # reserved: not allowed for a backbone's folder or an adapter
NAME_RULE = (
    "1 to 96 letters, digits and . _ -, starting with a letter or digit, not ending with a dot,"
    f" and not {INDEX_FILE}, nor a name that Windows reserves, such as con or nul.txt"
)
TAG = r"(?!v?[0-9]+$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
TAG_RULE = (
    "1 to 64 letters, digits and . _ -, starting with a letter or digit, and not a version number"
)
FORMS = "./folder, name[@version], hf:owner/name[@revision], https://host/owner/name[@revision]"


@dataclass(frozen=True)
class Reference:
    """The location of an adapter: `parse_reference(str(reference)) == reference`.

    `name` is a path for a folder and `owner/name` on a hub; `host` is the scheme and host of a
    self-hosted hub.
    """

    kind: ReferenceKind
    name: str
    version: str | None = None
    host: str | None = None

    def __str__(self) -> str:
        start = {"hub": "hf:", "server": f"{self.host}/"}.get(self.kind, "")
        return f"{start}{self.name}" + (f"@{self.version}" if self.version else "")


def is_loopback(hostname: str | None) -> bool:
    """Return whether a host is this machine, where http is as safe as https."""
    return hostname in _LOOPBACK


def is_remote(text: str) -> bool:
    """Return whether a text starts like a reference to a hub."""
    return _REMOTE.match(text) is not None


def is_bucket(location: object) -> bool:
    """Return whether a text is the URL of a bucket: s3://bucket/prefix, gs://..., az://..."""
    scheme, found, _ = str(location).partition("://")
    return bool(found) and scheme in _BUCKETS


def parse_reference(text: str) -> Reference:
    """Parse the text of a reference.

    Raises:
        ConfigError: the text has none of the four forms, or is ambiguous.
    """
    if not text or not text.isprintable() or text != text.strip():
        raise _error(text, "is not a reference")
    if _LOOKS_LIKE_FOLDER.match(text):
        return Reference("folder", text)
    if text.startswith("hf:"):
        return _parse_hub(text)
    if "://" in text:
        return _parse_server(text)
    return _parse_local(text)


def is_name(text: str) -> bool:
    """Return whether a text is a valid adapter name in a local registry."""
    is_word = ".." not in text and re.fullmatch(_NAME, text) is not None
    return is_word and not unportable(text) and not _is_reserved(text)


def is_repository(name: str) -> bool:
    """Return whether a text has the form `owner/name` of a repository on a hub."""
    return ".." not in name and re.fullmatch(rf"{_NAME}/{_NAME}", name) is not None


def is_version(text: str) -> bool:
    """Return whether a text may follow the @ of a reference: a version, tag, branch or commit."""
    return ".." not in text and re.fullmatch(_VERSION, text) is not None


def check_name(name: str) -> None:
    """Refuse a text that is not a valid adapter name in a local registry.

    Raises:
        ConfigError: the name has other characters, or is too long.
    """
    if not is_name(name):
        raise ConfigError(f"invalid adapter name {name!r}", expected=NAME_RULE, hint="--name NAME")


def check_tags(tags: Sequence[str]) -> None:
    """Refuse invalid tags.

    Raises:
        ConfigError: a tag has other characters, or is a version number or a reserved file name.
    """
    if invalid := [repr(tag) for tag in tags if not re.fullmatch(TAG, tag) or unportable(tag)]:
        raise ConfigError(
            "invalid tags",
            offenders=invalid,
            expected=f"{TAG_RULE}; not ending with a dot, and not a name that Windows reserves",
        )


def _parse_hub(text: str) -> Reference:
    name, version = _split(text, text.removeprefix("hf:"))
    if not is_repository(name):
        raise _error(text, "does not name a repository of the Hub", "hf:owner/name[@revision]")
    return Reference("hub", name, version)


def _parse_server(text: str) -> Reference:
    try:
        parts = urlsplit(text)
        hostname, host = parts.hostname, f"{parts.scheme}://{parts.netloc}"
        _ = parts.port  # raises ValueError unless it is a number
    except ValueError as error:
        raise _error(text, f"is not a valid URL: {error}") from None
    secure = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(hostname))
    if not hostname or not secure or not hostname.isascii():  # other spellings are ambiguous
        raise _error(text, "is not an https URL", "https://host/owner/name[@revision]")
    if parts.username is not None or parts.query or parts.fragment:
        # The part before @ may be a password: do not show it.
        shown = text.replace(f"{parts.netloc.rpartition('@')[0]}@", "")
        raise _error(shown, "has more than a host and a name", "https://host/owner/name")
    name, version = _split(text, parts.path.removeprefix("/"))
    if not is_repository(name):
        raise _error(text, "does not name an adapter", "https://host/owner/name[@revision]")
    return Reference("server", name, version, host)


def _parse_local(text: str) -> Reference:
    name, version = _split(text, text)
    if "/" in name or "\\" in name:
        hint = f"./{text} for a folder" + (
            f", hf:{text} for the Hub" if is_repository(name) else ""
        )
        raise _error(text, "could be a folder or a repository of the Hub", hint=hint)
    if not is_name(name):
        raise _error(text, "is not a valid adapter name", NAME_RULE)
    return Reference("local", name, version)


def _split(text: str, rest: str) -> tuple[str, str | None]:
    name, at, version = rest.partition("@")
    if at and not is_version(version):
        raise _error(text, f"has an invalid version after @: {version!r}")
    return name, version or None


def _error(text: str, problem: str, expected: str = FORMS, hint: str = "") -> ConfigError:
    return ConfigError(f"{text!r} {problem}", expected=expected, hint=hint)


_DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
}
_LOCAL_BACKBONE = re.compile(r".+--(?:[0-9a-f]{12}|no-weights)")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


def unportable(name: str) -> str:
    """Return the reason why a name is not valid for files on every system, or ""."""
    stem = name.partition(".")[0]
    if stem.casefold() in _DEVICES:
        return f"Windows reserves {stem!r} for a device"
    return "Windows drops a dot or space at the end" if name.endswith((".", " ")) else ""


def backbone_folder(backbone: str) -> str:
    """Return the name of the folder for a backbone's adapters; no two backbones share one.

    Raises:
        RegistryError: another backbone would have the same folder, or the name is not portable.
    """
    folder = folder_of_id(backbone)
    problem = unportable(folder)
    is_local = "/" not in backbone and "--" in backbone
    if "/" in backbone and "--" in backbone:
        problem = "an id of the Hub does not contain '--'"
    elif is_local != bool(_LOCAL_BACKBONE.fullmatch(folder)):
        other = folder.replace("--", "/", 1) if is_local else folder
        problem = f"they would share the folder {folder!r} with those of {other!r}"
    if _is_reserved(folder):
        problem = f"the name {INDEX_FILE} is that of a registry's index"
    if problem:
        raise RegistryError(
            f"adapters of the backbone {backbone!r} cannot be published: {problem}",
            expected="an id of the Hub, or a local name as `adapterhub` saves it",
            hint="load the backbone from the Hub, or from a folder with another name, and save the"
            " adapter again",
        )
    return folder


def folder_of_id(backbone: str) -> str:
    """Return the folder of a backbone's id, even if another backbone may share it."""
    return backbone.replace("/", "--")


def is_backbone_folder(name: str) -> bool:
    """Return whether a folder's name can belong to a backbone."""
    return ".." not in name and _FOLDER.fullmatch(name) is not None and not _is_reserved(name)


def _is_reserved(name: str) -> bool:
    """Return whether a name would collide with an index on some file system."""
    return name.casefold() == INDEX_FILE
