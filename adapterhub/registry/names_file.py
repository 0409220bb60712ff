"""`names.json`: the tags and yanked versions of one name in a registry.

    {"highest": 2, "tags": {"best": "v1"}, "yanked": {"v2": "trained on the dev set"}}

`highest` is the highest version ever published, so that the number of a deleted version is never
used again; files of earlier releases have no such field.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from adapterhub.errors import ConfigError, FileError
from adapterhub.files import schema
from adapterhub.registry.reference import TAG, TAG_RULE
from adapterhub.registry.store import MOST_VERSIONS

NAMES_FILE = "names.json"
# Room for 10,000 tags; a longer file is read by nobody and only delays every command.
MAX_NAMES_BYTES = 1 << 20
_version = schema.text(r"v[1-9][0-9]{0,8}", "a version: v1, v2, ...")
_SCHEMA = schema.record(
    {
        "highest": schema.integer(0, MOST_VERSIONS),
        "tags": schema.mapping(schema.text(TAG, f"a tag: {TAG_RULE}"), _version),
        # The longest reason is as long as the longest description of an adapter.
        "yanked": schema.mapping(_version, schema.text(r"(?s).{0,2000}", "a reason")),
    }
)


@dataclass
class Names:
    """The contents of `names.json`: version by tag, reason by yanked version, highest version."""

    tags: dict[str, str] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    highest: int = 0

    def without(self, version: str) -> Names:
        """Return the names after a version is deleted."""
        tags = {tag: at for tag, at in self.tags.items() if at != version}
        yanked = {at: reason for at, reason in self.yanked.items() if at != version}
        return Names(tags, yanked, self.highest)


def parse_names(data: bytes, source: str) -> Names:
    """Parse the contents of `names.json`.

    Args:
        data: its bytes.
        source: the name of the file, for the error message.

    Raises:
        FileError: they are not valid.
    """
    tree, problems = schema.parse_object(data, MAX_NAMES_BYTES)
    tree = {"highest": 0, **tree}
    if problems := problems or _SCHEMA("", tree):
        raise _broken(source, problems)
    return Names(tree["tags"], tree["yanked"], tree["highest"])


def names_bytes(names: Names, name: str) -> bytes:
    """Return the contents of `names.json`.

    Args:
        names: the tags and yanks.
        name: the adapter's name, for the error message.

    Raises:
        ConfigError: a reader would refuse them.
    """
    tree: dict[str, Any] = asdict(names)
    problems = _SCHEMA("", tree)
    if not problems and len(data := schema.canonical_json(tree)) > MAX_NAMES_BYTES:
        problems.append(f"{len(data)} bytes, more than {MAX_NAMES_BYTES}")
    if problems:
        raise ConfigError(f"invalid tags or yanks of {name}", offenders=schema.shorten(problems))
    return data


def _broken(source: str, problems: list[str]) -> FileError:
    return FileError(
        f"{source} cannot be read",
        expected='{"tags": {TAG: VERSION}, "yanked": {VERSION: REASON}}',
        hint="restore it, or delete it; tags and yanks are then lost, versions are not",
        offenders=schema.shorten(problems),
    )
