"""Notes on the examples of a run: what is probably not intended, with exact figures, a line each.

The first few are shown; the order is that of their weight.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

from adapterhub.data.split import content_of
from adapterhub.errors import one_line

_MOST_NOTES = 5
_MANY_LABELS = 100
_MAJORITY = 0.9  # share of one label from which on accuracy says little
_NAMED = 3  # labels or texts that a note names
_SHOWN = 40  # characters
ENOUGH_FOR_SCORES = 30  # rows: the interval of a share is wider than a third of all with fewer
_ENOUGH = 20  # rows: fewer are a try, not data
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?")


def notes_on(
    train: Sequence[Any], evaluation: Sequence[Any], labels: Sequence[str]
) -> tuple[str, ...]:
    """Return what a user should know about the data before training, at most five lines.

    `labels` are the classes, or none if the task has no classes.
    """
    single = bool(labels) and all(isinstance(getattr(e, "label", None), str) for e in train)
    contents = [content_of(example) for example in train]
    notes = [
        *(_about_labels(train) if single and len(train) >= _ENOUGH else ()),
        *_about_shared(set(contents), evaluation),
        *(_about_conflicts(contents, train) if single else ()),
        *(_about_contents(train) if single and len(train) >= _ENOUGH else ()),
    ]
    return tuple(notes[:_MOST_NOTES])


def notes_on_test(train: Sequence[Any], tested: Sequence[Any], labels: Sequence[str]) -> list[str]:
    """Return what a user should know of test rows: that some are among the training rows."""
    found = notes_on(train, tested, labels)
    return [note.replace("evaluation", "test") for note in found if "evaluation" in note]


def notes_on_scores(
    rows: int, labels: Collection[object], what: str = "evaluation", more: str = ""
) -> list[str]:
    """Say why the scores of some rows say little: they are few, or all of one class.

    Args:
        rows: the number of rows.
        labels: the classes that they have; empty if they have no classes.
        what: what the rows are for.
        more: what is typed for a file of more of them.
    """
    notes = []
    if rows < ENOUGH_FOR_SCORES:
        number = _count(rows, f"{what} row", f"{what} rows")
        better = f"{more}, or more rows" if more else "evaluate on more"
        notes.append(f"{number}: the scores say little; {better}")
    if rows > 1 and len(set(labels)) == 1:
        label = _quoted(str(next(iter(labels))))
        notes.append(
            f"all {rows:,} {what} rows are of one class, {label}: the scores say nothing of others"
        )
    return notes


def classes_in(examples: Sequence[Any], labels: Sequence[str]) -> set[str]:
    """Return which classes some examples have; none if each has no class, or several."""
    found = [getattr(example, "label", None) for example in examples] if labels else []
    return {label for label in found if isinstance(label, str)}


def _about_labels(train: Sequence[Any]) -> Iterator[str]:
    counts = Counter(example.label for example in train)
    rows = f"{len(train):,} training rows"
    if len(counts) > _MANY_LABELS or len(counts) > len(train) / 3:
        yield f"{len(counts):,} labels in {rows}: is it the right column? (--label)"
        return
    if len(counts) > 10 and all(map(_NUMBER.fullmatch, counts)):
        yield f"the {len(counts):,} labels are all numbers: --task regression learns their size"
    label, count = counts.most_common(1)[0]
    if count > _MAJORITY * len(train) and len(counts) > 1:
        yield (
            f"{_quoted(label)} is the label of {count / len(train):.1%} of the {rows}: "
            "compare macro_f1, not accuracy"
        )
    if once := [label for label, count in counts.items() if count == 1]:
        yield f"{_count(len(once), 'label has', 'labels have')} one training row: {_few(once)}"


def _about_shared(seen: set[Hashable], evaluation: Sequence[Any]) -> Iterator[str]:
    shared = sum(content_of(example) in seen for example in evaluation)
    if shared:
        yield (
            f"{shared:,} of {len(evaluation):,} evaluation rows ({shared / len(evaluation):.1%}) "
            "are also training rows: the scores are too good"
        )


def _about_conflicts(contents: Sequence[Hashable], train: Sequence[Any]) -> Iterator[str]:
    rows = Counter(contents)
    labels: dict[Hashable, set[str]] = defaultdict(set)
    for content, example in zip(contents, train, strict=True):
        if rows[content] > 1:
            labels[content].add(example.label)
    conflicts = [content for content, each in labels.items() if len(each) > 1]
    if conflicts:
        number = list(contents).index(conflicts[0])
        kind, shown = _named(train[number], conflicts[0])
        words = _count(len(conflicts), f"{kind} occurs", f"{kind}s occur")
        yield (
            f"{words} with different labels, in {sum(rows[c] for c in conflicts):,} training rows, "
            f"such as {_quoted(shown)}"
        )


def _named(example: Any, content: Hashable) -> tuple[str, str]:
    """Return what an example is, a text or a file, and the text or the name of the file."""
    name = getattr(example, "name", None)
    return ("text", str(content[0])) if name is None else ("file", name)  # type: ignore[index]


def _about_contents(train: Sequence[Any]) -> Iterator[str]:
    texts = [example.text for example in train if hasattr(example, "text")]
    if not texts:
        return
    distinct = len(set(texts))
    if distinct < len(texts) / 2:
        yield f"only {distinct:,} of the {len(texts):,} training texts are different"
    words = [example.label for example in train]
    if min(map(len, set(words))) >= 4 and not any(map(_NUMBER.fullmatch, set(words))):
        told = sum(w.lower() in text.lower() for w, text in zip(words, texts, strict=True))
        if told > _MAJORITY * len(texts):
            yield f"{told / len(texts):.1%} of the training texts contain their label as a word"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(_quoted, names[:_NAMED])) + more


def _quoted(text: str) -> str:
    return f"'{one_line(text, _SHOWN)}'"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
