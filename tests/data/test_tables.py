"""Tables: formats, quoting, line numbers of malformed rows, columns and templates over them."""

import csv
import gzip
import io
import json
import os
from dataclasses import replace

import datasets
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapterhub.data import tables
from adapterhub.data.examples import Example, labels_of, read_examples
from adapterhub.data.options import DataOptions
from adapterhub.data.table import Table, cell_text, fill, is_template, template_columns
from adapterhub.data.tables import read_folder, read_json, read_table
from adapterhub.errors import DataError
from tests.kit.selection import ALL

PAIRS = DataOptions(text="text", pair="pair", label="label")

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
one_line = st.text(st.characters(codec="utf-8", exclude_characters="\x00\t\r\n"))
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


def rows(text):
    nonempty = text.filter(str.strip)  # with a label, others are refused
    return st.lists(st.builds(Example, nonempty, nonempty, names), min_size=1)


def cells(examples):
    return [[e.text, str(e.pair), str(e.label)] for e in examples]


def write(path, text, encoding="utf-8"):
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def to_csv(examples, dialect):
    buffer = io.StringIO()
    csv.writer(buffer, dialect).writerows([["text", "pair", "label"], *cells(examples)])
    return buffer.getvalue()


def to_lines(examples, end="\n", last=True):
    lines = ["\t".join(row) for row in [["text", "pair", "label"], *cells(examples)]]
    return end.join(lines) + end * last


def to_json(examples, escaped=True):
    return "".join(json.dumps(vars(e), ensure_ascii=escaped) + "\n" for e in examples)


FORMS = {  # file, texts of its cells, how it is written, and its encoding
    "csv": ("rows.csv", texts, lambda e: to_csv(e, "excel"), "utf-8"),
    "gzipped": ("rows.csv.gz", texts, lambda e: to_csv(e, "excel"), "utf-8"),
    "quoted": ("quoted.tsv", texts, lambda e: to_csv(e, "excel-tab"), "utf-8"),
    "quoted, marked": ("quoted.tsv", texts, lambda e: to_csv(e, "excel-tab"), "utf-8-sig"),
    "quotes are text": ("plain.tsv", one_line, to_lines, "utf-8"),
    "no last line end": ("plain.tsv", one_line, lambda e: to_lines(e, last=False), "utf-8"),
    "of Windows": ("plain.tsv", one_line, lambda e: to_lines(e, "\r\n"), "utf-8"),
    "JSON lines": ("rows.jsonl", texts, to_json, "utf-8"),
    "JSON, not escaped": ("rows.jsonl", texts, lambda e: to_json(e, escaped=False), "utf-8"),
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=200 if ALL else 40)
@given(data=st.data())
def test_what_is_written_is_read(tmp_path_factory, form, data):
    name, kind, written, encoding = FORMS[form]
    examples = data.draw(rows(kind))
    source = write(tmp_path_factory.getbasetemp() / name, written(examples), encoding)
    options = replace(PAIRS, quoted=False) if name == "plain.tsv" else PAIRS
    assert read_examples(source, options, labelled=True) == examples


@pytest.mark.parametrize(
    "field",
    ['" The foodservice pie business', 'He is " 100 percent behind " it', '"Yes," he said, "no"',
     '"Yes."', 'a 6" nail'],
)  # fmt: skip
def test_quotes_that_enclose_no_field_are_detected_as_text(tmp_path, field):
    text = f"\ufeffQuality\t#1 String\t#2 String\n1\t{field}\tplain\n0\tplain\tplain\n"
    options = DataOptions(text="#1 String", pair="#2 String", label="Quality")
    examples = read_examples(write(tmp_path / "a.tsv", text), options, labelled=True)
    assert examples == [Example(field, "plain", "1"), Example("plain", "plain", "0")]


COLA = DataOptions(text="3", label="1", header=False)


READ = [  # file, text, options, texts and labels
    ("cola.tsv", "gj04\t1\t\tGood.\nbc01\t0\t*\tBad a.\n", COLA, [("Good.", "1"), ("Bad a.", "0")]),
    ("a.tsv", "text\tlabel\t\none\t1\t\ntwo\t2\nsix\t6\t\t\t\n", DataOptions(),
     [("one", "1"), ("two", "2"), ("six", "6")]),
    ("a.txt", "text\tlabel\na,b\t1\n", DataOptions(format="tsv"), [("a,b", "1")]),
    ("a.tsv", '"text"\t"label"\n"one"\t"1"\n\n', DataOptions(), [("one", "1")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "options", "expected"), READ)
def test_files_are_read_as_they_are_written(tmp_path, name, text, options, expected):
    examples = read_examples(write(tmp_path / name, text), options, labelled=True)
    assert [(e.text, e.label) for e in examples] == expected


def test_a_field_may_be_longer_than_the_csv_module_allows(tmp_path):
    limit = csv.field_size_limit()
    source = write(tmp_path / "a.csv", f"text,label\n{'x' * 200_000},1\n")
    assert len(read_examples(source, DataOptions(), labelled=True)[0].text) == 200_000
    assert csv.field_size_limit() == limit


def test_labels_of_a_hub_dataset_are_its_class_names(monkeypatch):
    calls = []

    def load(name, subset, split):
        calls.append((name, subset, split))
        names = datasets.ClassLabel(names=["no", "yes"])
        features = datasets.Features({"text": datasets.Value("string"), "label": names})
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features)

    monkeypatch.setattr(datasets, "load_dataset", load)
    options = DataOptions(subset="sst2")
    assert labels_of(read_examples("nyu/glue", options, labelled=True)) == ["no", "yes"]
    read_examples("nyu/glue", options, labelled=True, split="eval")
    read_examples("glue", options, labelled=False, split="test[:5]")
    names = [("nyu/glue", "train"), ("nyu/glue", "validation"), ("glue", "test[:5]")]
    assert calls == [(name, "sst2", split) for name, split in names]
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"no route\n(.|\n)*without a network, give a file"):
        read_examples("nyu/glue", DataOptions(), labelled=True)


def unreachable(*args, **options):
    raise ConnectionError("no route\nat all")


def test_each_line_with_a_text_is_a_row(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\n two\r\n")
    table = read_table(str(tmp_path / "a.txt"), DataOptions(), "train")
    assert list(table.column("text")) == ["one", " two"]
    assert table.lines == [1, 3]


MALFORMED = [
    ("a.tsv", "\ufeff\n\n", "is empty"),
    ("a.jsonl", " \n", "is empty"),
    ("a.tsv", "text\tlabel\na\t1\nb\nc\t1\t2\n", "line 3: 1 fields\n  - line 4: 3 fields"),
    ("a.csv", 'text,label\n"a\nb",1\nc\n', "line 4: 1 fields"),
    ("a.csv", 'text,label\na,1\n"b,2\nc,3\n', "line 3: unexpected end"),
    ("a.csv", 'text,label\n"a"b,1\n', "line 2: "),
    ("a.csv", "sentence,lable\na,1\n", "cannot tell which columns"),
    ("a.csv", "sentence,lable\na,1\n", "- sentence: a\n  - lable: 1"),
    ("a.csv", "text,label,text\na,1,b\n", "duplicate column names"),
    ("a.jsonl", '{"text": "a", "label": "1"}\n\n{"text": "b"\n', "line 3: "),
    ("a.parquet", "PAR1 not really", "is not a Parquet file"),
]


@pytest.mark.parametrize(("name", "text", "message"), MALFORMED)
def test_malformed_data_is_reported_with_its_line(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        read_examples(write(tmp_path / name, text), DataOptions(), labelled=True)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text,label\na,1\n" * 50)[:-12])
    with pytest.raises(DataError, match="not a complete gzip file"):
        read_examples(str(tmp_path / "a.csv.gz"), DataOptions(), labelled=True)


# Folders of classes as tables: what is listed, and what is left out.


def files(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return str(folder)


def listed(source):
    table = read_folder(source)
    return list(zip(table.column("file"), table.column("label"), strict=True))


def test_the_first_folder_is_the_class_and_hidden_files_are_left_out(tmp_path):
    source = files(tmp_path, "dog/b.png", "cat/inner/c.JPG", "cat/a.png", "d.webp", "cat/.b.png",
                   ".git/c.png", "notes.txt", "cat/Thumbs.db", "Zürich/\u4f60\u597d.png",
                   "\U0001f642/a b.png")  # fmt: skip
    assert listed(source) == [
        ("Zürich/\u4f60\u597d.png", "Zürich"), ("cat/a.png", "cat"), ("cat/inner/c.JPG", "cat"),
        ("d.webp", None), ("dog/b.png", "dog"), ("\U0001f642/a b.png", "\U0001f642"),
    ]  # fmt: skip
    assert read_folder(source).notes == ("2 other files are left out",)
    assert read_folder(source).form == "4 folders"


def test_links_are_followed_once(tmp_path):
    source = files(tmp_path / "photos", "cat/a.png")
    files(tmp_path / "elsewhere", "b.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "photos/dog")
    os.symlink(tmp_path / "photos/cat/a.png", tmp_path / "photos/dog/c.png")
    os.symlink(tmp_path / "photos", tmp_path / "photos/cat/loop")
    os.symlink(tmp_path / "missing.png", tmp_path / "photos/cat/gone.png")
    assert [name for name, _ in listed(source)] == [
        "cat/a.png", "cat/gone.png", "dog/b.png", "dog/c.png"
    ]  # fmt: skip


def test_a_folder_with_a_table_or_without_pictures(tmp_path):
    source = files(tmp_path, "1.wav", "2.wav")
    assert tables.metadata_file(source) is None
    used = [read_table(source, DataOptions(), "train")]
    for text in ("one", "another"):  # it is read again, though the one before is in use
        row = json.dumps({"file_name": "1.wav", "text": text})
        (tmp_path / "metadata.jsonl").write_text(row)
        assert tables.metadata_file(source) == str(tmp_path / "metadata.jsonl")
        used.append(read_table(source, DataOptions(), "train"))
        assert used[-1].columns == ("file_name", "text")
        assert [*used[-1].column("text")] == [text]
    with pytest.raises(DataError, match=r"has no images(.|\n)*one folder for each class"):
        read_folder(files(tmp_path / "texts", "a.txt"))


# JSON as a table: lines, a list, an object with a list, an object of columns.


JSON_ROWS = [{"text": "a", "label": "1"}, {"text": "b", "label": "0"}]
JSON_FORMS = {
    "list": json.dumps(JSON_ROWS),
    "indented": json.dumps(JSON_ROWS, indent=2),
    "data": json.dumps({"version": 1, "data": JSON_ROWS}),
    "one list": json.dumps({"reviews": JSON_ROWS}, indent=1),
    "columns": json.dumps({"text": ["a", "b"], "label": ["1", "0"]}),
    "pandas": json.dumps({"text": {"0": "a", "1": "b"}, "label": {"0": "1", "1": "0"}}),
    "lines": "\n".join(map(json.dumps, JSON_ROWS)),
}


@pytest.mark.parametrize("form", JSON_FORMS)
def test_every_form_is_the_same_table(form):
    table = read_json("a.json", JSON_FORMS[form])
    assert table.columns == ("text", "label")
    assert [list(column) for column in table.take(["label", "text"])] == [["1", "0"], ["a", "b"]]
    assert list(table.lines) == [1, 2]
    assert table.form


def test_one_line_of_lists_is_a_row_in_a_file_of_lines_only():
    line = json.dumps({"tokens": ["a", "b"], "tags": ["O", "O"]})
    assert len(read_json("a.jsonl", line).lines) == 1
    assert len(read_json("a.json", line).lines) == 2
    partial = read_json("a.jsonl", '{"a": 1}\n{"b": 2}\n')
    assert [list(column) for column in partial.take(["a", "b"])] == [[1, None], [None, 2]]


OTHER_JSON = [
    ("[]", "has no rows"),
    ('[{"a": 1}, 2]', "item 2: int, not an object"),
    ("[1]\n2\n", "line 1: list, not an object\n  - line 2: int, not"),
    ('[\n {"a": 1},\n {"a": }\n]', "is not JSON: Expecting value: line 3"),
    ('{"a": 1}\n{"a": \n', "line 2: "),
    ("[" * 100_000, "is not JSON"),
]


@pytest.mark.parametrize(("text", "words"), OTHER_JSON)
def test_other_json_is_refused_with_its_place(text, words):
    with pytest.raises(DataError) as error:
        read_json("a.json", text)
    assert words in str(error.value)
    no_columns = '{"a": [1, 2], "b": [1]}'  # which have one length: one row
    assert len(read_json("a.json", no_columns).lines) == 1


# A table: its columns, templates over them, and how it is described.


COLUMNS = {"title": ["One", "Two", None], "body": ["a b", "", "c"], "n": [1, 2, 3]}


def table(**fields):
    return Table("x.csv", "line", tuple(COLUMNS), [2, 3, 4], COLUMNS.__getitem__, **fields)


def test_columns_and_templates_are_taken():
    one, other = table().take(["n", "{title}. {body} ({n})"])
    assert list(one) == [1, 2, 3]
    assert list(other) == ["One. a b (1)", "Two.  (2)", ". c (3)"]
    columns = {"{a}": ["x"], "a": ["y"]}  # braces in the name of a column
    braces = Table("x", "row", tuple(columns), [1], columns.__getitem__)
    assert list(braces.take(["{a}"])[0]) == ["x"]


@pytest.mark.parametrize("name", ["titel", "{titel}. {body}"])
def test_an_unknown_column_is_listed_also_in_a_template(name):
    with pytest.raises(DataError, match="'titel'; did you mean 'title'") as error:
        table(header=True).take([name])
    assert "'title', 'body', 'n'" in error.value.expected
    assert "data.header=false" in error.value.hint


# Templates substitute the names of columns and do nothing else.


NAMES = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"]), min_size=1)


def test_names_in_braces_are_cells():
    cells = {"title": "One", "body": "two"}
    assert fill("{title}. {body}", cells) == "One. two"
    assert template_columns("{title}. {body} {title}") == ["title", "body", "title"]
    assert fill("{{{title}}} 100%", cells) == "{One} 100%"
    assert (cell_text(3, "n"), cell_text(2.5, "n")) == ("3", "2.5")
    with pytest.raises(DataError, match="'n' in a template has type list"):
        cell_text(["a"], "n")
    assert not any(map(is_template, ("text", "#1 String", "a{", "}", "{{a}}", "")))
    with pytest.raises(DataError, match="2,000 at most"):
        template_columns("{a}" * 1000)


@pytest.mark.parametrize("value", [None, float("nan"), ""])
def test_a_missing_cell_is_empty_and_leaves_no_space_at_the_ends(value):
    assert fill("{a}\n\n{b}", {"a": "x", "b": value}) == "x"
    assert fill("{a}. {b}", {"a": "x", "b": value}) == "x."


@given(NAMES, st.text())
@example("a.__class__", "x")
@example("a[0]", "x")
@example("a!r", "x")
@example("a:>99999", "x")
@example("0", "x")
@example(" a", "x")
def test_what_is_in_braces_is_a_name_and_no_code(name, value):
    """Any cell is put in unchanged."""
    assert template_columns(f"{{{name}}}") == [name]
    assert fill(f"<{{{name}}}>", {name: value}) == f"<{value}>"


def test_a_single_brace_is_refused():
    for template in ("{a} {", "{a}}", "}{a}", "{a} {}", "{a" + "{b}"):
        with pytest.raises(DataError, match="invalid template"):
            template_columns(template)
