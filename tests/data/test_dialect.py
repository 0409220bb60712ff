"""The dialect of a text: delimiter, header, quotes."""

from __future__ import annotations

import csv
import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.delimited import find_delimiter, find_header, looks_quoted, prefix_rows

_TEXT = "the movie was really good bad boring wonderful actors plot and never again"
WORDS = _TEXT.split()


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    ends = (".", "!", ", yes.", "; hm.", ' "so" it is.', " | no.")
    return [
        " ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + draw.choice(ends)
        for _ in range(count)
    ]


def written(rows: list[tuple[str, ...]], delimiter: str) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=delimiter).writerows(rows)
    return buffer.getvalue()


def labelled(count: int = 40, labels: tuple[str, ...] = ("pos", "neg")) -> list[tuple[str, str]]:
    return [(text, labels[i % len(labels)]) for i, text in enumerate(sentences(count))]


@pytest.mark.parametrize("delimiter", list(",;\t|"))
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_delimiter_and_header_are_found(delimiter: str, header: bool, seed: int) -> None:
    rows = [(text, ["neg", "pos"][i % 2]) for i, text in enumerate(sentences(40, seed))]
    text = written([*([("Review", "Sentiment")] * header), *rows], delimiter)
    assert find_delimiter(text, ",") == delimiter
    assert find_header(prefix_rows(text, delimiter, True)) == (header, True)


def test_decimal_commas_do_not_separate() -> None:
    rows = [(text.replace(",", ""), f"{i % 5},{i % 10}") for i, text in enumerate(sentences(30))]
    text = "".join(f"{a.replace(';', '')};{b}\n" for a, b in rows)
    assert find_delimiter(text, ",") == ";"
    assert find_delimiter(f"text;score\n{text}", ",") == ";"


def test_lines_of_text_are_no_table() -> None:
    assert find_delimiter("\n".join(sentences(50)), None) is None
    assert find_delimiter("one, two\nthree, four\n", None) is None
    assert find_delimiter("Good, but long.\n" * 3 + "Bad, and short.\n" * 3, None) is None


@pytest.mark.parametrize(("delimiter", "rows"), [("\t", 3), (";", 8), ("|", 8), (",", 8)])
def test_plain_text_with_columns_is_a_table(delimiter: str, rows: int) -> None:
    lines = [f"a text of {i} words{delimiter}{'pn'[i % 2]}" for i in range(rows)]
    assert find_delimiter("\n".join(lines), None) == delimiter
    assert find_delimiter("\n".join([f"text{delimiter}label", *lines[:1]]), None) == delimiter


HEADERS = {
    "v1,v2 over classes and texts": ([("v1", "v2")], [(b, a) for a, b in labelled()], True),
    "names of a survey": (
        [("What did you like about the course in general?", "Would you recommend it?")],
        labelled(labels=("Yes", "No")),
        True,
    ),
    "numbers of columns": ([("0", "1")], labelled(), True),
    "an index without a name": (
        [("", "text", "label")],
        [(str(i), a, b) for i, (a, b) in enumerate(labelled())],
        True,
    ),
    "a number above numbers": (
        [("4", "a line that is long enough to be a text of its own")],
        [(str(i % 5), text) for i, text in enumerate(sentences(40))],
        False,
    ),
    "an empty cell inside": ([("gj04", "1", "", "Good.")], [("gj04", "1", "", "Bad.")] * 9, False),
    "names of classes as labels": (
        [("The label was great.", "label")],
        labelled(labels=("label", "text")),
        False,
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_the_first_line_names_columns_or_not(case: str) -> None:
    first, rows, expected = HEADERS[case]
    assert find_header([list(row) for row in (*first, *rows)])[0] is expected


def test_names_that_are_asked_for_decide() -> None:
    rows = [["abc", "def"], ["ghi", "jkl"]]
    assert find_header(rows, {"def"}) == (True, True)
    assert find_header(rows)[1] is False


@given(st.text(), st.sampled_from([",", "\t", None]))
def test_any_text_has_some_dialect(text: str, usual: str | None) -> None:
    delimiter = find_delimiter(text, usual) or ","
    rows = prefix_rows(text, delimiter, looks_quoted(text, delimiter))
    if rows:
        find_header(rows)


@given(st.lists(st.lists(st.text('ab \t;"\n'), min_size=2, max_size=2), min_size=1))
def test_fields_that_a_writer_quotes_are_seen_as_quoted(rows: list[list[str]]) -> None:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=";", quoting=csv.QUOTE_ALL).writerows(rows)
    assert looks_quoted(buffer.getvalue(), ";")


def test_only_a_beginning_is_read() -> None:
    text = "text;label\n" + "a good film;1\n" * 100_000
    rows = prefix_rows(text, ";", True)
    assert len(rows) <= 200
    assert rows[-1] == ["a good film", "1"]
