"""Delimited text as a table."""

from __future__ import annotations

import pytest

from adapterhub.data.delimited import DecodedText, detect_dialect, expected_columns, read_delimited
from adapterhub.data.options import DataOptions
from adapterhub.data.table import Table
from adapterhub.errors import DataError


def read(text: str, kind: str = "csv", **options: object) -> Table:
    return read_delimited("a.csv", kind, DecodedText(text), DataOptions(**options))  # type: ignore[arg-type]


def test_semicolons_and_decimal_commas() -> None:
    table = read("text;score\ngood, clean;1,5\nbad;0,5\n")
    assert table.form == "semicolon-separated"
    assert table.decimal_comma
    assert list(table.take(["score"])[0]) == ["1,5", "0,5"]


def test_the_first_line_of_excel_names_the_delimiter() -> None:
    table = read("sep=|\ntext|label\none, two|1\n")
    assert (table.columns, list(table.lines)) == (("text", "label"), [3])


def test_options_win_over_what_is_detected() -> None:
    assert read("text;label\na;1\n", delimiter="|").columns == ("text;label",)
    table = read("text,label\nx,y\n", header=False)
    assert table.columns == ("0", "1")
    assert list(table.take(["0"])[0]) == ["text", "x"]
    assert "no header" in table.form


def test_a_header_in_doubt_is_told_with_what_to_type() -> None:
    (note,) = read("abc,def\nghi,jkl\n").notes
    assert note == (
        "the first line was taken to name the columns; data.header=false if that is wrong"
    )


def test_a_first_line_in_doubt_is_data_if_it_lacks_the_recorded_columns() -> None:
    options = DataOptions(text="review")
    for text in ("a good film\n", "a good film\nanother one\n", "abc,def\nghi,jkl\n"):
        assert not detect_dialect(text, "csv", None, options, recorded=True).header
        assert detect_dialect(text, "csv", None, options).header
    assert detect_dialect("review\nabc\n", "csv", None, options, recorded=True).header


def test_names_of_templates_are_expected_in_the_header() -> None:
    options = DataOptions(text="{a}. {b}", pair="c", label="1", choices=("x", "y"))
    assert expected_columns(options) == {"a", "b", "c", "x", "y"}
    assert detect_dialect("a,b\nc,d\n", "csv", None, options).header


def test_a_wrong_number_of_fields_says_what_to_type() -> None:
    with pytest.raises(DataError, match="line 2: 3 fields") as error:
        read("text,label\nhello, world,1\nfoo,0\n")
    assert "separated by one comma each" in error.value.expected
    assert "data.quoted=false" in error.value.hint


def test_quotes_of_a_tsv_are_text_or_not() -> None:
    plain = read('text\tlabel\n" a\t1\nb\t0\n', "tsv")
    assert list(plain.take(["text"])[0]) == ['" a', "b"]
    quoted = read('text\tlabel\n"a\tb"\t1\n', "tsv")
    assert list(quoted.take(["text"])[0]) == ["a\tb"]
