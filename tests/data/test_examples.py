from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.examples import (
    Example,
    check_labels,
    data_hash,
    labels_of,
    read_examples,
    read_texts,
    sample,
)
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError

PAIRS = DataOptions(text="text", pair="pair", label="label")

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
one_line = st.text(st.characters(codec="utf-8", exclude_characters="\x00\t\r\n"))
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


def rows(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Example]]:
    return st.lists(st.builds(Example, text, text, names), min_size=1)


def cells(examples: list[Example]) -> list[list[str]]:
    return [[e.text, str(e.pair), str(e.label)] for e in examples]


def written(path: Path, text: str, encoding: str = "utf-8") -> str:
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def dumped(examples: list[Example], dialect: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, dialect).writerows([["text", "pair", "label"], *cells(examples)])
    return buffer.getvalue()


@given(examples=rows(texts), suffix=st.sampled_from(["csv", "csv.gz"]))
def test_csv_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"rows.{suffix}"
    source = written(path, dumped(examples, "excel"))
    assert read_examples(source, PAIRS, labelled=True) == examples


@given(examples=rows(texts), encoding=st.sampled_from(["utf-8", "utf-8-sig"]))
def test_quoted_tsv_is_found_out(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], encoding: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "quoted.tsv"
    source = written(path, dumped(examples, "excel-tab"), encoding)
    assert read_examples(source, PAIRS, labelled=True) == examples


@given(examples=rows(one_line), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
def test_unquoted_tsv_takes_quotes_as_text(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], end: str, last: bool
) -> None:
    lines = ["\t".join(row) for row in [["text", "pair", "label"], *cells(examples)]]
    path = tmp_path_factory.getbasetemp() / "plain.tsv"
    source = written(path, end.join(lines) + (end if last else ""))
    options = DataOptions(pair="pair", quoted=False)
    assert read_examples(source, options, labelled=True) == examples


@given(examples=rows(texts), escaped=st.booleans())
def test_json_lines_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], escaped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    lines = [json.dumps(vars(e), ensure_ascii=escaped) for e in examples]
    source = written(path, "\n".join(lines) + "\n")
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
def test_glue_quotes_are_text_without_being_asked(tmp_path: Path, field: str) -> None:
    text = f"\ufeffQuality\t#1 String\t#2 String\n1\t{field}\tplain\n0\tplain\tplain\n"
    options = DataOptions(text="#1 String", pair="#2 String", label="Quality")
    examples = read_examples(written(tmp_path / "a.tsv", text), options, labelled=True)
    assert examples == [Example(field, "plain", "1"), Example("plain", "plain", "0")]


@pytest.mark.parametrize("line_end", ["\n", "\n\n"])
def test_a_tsv_with_all_fields_quoted_is_found_out(tmp_path: Path, line_end: str) -> None:
    source = written(tmp_path / "a.tsv", f'"text"\t"label"\n"one"\t"1"{line_end}')
    assert read_examples(source, DataOptions(), labelled=True) == [Example("one", None, "1")]


def test_columns_without_a_header_are_counted_from_zero(tmp_path: Path) -> None:
    source = written(tmp_path / "cola.tsv", "gj04\t1\t\tGood.\nbc01\t0\t*\tBad a.\n")
    options = DataOptions(text="3", label="1", header=False)
    examples = read_examples(source, options, labelled=True)
    assert examples == [Example("Good.", None, "1"), Example("Bad a.", None, "0")]


def test_a_field_may_be_longer_than_the_csv_module_allows(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    source = written(tmp_path / "a.csv", f"text,label\n{'x' * 200_000},1\n")
    assert len(read_examples(source, DataOptions(), labelled=True)[0].text) == 200_000
    assert csv.field_size_limit() == limit


def test_trailing_empty_fields_are_ok(tmp_path: Path) -> None:
    source = written(tmp_path / "a.tsv", "text\tlabel\t\none\t1\t\ntwo\t2\nsix\t6\t\t\t\n")
    assert [e.label for e in read_examples(source, DataOptions(), labelled=True)] == ["1", "2", "6"]


def test_labels_keep_their_spelling(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in (1, "01", True, 1.5, " x ")]
    source = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    labels = [e.label for e in read_examples(source, DataOptions(), labelled=True)]
    assert labels == ["1", "01", "True", "1.5", "x"]


def test_regression_labels_are_floats(tmp_path: Path) -> None:
    source = written(tmp_path / "a.tsv", "text\tlabel\na\t5.000\nb\t-1e-1\n")
    examples = read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [e.label for e in examples] == [5.0, -0.1]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [0, 1]}), path)
    examples = read_examples(str(path), DataOptions(), labelled=True)
    assert examples == [Example("a", None, "0"), Example("b", None, "1")]


def test_parquet_rows_without_a_value_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a", None], "label": [float("nan"), 1.0]})
    pyarrow.parquet.write_table(table, path)
    assert offenders(str(path)) == ["row 1: the label is empty", "row 2: 'text' is missing"]


def test_a_hub_dataset_gives_its_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load(name: str, subset: str | None, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
        )
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features)

    monkeypatch.setattr(datasets, "load_dataset", load)
    options = DataOptions(subset="sst2")
    assert labels_of(read_examples("nyu/glue", options, labelled=True)) == ["no", "yes"]
    read_examples("nyu/glue", options, labelled=True, split="eval")
    read_examples("glue", options, labelled=False, split="test[:5]")
    assert asked == [
        ("nyu/glue", "sst2", "train"),
        ("nyu/glue", "sst2", "validation"),
        ("glue", "sst2", "test[:5]"),
    ]


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> datasets.Dataset:
        raise ConnectionError("no route\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"no route\n(.|\n)*without network, give a file"):
        read_examples("nyu/glue", DataOptions(), labelled=True)


def offenders(source: str, **options: object) -> list[str]:
    with pytest.raises(DataError) as caught:
        read_examples(source, DataOptions(**options), labelled=True)  # type: ignore[arg-type]
    return list(caught.value.offenders)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.tsv", "\ufeff\n\n", "is empty"),
        ("a.jsonl", " \n", "is empty"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.tsv", "text\tlabel\na\t1\nb\nc\t1\t2\n", "line 3: 1 fields\n  - line 4: 3 fields"),
        ("a.csv", 'text,label\n"a\nb",1\nc\n', "line 4: 1 fields"),
        ("a.csv", 'text,label\na,1\n"b,2\nc,3\n', "line 3: unexpected end"),
        ("a.csv", 'text,label\n"a"b,1\n', "line 2: "),
        ("a.csv", "sentence,lable\na,1\n", "'label'; did you mean 'lable'"),
        ("a.csv", "sentence,lable\na,1\n", "one of 'sentence', 'lable'"),
        ("a.csv", "text,label,text\na,1,b\n", "two columns of one name"),
        ("a.csv", "text,label\na,1\nb, \n", "line 3: the label is empty"),
        ("a.jsonl", '{"text": "a", "label": "1"}\n\n{"text": "b"\n', "line 3: "),
        ("a.jsonl", "[1]\n2\n", "line 1: a list, not an object\n  - line 2: a int"),
        ("a.jsonl", '{"text": "a", "label": "1"}\n{"text": "b"}\n', "line 2: the label is empty"),
        ("a.jsonl", '{"text": 5, "label": [1]}', "'text' is a int, not text\n  - line 1: the lab"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}', "surrogate"),
        ("a.dat", "a\n", "format of .* cannot be told"),
        ("a.parquet", "PAR1 not really", "is not a Parquet file"),
    ],
)
def test_broken_data_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_examples(written(tmp_path / name, text), DataOptions(), labelled=True)


def test_a_regression_label_that_is_no_number_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", "text,label\na,1.5\nb,high\nc,nan\nd,1e999\n")
    with pytest.raises(DataError) as caught:
        read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [line.split(":")[0] for line in caught.value.offenders] == ["line 3", "line 4", "line 5"]


def test_many_broken_lines_are_counted(tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", "text,label\n" + "a,\n" * 25)
    assert offenders(source)[-1] == "... and 15 more"


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", "text,label\ncafé,1\n", "latin-1")
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        read_examples(source, DataOptions(), labelled=True)


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\na,1\n" * 50)[:-12])
    with pytest.raises(DataError, match="not a whole gzip file"):
        read_examples(str(path), DataOptions(), labelled=True)


@pytest.mark.parametrize("name", ["trian.tsv", "./train"])
def test_a_missing_file_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written(tmp_path / "train.tsv", "text\tlabel\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"there is no file .*did you mean 'train.tsv'"):
        read_examples(name, DataOptions(), labelled=True)


def test_the_format_option_wins_over_the_suffix(tmp_path: Path) -> None:
    source = written(tmp_path / "a.txt", "text\tlabel\na,b\t1\n")
    examples = read_examples(source, DataOptions(format="tsv"), labelled=True)
    assert examples == [Example("a,b", None, "1")]


def test_texts_need_no_label_column(tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", "text\none\ntwo\n")
    assert read_texts(source, DataOptions()) == [Example("one"), Example("two")]


@given(st.lists(names, unique=True, min_size=1), st.integers(1, 50), st.integers(0, 2**32))
def test_a_sample_is_an_ordered_part_that_its_seed_decides(
    labels: list[str], count: int, seed: int
) -> None:
    examples = [Example(label) for label in labels]
    drawn = sample(examples, count, seed)
    assert len(drawn) == min(count, len(examples))
    assert drawn == [e for e in examples if e in drawn] == sample(examples, count, seed)


def test_seeds_draw_different_samples() -> None:
    examples = [Example(str(i)) for i in range(100)]
    assert sample(examples, 10, 0) != sample(examples, 10, 1)
    assert sample(examples, None, 0) == examples


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="rows is 0"):
        sample([Example("a")], 0, 0)


def test_labels_are_in_numeric_order_only_if_all_are_numbers() -> None:
    assert labels_of(Example("", None, label) for label in ["10", "9", "-1", "9"]) == [
        "-1",
        "9",
        "10",
    ]
    assert labels_of(Example("", None, label) for label in ["10", "9", "nan"]) == ["10", "9", "nan"]


def test_labels_unseen_in_training_are_counted() -> None:
    evaluation = ["no", "maybe", "maybe", "never"]
    with pytest.raises(DataError) as caught:
        check_labels(["no", "yes"], evaluation)
    assert caught.value.offenders == ("'maybe': 2 time(s)", "'never': 1 time(s)")
    check_labels(["no", "yes"], evaluation[:1])


def test_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="1 label"):
        check_labels(["yes"], [])


def test_the_hash_tells_order_and_parts_and_stays_over_versions() -> None:
    first, second = Example("a", "b", "1"), Example("a", None, 1.0)
    hashes = {data_hash(x) for x in ([], [first], [second], [first, second], [second, first])}
    assert len(hashes) == 5
    expected = "a1afde9dd52cf4f83607d683b29083b6e631c7b8f87f7a7c84f5e949d0a64a66"
    assert data_hash([Example("é", "b", "1")]) == expected


def test_samples_and_hashes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from adapterhub.data.examples import *\n"
        "rows = [Example(str(i), None, str(i % 7)) for i in range(99)]\n"
        "print(data_hash(sample(rows, 9, 3)), labels_of(rows))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] != ""
