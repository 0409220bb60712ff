"""Tag schemes: the ways that tags of words form entities in published data.

    bio      B-x begins an entity, I-x continues it (IOB2)
    iob1     I-x, and B-x if an entity follows another one of its kind
    io       only I-x: adjacent entities of one kind are merged
    bioes    B-x, I-x, E-x at the end, and S-x for an entity of one word
    bilou    the same with L-x and U-x
    kinds    only x: as io, without a prefix
    plain    no entities: a tag for each word, such as a part of speech

O is outside any entity. Ramshaw & Marcus 1995, https://arxiv.org/abs/cmp-lg/9505040; Ratinov &
Roth 2009, https://aclanthology.org/W09-1119.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from adapterhub.data.table import first_few
from adapterhub.data.tables import BIO_TAG
from adapterhub.errors import DataError

Scheme: TypeAlias = Literal["auto", "bio", "iob1", "io", "bioes", "bilou", "kinds", "plain"]
Span: TypeAlias = tuple[str, int, int]
"""The kind of an entity, its first word, and the word after its last one."""

OUTSIDE = "O"
_PREFIXES = {"bio": "BI", "iob1": "BI", "io": "I", "bioes": "BIES", "bilou": "BILU"}
_BEGINS, _ENDS = "BSU", "ESLU"


def scheme_of(sentences: Iterable[Sequence[str]]) -> Scheme:
    """Return the scheme of the tags of sentences; bio, which rejects them, if none fits.

    Raises:
        DataError: the tags have no prefixes, but O: they may be entities or plain tags.
    """
    rows = list(sentences)
    tags = {tag for row in rows for tag in row} - {OUTSIDE}
    prefixes = {tag[0] for tag in tags if BIO_TAG.fullmatch(tag)}
    if any(tag.isdecimal() for tag in tags):
        return "bio"  # numbers without a name
    if tags and not prefixes:
        if not any(OUTSIDE in row for row in rows):
            return "plain"
        raise DataError(
            "the tags have no prefixes, such as B- and I-, and some are O",
            offenders=first_few(sorted(tags)),
            expected="scheme=kinds, if they are of entities, or scheme=plain",
            hint='--task "tagging(scheme=kinds)"',
        )
    if prefixes & set("ES"):
        return "bioes"
    if prefixes & set("LU"):
        return "bilou"
    if prefixes == {"I"}:
        return "io"
    return "iob1" if fits(rows, "iob1") and not fits(rows, "bio") else "bio"


def fits(sentences: Iterable[Sequence[str]], scheme: Scheme) -> bool:
    """Return whether all tags belong to a scheme."""
    return not any(tag_problems(tags, scheme) for tags in sentences)


def tag_problems(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """List the errors in the tags of a sentence: their form or their order."""
    if scheme in ("plain", "kinds"):
        return [f"token {n}: the tag is empty" for n, t in enumerate(tags, start=1) if not t]
    prefixes = _PREFIXES[scheme]
    form = re.compile(rf"O|[{prefixes}]-\S+")
    names = ", ".join(f"{prefix}-kind" for prefix in prefixes[:-1])
    allowed = f"O{', ' * bool(names)}{names} or {prefixes[-1]}-kind"
    if wrong := [
        f"token {n}: the tag {tag!r} is not {allowed}"
        for n, tag in enumerate(tags, start=1)
        if not form.fullmatch(tag)
    ]:
        return wrong
    right = written(spans(tags, scheme), len(tags), scheme)
    around = [OUTSIDE, *tags, OUTSIDE]
    problems = []
    for n, (tag, want) in enumerate(zip(tags, right, strict=True), start=1):
        begins = scheme in ("bio", "iob1") or (want[0] in _BEGINS and tag[0] not in _BEGINS)
        if tag != want and begins:
            problems.append(f"token {n}: {tag!r} cannot follow {around[n - 1]!r}")
        elif tag != want:
            problems.append(f"token {n}: {tag!r} cannot stand before {around[n + 1]!r}")
    return problems


def spans(tags: Sequence[str], scheme: Scheme) -> list[Span]:
    """List the entities that tags form; for plain tags, each word.

    A continuing tag without an entity of its kind begins one, as in conlleval and in seqeval's
    default mode. An empty tag marks a word that was not read.
    """
    if scheme == "plain":
        return [(tag, n, n + 1) for n, tag in enumerate(tags) if tag]
    spans: list[Span] = []
    open_kind = ""
    for n, tag in enumerate(tags):
        prefix, kind = ("I", tag) if scheme == "kinds" else (tag[:1], tag[2:])
        if tag == OUTSIDE:
            open_kind = ""
            continue
        if prefix in _BEGINS or kind != open_kind:
            spans.append((kind, n, n + 1))
        else:
            spans[-1] = (kind, spans[-1][1], n + 1)
        open_kind = "" if prefix in _ENDS else kind
    return spans


def written(entities: Sequence[Span], words: int, scheme: Scheme) -> list[str]:
    """Return the tags of a sentence of `words` words with the given entities."""
    tags = ["" if scheme == "plain" else OUTSIDE] * words
    before: Span = ("", 0, -1)
    for kind, start, end in entities:
        touches = before[2] == start and before[0] == kind
        for n in range(start, end):
            prefix = _prefix(n == start, n == end - 1, touches, scheme)
            tags[n] = f"{prefix}-{kind}" if prefix else kind
        before = (kind, start, end)
    return tags


def _prefix(first: bool, last: bool, touches: bool, scheme: Scheme) -> str:
    if scheme in ("plain", "kinds"):
        return ""
    if scheme in ("bioes", "bilou"):
        end, single = ("E", "S") if scheme == "bioes" else ("L", "U")
        return (single if last else "B") if first else (end if last else "I")
    return "B" if first and (scheme == "bio" or (scheme == "iob1" and touches)) else "I"
