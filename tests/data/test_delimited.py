"""Delimited text as a table: its bytes, encoding and dialect."""

import contextlib
import csv
import io
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapterhub.data import delimited
from adapterhub.data.delimited import decode_file, decode_text, find_delimiter
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError


def read(text, kind="csv", **options):
    return delimited.read_delimited(
        "a.csv", kind, delimited.DecodedText(text), DataOptions(**options)
    )


READ = [  # text, kind, options, and the columns by name
    ("text;score\ngood, clean;1,5\nbad;0,5\n", "csv", {},
     {"text": ["good, clean", "bad"], "score": ["1,5", "0,5"]}),
    ("sep=|\ntext|label\none, two|1\n", "csv", {}, {"text": ["one, two"], "label": ["1"]}),
    ("text;label\na;1\n", "csv", {"delimiter": "|"}, {"text;label": ["a;1"]}),
    ("text,label\nx,y\n", "csv", {"header": False}, {"0": ["text", "x"], "1": ["label", "y"]}),
    ('text\tlabel\n" a\t1\nb\t0\n', "tsv", {}, {"text": ['" a', "b"], "label": ["1", "0"]}),
    ('text\tlabel\n"a\tb"\t1\n', "tsv", {}, {"text": ["a\tb"], "label": ["1"]}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "options", "expected"), READ)
def test_a_dialect_is_detected_unless_it_is_given(text, kind, options, expected):
    table = read(text, kind, **options)
    assert {name: list(table.take([name])[0]) for name in table.columns} == expected
    assert table.lines[0] == {"sep=|": 3}.get(text.partition("\n")[0], 2 - ("header" in options))


def test_a_first_line_in_doubt_is_data_if_it_lacks_the_recorded_columns():
    options = DataOptions(text="review")
    for text in ("a good film\n", "a good film\nanother one\n", "abc,def\nghi,jkl\n"):
        assert not delimited.detect_dialect(text, "csv", None, options, recorded=True).header
        assert delimited.detect_dialect(text, "csv", None, options).header
    assert delimited.detect_dialect("review\nabc\n", "csv", None, options, recorded=True).header
    names = DataOptions(text="{a}. {b}", pair="c", label="1", choices=("x", "y"))
    assert delimited.expected_columns(names) == {"a", "b", "c", "x", "y"}, "of a template"
    assert delimited.detect_dialect("a,b\nc,d\n", "csv", None, names).header


def test_a_wrong_number_of_fields_says_what_to_type():
    with pytest.raises(DataError, match="line 2: 3 fields") as error:
        read("text,label\nhello, world,1\nfoo,0\n")
    assert "separated by one comma each" in error.value.expected
    assert "data.quoted=false" in error.value.hint


# The dialect of a text: delimiter, header, quotes.


_TEXT = "the movie was really good bad boring wonderful actors plot and never again"
WORDS = _TEXT.split()


def sentences(count, seed=0):
    draw = random.Random(seed)
    ends = (".", "!", ", yes.", "; hm.", ' "so" it is.', " | no.")
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + draw.choice(ends)
            for _ in range(count)]  # fmt: skip


def labelled(count=40, labels=("pos", "neg")):
    return [(text, labels[i % len(labels)]) for i, text in enumerate(sentences(count))]


@pytest.mark.parametrize("delimiter", list(",;\t|"))
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_delimiter_and_header_are_found(delimiter, header, seed):
    rows = [(text, ["neg", "pos"][i % 2]) for i, text in enumerate(sentences(40, seed))]
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter)
    writer.writerows([*([("Review", "Sentiment")] * header), *rows])
    text = buffer.getvalue()
    assert find_delimiter(text, ",") == delimiter
    assert delimited.find_header(delimited.prefix_rows(text, delimiter, True)) == (header, True)


def test_lines_of_text_are_no_table():
    assert find_delimiter("\n".join(sentences(50)), None) is None
    assert find_delimiter("one, two\nthree, four\n", None) is None
    assert find_delimiter("Good, but long.\n" * 3 + "Bad, and short.\n" * 3, None) is None


@pytest.mark.parametrize(("delimiter", "rows"), [("\t", 3), (";", 8), ("|", 8), (",", 8)])
def test_plain_text_with_columns_is_a_table(delimiter, rows):
    lines = [f"a text of {i} words{delimiter}{'pn'[i % 2]}" for i in range(rows)]
    assert find_delimiter("\n".join(lines), None) == delimiter
    assert find_delimiter("\n".join([f"text{delimiter}label", *lines[:1]]), None) == delimiter


HEADERS = {
    "v1,v2 over classes and texts": ([("v1", "v2")], [(b, a) for a, b in labelled()], True),
    "names of a survey": (
        [("What did you like about the course in general?", "Would you recommend it?")],
        labelled(labels=("Yes", "No")), True),
    "numbers of columns": ([("0", "1")], labelled(), True),
    "an index without a name": (
        [("", "text", "label")], [(str(i), a, b) for i, (a, b) in enumerate(labelled())], True),
    "a number above numbers": (
        [("4", "a line that is long enough to be a text of its own")],
        [(str(i % 5), text) for i, text in enumerate(sentences(40))], False),
    "an empty cell inside": ([("gj04", "1", "", "Good.")], [("gj04", "1", "", "Bad.")] * 9, False),
    "names of classes as labels": ([("The label was great.", "label")],
                                   labelled(labels=("label", "text")), False),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_the_first_line_names_columns_or_not(case):
    first, rows, expected = HEADERS[case]
    assert delimited.find_header([list(row) for row in (*first, *rows)])[0] is expected


@given(st.text(), st.sampled_from([",", "\t", None]))
@example("a;b\n1,5;2\n", None)  # decimal commas
def test_any_text_has_some_dialect(text, usual):
    found = find_delimiter(text, usual)
    assert found in {*delimited.DELIMITERS, usual}
    quoted = delimited.looks_quoted(text, found or ",")
    rows = delimited.prefix_rows(text, found or ",", quoted)
    if not quoted:
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        assert [(found or ",").join(row) for row in rows] == [line for line in lines if line]
    if rows:
        delimited.find_header(rows)


# Bytes and texts of files.


def test_a_text_is_utf8_unless_another_encoding_is_given(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("caf\u00e9".encode("cp1252"))
    with pytest.raises(DataError, match="not UTF-8"):
        delimited.read_text(str(file))
    assert delimited.read_text(str(file), "cp1252") == "caf\u00e9"
    assert delimited.file_text(str(file)).encoding == "cp1252"
    assert decode_text(b"\xef\xbb\xbfna\xc3\xafve\r\n", "x") == "na\u00efve\r\n"
    decoded = decode_file("\u0105\u0119 caf\u00e9".encode("iso8859-2"), "x", "iso8859-2")
    assert (decoded.text, decoded.sample) == ("\u0105\u0119 caf\u00e9", ""), "nothing is guessed"


@pytest.mark.parametrize("read", [delimited.read_text, delimited.file_text])
def test_an_empty_or_missing_file_is_refused(tmp_path, read):
    (tmp_path / "a.txt").write_text(" \n")
    for name, words in (("a.txt", "is empty"), ("b.txt", "no such file"), (".", "cannot read")):
        with pytest.raises(DataError, match=words):
            read(str(tmp_path / name))


# Text is UTF-8, or refused with the byte and the line; files may have other encodings.


WRONG = [
    (b"a\nna\xefve", "x, line 2, byte 5: 0xef is not UTF-8"),
    (b"\xef\xbb\xbf\xff", "x, line 1, byte 4: 0xff is not UTF-8"),
    (b"ab\xc3", "byte 3: 0xc3"),
    ("\ufeffab".encode("utf-16-le"), "x is UTF-16 text"),
    ("\ufeffab".encode("utf-16-be"), "x is UTF-16 text"),
    ("\ufeffab".encode("utf-32-le"), "x is UTF-32 text"),
    ("ab".encode("utf-16-le"), "x, line 1, byte 2: a NUL byte"),
    (b"a\n\0", "line 2, byte 3: a NUL byte"),
    (b"\xed\xa0\x80", "byte 1: 0xed"),
]


@pytest.mark.parametrize(("data", "words"), WRONG)
def test_another_encoding_is_refused(data, words):
    with pytest.raises(DataError) as error:
        decode_text(data, "x")
    assert words in str(error.value)
    assert "iconv -f" in str(error.value)


@given(st.binary(max_size=40))
def test_any_bytes_are_text_or_refused(data):
    for decode in (decode_text, lambda *args: decode_file(*args).text):
        with contextlib.suppress(DataError):
            assert "\0" not in decode(data, "x")


TEXTS = {
    "cp1252": ["na\u00efve",
        "Das Caf\u00e9 war sch\u00f6n, gro\u00dfartig \u2013 \u201etoll\u201c!",
        "it costs 5 \u20ac or \u00a34", "smart \u2018quotes\u2019 and \u201cmore\u201d \u2014"],
    "cp1250": [
        "Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144, prosz\u0119 bardzo",
        "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148"],
    "cp1251": ["\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u044d\u0442\u043e"],
    "koi8_r": ["\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u044d\u0442\u043e"],
    "cp1253": ["\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u03ba\u03cc\u03c3\u03bc\u03b5"],
    "cp1254": ["\u00c7ok g\u00fczel bir \u015fark\u0131, \u0131\u011fd\u0131r"],
    "shift_jis": ["これは日本語のテキストです。"],
    "gb18030": ["这是一部非常好的电影,我很喜欢它。"],
    "euc_kr": ["이 영화는 정말 재미있었습니다."],
    "utf-16": ["na\u00efve 日本"],
    "utf-16-le": ["na\u00efve"],
    "utf-16-be": ["na\u00efve"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("encoding", "text"), [(name, text) for name, each in TEXTS.items() for text in each]
)
def test_a_file_in_another_encoding_is_read_and_the_guess_is_shown(encoding, text):
    document = f"text,label\n{text},1\nplain,0\n"
    decoded = decode_file(f"\ufeff{document}".encode(), "x")
    assert (decoded.text, decoded.encoding, decoded.sample) == (document, "UTF-8", "")
    decoded = decode_file(document.encode(encoding), "x")
    assert decoded.text == document
    if not encoding.startswith("utf"):
        assert decoded.encoding != "UTF-8"
        assert decoded.sample in text
        assert not decoded.sample.isascii()


def test_some_damaged_lines_among_utf8_are_refused_not_guessed():
    lines = ["na\u00efve", "caf\u00e9"]
    data = f"{lines[0]}\n".encode() * 3 + lines[1].encode("latin-1")
    with pytest.raises(DataError, match="x, line 4, byte 25: 0xe9 is not UTF-8") as error:
        decode_file(data, "x")
    assert "data.encoding=" in error.value.hint


def test_an_unknown_or_wrong_encoding_is_refused():
    for name in ("klingon", "zip", "rot13", "a\0b", "..", "x" * 9999, ""):
        with pytest.raises(DataError, match="unknown encoding"):
            decode_file(b"abc", "x", name)

    for name in ("utf-8", "ascii", "utf-16", "cp1252"):  # which cannot have these bytes
        with pytest.raises(DataError, match="x, line 1") as error:
            decode_file(b"a\x81\xff", "x", name)
        assert "data.encoding" in error.value.hint
