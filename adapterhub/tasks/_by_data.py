"""The task that the form of a table means, where a recipe names none.

One rule each, tried in this order: what nobody writes for another task comes first. What no rule
knows is classification, which says what to type where it cannot read the data either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from adapterhub.data import column_names as names
from adapterhub.data.chat_formats import recognize_format
from adapterhub.data.column_names import plain_name
from adapterhub.data.columns import ColumnProfile, profile_of, switches
from adapterhub.data.media_formats import PICTURE_SUFFIXES, SOUND_SUFFIXES
from adapterhub.data.options import DataOptions, separator_of
from adapterhub.data.table import Table

DEFAULT = "classification"
Profiles = Mapping[str, ColumnProfile]
"""What each column contains, by its name in small letters without punctuation."""


def task_by_data(table: Table, options: DataOptions) -> tuple[str, str]:
    """Return the name of a task, and what of the data says so; "" if it is the default.

    Columns that the user names are looked at alone: another one may have a usual name, too.
    """
    named = {options.text, options.pair, options.label} - {None}
    columns = [c for c in dict.fromkeys(table.columns) if not named or c in named]
    profiles = {plain_name(column): profile_of(table, column) for column in columns}
    found = next(_tasks(table, profiles, options), (DEFAULT, ""))
    # Names of labels are for tasks with labels.
    return found if options.labels is None or found[0] in _LABELLED else (DEFAULT, "")


_LABELLED = ("multi-label", "tagging", "image-classification", "audio-classification")


def _tasks(table: Table, profiles: Profiles, options: DataOptions) -> Iterator[tuple[str, str]]:
    """Yield each task whose rule fits, with its reason."""
    better, worse = _named(profiles, names.PREFERRED), _named(profiles, names.REJECTED)
    if better and worse:
        yield "preference", f"{better.name!r} beside {worse.name!r}"
    chats = recognize_format(table) if options.text is None and options.label is None else None
    if chats is not None:
        yield "causal-lm", chats.name
    if "paragraphs" in profiles and all(
        "qas" in p for v in profiles["paragraphs"].values for p in v
    ):
        yield "question-answering", "paragraphs with questions and answers"
    answers = _named(profiles, names.ANSWERS)
    if answers and answers.is_answers and _named(profiles, names.CONTEXTS):
        yield "question-answering", f"answers with their places in {answers.name!r}"
    tokens, tags = _named(profiles, names.TOKENS), _named(profiles, names.TAGS)
    if tokens and tags and tokens is not tags and tokens.is_words and tags.is_list:
        yield "tagging", f"a list of words in {tokens.name!r} and of tags in {tags.name!r}"
    choices = _named(profiles, names.CHOICES)
    if choices and choices.is_words and _named(profiles, names.CHOSEN):
        yield "multiple-choice", f"lists of choices in {choices.name!r}"
    yield from _files(profiles)
    usual = plain_name(options.label or "label")
    several = [] if usual in profiles else switches(profiles.values())
    if len(several) > 1:  # `toxic` is one of them, not the label
        profiles = {name: p for name, p in profiles.items() if p.name not in several}
    label = _named(profiles, ((usual,), ("tags", "topics"), *names.CLASSES))
    if len(several) > 1 and (label is None or not (label.is_words or label.could_be_class)):
        yield "multi-label", f"columns of 1 and 0: {', '.join(several)}"
    joined = [p for p in profiles.values() if p.is_joined]
    label = label or (joined[0] if len(joined) == 1 else None)
    if label and label.is_words:
        yield "multi-label", f"lists of labels in {label.name!r}"
    if label and (mark := separator_of(label.texts)):
        yield "multi-label", f"labels joined by {mark!r} in {label.name!r}"


def _files(profiles: Profiles) -> Iterator[tuple[str, str]]:
    for profile in (p for p in profiles.values() if p.is_files):
        paths = (v["path"] if isinstance(v, dict) else v for v in profile.values)
        ends = {Path(str(path)).suffix.lower() for path in paths}
        if ends <= {*PICTURE_SUFFIXES}:
            yield "image-classification", f"pictures in {profile.name!r}"
        if ends <= {*SOUND_SUFFIXES}:
            spoken = _named(profiles, names.TRANSCRIPTS)
            words = spoken is not None and spoken.is_text
            task = "speech-recognition" if words else "audio-classification"
            yield task, f"sounds in {profile.name!r}"


def _named(profiles: Profiles, tiers: Iterable[Iterable[str]]) -> ColumnProfile | None:
    """Return the column with the first of some usual names that has values."""
    usual = (profiles[name] for tier in tiers for name in tier if name in profiles)
    return next((profile for profile in usual if profile.values), None)
