"""What a registry has of one name, and `names.json`: its tags and yanked versions.

    {"highest": 2, "tags": {"best": "v1"}, "yanked": {"v2": "trained on the dev set"}}

`highest` is the highest version ever published, so that the number of a deleted version is never
used again; files of earlier releases have no such field.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

from adapterhub.config.options import from_file, option
from adapterhub.errors import ConfigError, FileError
from adapterhub.files import schema
from adapterhub.registry.reference import TAG, TAG_RULE
from adapterhub.registry.store import MOST_VERSIONS, Entry, version_number

NAMES_FILE = "names.json"
# Room for 10,000 tags; a longer file is read by nobody and only delays every command.
MAX_NAMES_BYTES = 1 << 20
_Tag = Annotated[str, schema.text(TAG, f"a tag: {TAG_RULE}")]
_Version = Annotated[str, schema.text(r"v[1-9][0-9]{0,8}", "a version: v1, v2, ...")]
# The longest reason is as long as the longest description of an adapter.
_Reason = Annotated[str, schema.text(r"(?s).{0,2000}", "a reason")]


@dataclass
class Names:
    """The contents of `names.json`: version by tag, reason by yanked version, highest version."""

    tags: dict[_Tag, _Version] = field(default_factory=dict)
    yanked: dict[_Version, _Reason] = field(default_factory=dict)
    highest: Annotated[int, schema.integer(0, MOST_VERSIONS)] = option(0, omitted=True)

    def without(self, version: str) -> Names:
        """Return the names after a version is deleted."""
        tags = {tag: at for tag, at in self.tags.items() if at != version}
        yanked = {at: reason for at, reason in self.yanked.items() if at != version}
        return Names(tags, yanked, self.highest)


@dataclass(frozen=True)
class Contents:
    """What can be read of one name.

    `entries` are the versions, oldest first. `broken` has the error of each other one by its
    number. If `names.json` cannot be read, `broken` has only its error, and there are no entries.
    `words` has what a text search covers of a version (`word_text`), if it is more than the entry.
    """

    entries: list[Entry]
    broken: dict[str, FileError]
    names: Names = field(default_factory=Names)
    words: dict[str, str] = field(default_factory=dict)

    def raise_broken(self, name: str, version: str | None) -> None:
        """Raise the error of the version that a reference means, if it cannot be read.

        Without a number or tag, it means the newest version that is not yanked.

        Raises:
            FileError: that version, or what decides which one it is, cannot be read.
        """
        if NAMES_FILE in self.broken:
            raise self.broken[NAMES_FILE]
        number = version_number(version or "")
        available = {*self.broken, *(entry.version for entry in self.entries)}
        if version is None:
            newest = max(
                available - self.names.yanked.keys(),
                key=lambda each: version_number(each) or 0,
                default="",
            )
            if newest in self.broken:
                problem = self.broken[newest]
                raise FileError(
                    f"the newest version, {name}@{newest}, cannot be read: {problem.problem}",
                    hint=f"restore it, remove its folder, or name another version: {name}@v1",
                    offenders=problem.offenders,
                )
        elif error := self.broken.get(f"v{number}" if number else self.names.tags.get(version, "")):
            raise error


def parse_names(data: bytes, source: str) -> Names:
    """Parse the contents of `names.json`; `source` names the file in errors.

    Raises:
        FileError: they are not valid.
    """
    names, problems = schema.parse_record(Names, data, MAX_NAMES_BYTES)
    if names is None:
        raise FileError(
            f"{source} cannot be read",
            expected='{"tags": {TAG: VERSION}, "yanked": {VERSION: REASON}}',
            hint="restore it, or delete it; tags and yanks are then lost, versions are not",
            offenders=schema.shorten(problems),
        )
    return names


def names_bytes(names: Names, name: str) -> bytes:
    """Return the contents of `names.json` of the adapter `name`.

    Raises:
        ConfigError: a reader would refuse them.
    """
    _, problems = from_file(Names, names)
    if not problems and len(data := schema.canonical_json(asdict(names))) > MAX_NAMES_BYTES:
        problems.append(f"{len(data)} bytes, more than {MAX_NAMES_BYTES}")
    if problems:
        raise ConfigError(f"invalid tags or yanks of {name}", offenders=schema.shorten(problems))
    return data
