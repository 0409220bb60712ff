"""Tables: formats, quoting, line numbers of malformed rows, compressed and missing files."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.examples import Example, labels_of, read_examples
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few, read_parallel, read_table
from adapterhub.errors import DataError

PAIRS = DataOptions(text="text", pair="pair", label="label")

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
one_line = st.text(st.characters(codec="utf-8", exclude_characters="\x00\t\r\n"))
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


def rows(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Example]]:
    nonempty = text.filter(str.strip)  # with a label, others are refused
    return st.lists(st.builds(Example, nonempty, nonempty, names), min_size=1)


def cells(examples: list[Example]) -> list[list[str]]:
    return [[e.text, str(e.pair), str(e.label)] for e in examples]


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def to_csv(examples: list[Example], dialect: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, dialect).writerows([["text", "pair", "label"], *cells(examples)])
    return buffer.getvalue()


@given(examples=rows(texts), suffix=st.sampled_from(["csv", "csv.gz"]))
def test_csv_round_trip(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"rows.{suffix}"
    source = write(path, to_csv(examples, "excel"))
    assert read_examples(source, PAIRS, labelled=True) == examples


@given(examples=rows(texts), encoding=st.sampled_from(["utf-8", "utf-8-sig"]))
def test_quoted_tsv_is_detected(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], encoding: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "quoted.tsv"
    source = write(path, to_csv(examples, "excel-tab"), encoding)
    assert read_examples(source, PAIRS, labelled=True) == examples


@given(examples=rows(one_line), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
def test_quotes_are_text_in_unquoted_tsv(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], end: str, last: bool
) -> None:
    lines = ["\t".join(row) for row in [["text", "pair", "label"], *cells(examples)]]
    path = tmp_path_factory.getbasetemp() / "plain.tsv"
    source = write(path, end.join(lines) + (end if last else ""))
    options = replace(PAIRS, quoted=False)
    assert read_examples(source, options, labelled=True) == examples


@given(examples=rows(texts), escaped=st.booleans())
def test_json_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], escaped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    lines = [json.dumps(vars(e), ensure_ascii=escaped) for e in examples]
    source = write(path, "\n".join(lines) + "\n")
    assert read_examples(source, PAIRS, labelled=True) == examples


@pytest.mark.parametrize(
    "field",
    [
        '" The foodservice pie business',
        'He is " 100 percent behind " it',
        '"Yes," he said, "no"',
        '"Yes."',
        'a 6" nail',
    ],
)
def test_quotes_that_enclose_no_field_are_detected_as_text(tmp_path: Path, field: str) -> None:
    text = f"\ufeffQuality\t#1 String\t#2 String\n1\t{field}\tplain\n0\tplain\tplain\n"
    options = DataOptions(text="#1 String", pair="#2 String", label="Quality")
    examples = read_examples(write(tmp_path / "a.tsv", text), options, labelled=True)
    assert examples == [Example(field, "plain", "1"), Example("plain", "plain", "0")]


@pytest.mark.parametrize("line_end", ["\n", "\n\n"])
def test_a_tsv_with_all_fields_quoted_is_detected(tmp_path: Path, line_end: str) -> None:
    source = write(tmp_path / "a.tsv", f'"text"\t"label"\n"one"\t"1"{line_end}')
    assert read_examples(source, DataOptions(), labelled=True) == [Example("one", None, "1")]


def test_columns_without_a_header_are_numbered_from_zero(tmp_path: Path) -> None:
    source = write(tmp_path / "cola.tsv", "gj04\t1\t\tGood.\nbc01\t0\t*\tBad a.\n")
    options = DataOptions(text="3", label="1", header=False)
    examples = read_examples(source, options, labelled=True)
    assert examples == [Example("Good.", None, "1"), Example("Bad a.", None, "0")]


def test_a_field_may_be_longer_than_the_csv_module_allows(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    source = write(tmp_path / "a.csv", f"text,label\n{'x' * 200_000},1\n")
    assert len(read_examples(source, DataOptions(), labelled=True)[0].text) == 200_000
    assert csv.field_size_limit() == limit


def test_trailing_empty_fields_are_accepted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv", "text\tlabel\t\none\t1\t\ntwo\t2\nsix\t6\t\t\t\n")
    assert [e.label for e in read_examples(source, DataOptions(), labelled=True)] == ["1", "2", "6"]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [0, 1]}), path)
    examples = read_examples(str(path), DataOptions(), labelled=True)
    assert examples == [Example("a", None, "0"), Example("b", None, "1")]


def test_labels_of_a_hub_dataset_are_its_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def load(name: str, subset: str | None, split: str) -> datasets.Dataset:
        calls.append((name, subset, split))
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
        )
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features)

    monkeypatch.setattr(datasets, "load_dataset", load)
    options = DataOptions(subset="sst2")
    assert labels_of(read_examples("nyu/glue", options, labelled=True)) == ["no", "yes"]
    read_examples("nyu/glue", options, labelled=True, split="eval")
    read_examples("glue", options, labelled=False, split="test[:5]")
    assert calls == [
        ("nyu/glue", "sst2", "train"),
        ("nyu/glue", "sst2", "validation"),
        ("glue", "sst2", "test[:5]"),
    ]


def test_an_unreachable_hub_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> datasets.Dataset:
        raise ConnectionError("no route\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"no route\n(.|\n)*without a network, give a file"):
        read_examples("nyu/glue", DataOptions(), labelled=True)


def column(path: Path, name: str) -> list[object]:
    (values,) = read_table(str(path), DataOptions(), "train").take([name])
    return list(values)


def test_plain_text_is_one_row_per_nonempty_line(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"one\n\n two\r\n")
    assert column(source, "text") == ["one", " two"]
    assert read_table(str(source), DataOptions(), "train").lines == [1, 3]


def test_conll_is_one_row_per_sentence(tmp_path: Path) -> None:
    source = tmp_path / "a.conll"
    source.write_text("-DOCSTART- O\n\na DT O\nb NN B-x\n\nc NN O\n")
    assert column(source, "text") == column(source, "0") == [["a", "b"], ["c"]]
    assert column(source, "label") == [["O", "B-x"], ["O"]]
    assert read_table(str(source), DataOptions(), "train").lines == [3, 6]


def test_parallel_files_keep_empty_lines(tmp_path: Path) -> None:
    source, target = (tmp_path / name for name in ("a.en", "a.de"))
    source.write_bytes(b"one\n\ntwo\n")
    target.write_bytes(b"eins\r\nnull\r\nzwei")
    table = read_parallel(str(source), str(target))
    assert [list(values) for values in table.take(["text", "target"])] == [
        ["one", "", "two"],
        ["eins", "null", "zwei"],
    ]


@pytest.mark.parametrize("count", [0, 1, 10, 11, 99])
def test_first_few_lists_at_most_ten_items(count: int) -> None:
    listed = first_few([str(i) for i in range(count)])
    assert listed[:10] == [str(i) for i in range(min(count, 10))]
    assert listed[10:] == ([f"... and {count - 10} more"] if count > 10 else [])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.tsv", "\ufeff\n\n", "is empty"),
        ("a.jsonl", " \n", "is empty"),
        ("a.csv", "text,label\n", "has columns but no rows"),
        ("a.tsv", "text\tlabel\na\t1\nb\nc\t1\t2\n", "line 3: 1 fields\n  - line 4: 3 fields"),
        ("a.csv", 'text,label\n"a\nb",1\nc\n', "line 4: 1 fields"),
        ("a.csv", 'text,label\na,1\n"b,2\nc,3\n', "line 3: unexpected end"),
        ("a.csv", 'text,label\n"a"b,1\n', "line 2: "),
        ("a.csv", "sentence,lable\na,1\n", "cannot tell which columns"),
        ("a.csv", "sentence,lable\na,1\n", "- sentence: a\n  - lable: 1"),
        ("a.csv", "text,label,text\na,1,b\n", "duplicate column names"),
        ("a.jsonl", '{"text": "a", "label": "1"}\n\n{"text": "b"\n', "line 3: "),
        ("a.jsonl", "[1]\n2\n", "line 1: list, not an object\n  - line 2: int, not"),
        ("a.parquet", "PAR1 not really", "is not a Parquet file"),
    ],
)
def test_malformed_data_is_reported_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_examples(write(tmp_path / name, text), DataOptions(), labelled=True)


def test_a_damaged_line_among_utf8_is_reported(tmp_path: Path) -> None:
    data = "text,label\nna\u00efve,1\n".encode() + "caf\u00e9,1\n".encode("latin-1")
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match="line 3, byte 24: 0xe9 is not UTF-8"):
        read_examples(str(tmp_path / "a.csv"), DataOptions(), labelled=True)


def test_a_file_in_another_encoding_is_read_and_the_guess_is_told(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", "text,label\ncaf\u00e9,1\n", "latin-1")
    assert read_examples(source, DataOptions(), labelled=True)[0].text == "caf\u00e9"
    (note,) = read_table(source, DataOptions(), "train").notes
    assert "read as cp1252, which gives 'caf\u00e9'" in note
    assert "data.encoding=NAME" in note


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\na,1\n" * 50)[:-12])
    with pytest.raises(DataError, match="not a complete gzip file"):
        read_examples(str(path), DataOptions(), labelled=True)


@pytest.mark.parametrize("name", ["trian.tsv", "./train"])
def test_a_missing_file_suggests_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / "train.tsv", "text\tlabel\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no such file: .*did you mean 'train.tsv'"):
        read_examples(name, DataOptions(), labelled=True)


def test_the_format_option_overrides_the_suffix(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "text\tlabel\na,b\t1\n")
    examples = read_examples(source, DataOptions(format="tsv"), labelled=True)
    assert examples == [Example("a,b", None, "1")]
