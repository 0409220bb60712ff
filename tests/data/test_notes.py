"""Notes on the data: exact figures, one line each, a handful at most."""

from __future__ import annotations

import pytest

from adapterhub.data.examples import Example, notes_on


def rows(*labels: str, text: str = "text") -> list[Example]:
    return [Example(f"{text} {i}", None, label) for i, label in enumerate(labels)]


def notes(train: list[Example], evaluation: list[Example] | None = None) -> tuple[str, ...]:
    labels = sorted({str(e.label) for e in train})
    return notes_on(train, evaluation or [], labels)


def test_good_data_has_no_notes() -> None:
    train = rows(*"ab" * 50)
    assert notes(train, rows(*"ab" * 5, text="other")) == ()


@pytest.mark.parametrize(
    ("train", "note"),
    [
        (
            rows(*map(str, range(1204))),
            "1,204 labels in 1,204 training rows: is it the right column? (--label)",
        ),
        (
            rows(*[str(i % 12) for i in range(120)]),
            "the 12 labels are all numbers: --task regression learns their size",
        ),
        (
            rows(*["ham"] * 95, *["spam"] * 5),
            "'ham' is the label of 95.0% of the 100 training rows: compare macro_f1, not accuracy",
        ),
        (rows(*"ab" * 50, "c", "d"), "2 labels have one training row: 'c', 'd'"),
        (rows(*"ab" * 50, "c"), "1 label has one training row: 'c'"),
        (
            [*rows(*"ab" * 50), Example("text 0", None, "b"), Example("text 1", None, "a")],
            "2 texts occur with different labels, in 4 training rows, such as 'text 0'",
        ),
        (
            [Example(f"t{i % 3} {'ab'[i % 2]}", None, "ab"[i % 2]) for i in range(60)],
            "only 6 of the 60 training texts are different",
        ),
        (
            [Example(f"{c} {i} is Sports or not", None, "sports") for i, c in enumerate("ab" * 30)]
            + rows("music", "music"),
            "96.8% of the training texts contain their label as a word",
        ),
    ],
)
def test_what_is_probably_not_intended_is_told(train: list[Example], note: str) -> None:
    assert note in notes(train)


def test_evaluation_rows_that_are_trained_on_are_counted() -> None:
    train = rows(*"ab" * 50)
    evaluation = [*train[:3], *rows(*"ab" * 10, text="other")]
    assert notes(train, evaluation) == (
        "3 of 23 evaluation rows (13.0%) are also training rows: the scores are too good",
    )


def test_only_classes_have_notes_on_labels() -> None:
    numbers = [Example(f"text {i}", None, i / 7) for i in range(100)]
    assert notes_on(numbers, [], ()) == ()


def test_there_are_at_most_five_short_lines_without_control_characters() -> None:
    train = [
        Example("same \x1b[31m" + "x" * 500, None, f"\x1b{'y' * 300}{i % 3}") for i in range(90)
    ]
    found = notes([*train, *rows(*"ab" * 9)], train)
    assert 0 < len(found) <= 5
    assert all(len(note) < 250 and "\x1b" not in note for note in found)
