"""Examples from tables: texts, labels, samples and hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    read_rows,
    read_texts,
    refuse,
    sample,
)
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError

names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_labels_keep_their_spelling(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in (1, "01", True, 1.5, " x ")]
    source = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    labels = [e.label for e in read_examples(source, DataOptions(), labelled=True)]
    assert labels == ["1", "01", "True", "1.5", "x"]


def test_regression_labels_are_floats(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv", "text\tlabel\na\t5.000\nb\t-1e-1\n")
    examples = read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [e.label for e in examples] == [5.0, -0.1]


def test_parquet_rows_without_a_value_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a", None], "label": [float("nan"), 1.0]})
    pyarrow.parquet.write_table(table, path)
    assert offenders(str(path)) == ["row 1: the label is empty", "row 2: 'text' is missing"]


def offenders(source: str, **options: object) -> list[str]:
    with pytest.raises(DataError) as caught:
        read_examples(source, DataOptions(**options), labelled=True)  # type: ignore[arg-type]
    return list(caught.value.offenders)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,label\na,1\nb, \n", "line 3: the label is empty"),
        ("a.jsonl", '{"text": "a", "label": "1"}\n{"text": "b"}\n', "line 2: the label is empty"),
        ("a.jsonl", '{"text": 5, "label": 1}', "line 1: 'text' has type int, expected text"),
        ("a.jsonl", '{"text": "a", "label": [1]}', "line 1: the label has type list, expected"),
        ("a.jsonl", '{"text": null, "label": 1}', "line 1: 'text' is missing"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}', "lone surrogate"),
    ],
)
def test_an_invalid_row_is_reported_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    assert message in "\n".join(offenders(write(tmp_path / name, text)))


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    """Write rows in the format of the file's suffix; `.quoted.tsv` encloses all fields."""
    table = [list(rows[0]), *([*row.values()] for row in rows)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        write(path, "\n".join(map(json.dumps, rows)))
    else:
        quote = '"' if path.name.endswith(".quoted.tsv") else ""
        delimiter = "," if path.suffix == ".csv" else "\t"
        lines = (delimiter.join(f"{quote}{cell}{quote}" for cell in row) for row in table)
        write(path, "\n".join(lines) + "\n")
    return str(path)


FORMATS = {"a.csv": "line 3", "a.tsv": "line 3", "a.quoted.tsv": "line 3", "a.jsonl": "line 2",
           "a.parquet": "row 2"}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("column", ["text", "pair"])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_text_with_a_label_is_refused(
    tmp_path: Path, name: str, column: str, value: str
) -> None:
    row = {"text": "a", "pair": "b", "label": "1"}
    source = write_rows(tmp_path / name, [row, row | {column: value}])
    assert offenders(source, pair="pair") == [f"{FORMATS[name]}: {column!r} is empty"]
    options = DataOptions(pair="pair")
    examples = read_examples(source, options, labelled=False)
    assert examples[1] == Example(**{"text": "a", "pair": "b", column: value})


def test_all_problems_of_a_row_are_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"text": 5, "label": [1]}')
    assert [line.split(":")[0] for line in offenders(source)] == ["line 1", "line 1"]


def test_rows_are_built_from_their_columns(tmp_path: Path) -> None:
    def build(first: str, second: str) -> int:
        refuse("", "is negative" * (int(first) < 0))
        return int(first) + int(second)

    source = write(tmp_path / "a.csv", "x,y,z\n1,2,3\n4,5,6\n")
    assert read_rows(source, DataOptions(), "train", ["z", "x"], build) == [4, 10]
    source = write(tmp_path / "b.csv", "x,y\n1,2\n-4,5\n")
    with pytest.raises(DataError, match="invalid rows\n  - line 3: is negative"):
        read_rows(source, DataOptions(), "train", ["x", "y"], build)


def test_regression_labels_that_are_not_numbers_are_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", "text,label\na,1.5\nb,high\nc,nan\nd,1e999\n")
    with pytest.raises(DataError) as caught:
        read_examples(source, DataOptions(), labelled=True, regression=True)
    assert [line.split(":")[0] for line in caught.value.offenders] == ["line 3", "line 4", "line 5"]


def test_many_invalid_rows_are_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", "text,label\n" + "a,\n" * 25)
    assert offenders(source)[-1] == "... and 15 more"


def test_texts_need_no_label_column(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", "text\none\ntwo\n")
    assert read_texts(source, DataOptions()) == [Example("one"), Example("two")]


@given(st.lists(names, unique=True, min_size=1), st.integers(1, 50), st.integers(0, 2**32))
def test_a_sample_is_an_ordered_subset_determined_by_its_seed(
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
    assert caught.value.offenders == ("'maybe': 2 times", "'never': 1 time")
    check_labels(["no", "yes"], evaluation[:1])


def test_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="1 label"):
        check_labels(["yes"], [])


def test_the_hash_depends_on_order_and_fields_and_is_stable() -> None:
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
