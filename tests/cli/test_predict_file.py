"""`adapterhub predict FILE`: all columns and the predictions as a table, in any format."""

import json

import pandas as pd
import pytest

from tests.kit.data import json_lines, sentences
from tests.kit.session import refused, succeeded

READERS = {
    ".csv": lambda path: pd.read_csv(path, keep_default_na=False),
    ".tsv": lambda path: pd.read_csv(path, sep="\t", keep_default_na=False),
    ".jsonl": lambda path: pd.read_json(path, lines=True, dtype=False),
    ".parquet": pd.read_parquet,
}
TEXTS = ["the movie was good", 'a "bad",\tplot\nend', "", "the end"]
ROWS = {"id": [1, 2, 3, 4], "TEXT": TEXTS, "label": ["x"] * 4, "list": [[1], [], [2, 3], ["a"]]}


def written(path):
    """Write the rows in the format of a file; lists are JSON text in CSV and TSV."""
    frame = pd.DataFrame(ROWS)
    if path.suffix == ".parquet":
        pd.DataFrame({name: ROWS[name] for name in ("id", "TEXT", "label")}).to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame["list"] = frame["list"].map(json.dumps)
        frame.to_csv(path, sep={".csv": ",", ".tsv": "\t"}[path.suffix], index=False)
    return path


@pytest.mark.parametrize(
    ("source", "into"),
    [(".csv", ".tsv"), (".tsv", ".csv"), (".jsonl", ".jsonl"), (".parquet", ".parquet"),
     (".jsonl", ".csv")],
)  # fmt: skip
def test_all_columns_and_the_prediction_in_order(adapterhub, trained, tmp_path, source, into):
    file, output = written(tmp_path / f"rows{source}"), tmp_path / "new" / f"out{into}"
    keep = ("--keep-empty",)
    out = succeeded(adapterhub("predict", trained, file, "--output", output, "--all", *keep))
    assert out == f"4 rows: {output}\n"
    found = READERS[into](output)
    assert list(found["TEXT"]) == TEXTS
    assert list(map(str, found["id"])) == ["1", "2", "3", "4"]
    added = ["predicted_label", "probability", "probability of neg", "probability of pos"]
    added += ["truncated"]
    assert list(found.columns) == [*READERS[source](file).columns, *added]
    expected = json_lines(
        succeeded(adapterhub("predict", trained, "--data", file, "--json", *keep))
    )
    assert [row.get("empty", False) for row in expected] == [False, False, True, False]
    texts = found[found["TEXT"] != ""]
    filled = [row for row in expected if row["text"]]
    assert list(texts["predicted_label"]) == [row["label"] for row in filled]
    assert list(map(float, texts["probability of pos"])) == pytest.approx(
        [row["scores"]["pos"] for row in filled]
    )
    if "list" in found and source == into == ".jsonl":
        assert list(found["list"]) == ROWS["list"]
    refused(adapterhub("predict", trained, file, "--output", output), "is already there")


def test_two_columns_on_the_terminal(adapterhub, trained):
    for more in ([], ["--all"]):
        out = succeeded(adapterhub("predict", trained, "the end", "a\tplot", *more))
        cells = [line.split("\t") for line in out.splitlines()]
        assert [row[-1] for row in cells] == ["the end", "a\\tplot"]
        assert {row[0] for row in cells} <= {"neg", "pos"}
        assert all(0 <= float(row[1]) <= 1 for row in cells)
        assert [len(row) for row in cells] == [5 if more else 3] * 2


def test_a_text_file_is_a_text_file(adapterhub, backbone, tmp_path):
    """Single texts and pairs, for adapters that were trained on columns of other names."""
    rows = sentences(32)
    single = "".join(f"{text},{label}\n" for text, label in rows)
    pairs = "".join(f"{text},a plot,{label}\n" for text, label in rows)
    texts = [("the movie, was good",), ("bad",)], [("a film", "a plot"), ("the end", "an end")]
    for name, header, content, typed in (
        ("single", "Review,Mood\n", single, texts[0]),
        ("pairs", "text,Two,Mood\n", pairs, texts[1]),
    ):  # fmt: skip
        (tmp_path / "train.csv").write_text(header + content)
        (tmp_path / "texts.txt").write_text("".join("\t".join(row) + "\n" for row in typed))
        columns = header.strip().split(",")
        options = [f"data.text={columns[0]}", f"data.label={columns[-1]}"]
        options += [f"data.pair={columns[1]}"] * (name == "pairs")
        succeeded(adapterhub(
            "train", "--backbone", backbone, "--train", tmp_path / "train.csv", "--output",
            tmp_path / name, "train.max_steps=1", "train.report=false", "data.eval=none", *options,
        ))  # fmt: skip
        for words in (("--data", tmp_path / "texts.txt"), (tmp_path / "texts.txt",)):
            out = succeeded(adapterhub("predict", tmp_path / name, *words))
            assert [tuple(line.split("\t")[2:]) for line in out.splitlines()] == typed
