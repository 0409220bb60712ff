"""`adapterhub predict`: of arguments, files, a terminal and tables."""

import io
import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from adapterhub.inference.open import Predictor
from tests.kit.data import json_lines, sentences, write_tsv
from tests.kit.runs import TABLE_ROWS, train_two, write_table
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import CASES


def test_no_row_vanishes(train, adapterhub, tmp_path, monkeypatch):
    """Blank lines have a row as on standard input, whatever training left out."""
    assert train("data.skip_empty=true", "train.epochs=1")[0] == 0
    text, run = "a good film\n\na bad film\n\n", tmp_path / "run"
    (tmp_path / "lines.txt").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    keep = ("--json", "--keep-empty")
    from_stdin = adapterhub("predict", run, *keep)[1]
    from_file = succeeded(adapterhub("predict", run, "--data", tmp_path / "lines.txt", *keep))
    assert len(json_lines(from_file)) == 4
    assert from_file == from_stdin
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a film"}\n\n{"text": "a plot"}\n')
    _, out, err = adapterhub("predict", run, "--data", rows, "--json")
    assert len(json_lines(out)) == 2
    assert "blank lines are skipped and get no prediction: 2\n" in err
    rows.write_text('{"text": "a film"}\n{"text": null}\n')
    result = adapterhub("predict", run, "--data", rows)
    refused(result, "line 2: 'text' is missing")
    assert "skip_empty" not in result[2]


def test_a_regression_of_pairs(adapterhub, backbone, tmp_path):
    rows = [(text, f"a {text}", f"{i % 5}.5") for i, (text, _) in enumerate(sentences(40))]
    file = write_tsv(tmp_path / "pairs.tsv", rows, header="one\ttwo\tscore")
    columns = ("--text", "one", "--pair", "two", "--label", "score", "--task", "regression")
    where = ("--train", file, "--eval", file, "--output", tmp_path / "run")
    words = ("train", "--backbone", backbone, *columns, *where, "train.report=false")
    succeeded(adapterhub(*words), "pearson", "spearman")
    one = ("predict", tmp_path / "run", "the movie was good")
    out = succeeded(adapterhub(*one, "--pair", "a film", "--json"))
    assert isinstance(json_lines(out)[0]["value"], float)
    refused(adapterhub(*one), "--pair")
    refused(adapterhub(*one, "--pair", "b", "--all"), "--all: regression has no")


# A file: all columns and the predictions as a table, in any format.


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
    assert list(found.columns) == [*READERS[source](file).columns, *added, "truncated"]
    shown = succeeded(adapterhub("predict", trained, "--data", file, "--json", *keep))
    expected = json_lines(shown)
    assert [row.get("empty", False) for row in expected] == [False, False, True, False]
    texts = found[found["TEXT"] != ""]
    filled = [row for row in expected if row["text"]]
    assert list(texts["predicted_label"]) == [row["label"] for row in filled]
    scores = [row["scores"]["pos"] for row in filled]
    assert list(map(float, texts["probability of pos"])) == pytest.approx(scores)
    if "list" in found and source == into == ".jsonl":
        assert list(found["list"]) == ROWS["list"]
    refused(adapterhub("predict", trained, file, "--output", output), "is already there")


def test_a_text_file_is_a_text_file(adapterhub, backbone, tmp_path):
    """Single texts and pairs, for adapters that were trained on columns of other names."""
    rows = sentences(32)
    single = "".join(f"{text},{label}\n" for text, label in rows)
    pairs = "".join(f"{text},a plot,{label}\n" for text, label in rows)
    texts = [("the movie, was good",), ("bad",)], [("a film", "a plot"), ("the end", "an end")]
    for name, header, content, typed in (
        ("single", "Review,Mood\n", single, texts[0]),
        ("pairs", "text,Two,Mood\n", pairs, texts[1]),
    ):
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


# On a terminal each line is answered at once, and chats go on.


class Terminal(io.StringIO):
    """Lines that a user types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typing(adapterhub, monkeypatch, tmp_path, backbones):
    """Return a function that trains the case of a task for a step, and types lines for it."""

    def type_lines(task: str, text: str, *words: str) -> tuple[int, str, str]:
        case = CASES[task]
        line = ("train", "--backbone", backbones(case.backbone), "--task", case.task, "--train")
        line += (case.data(tmp_path), "--output", tmp_path / "run", "train.max_steps=1")
        line += ("train.report=false", "data.eval=none")
        succeeded(adapterhub(*line))
        monkeypatch.setattr("sys.stdin", Terminal(text))
        return adapterhub("predict", tmp_path / "run", *words)

    return type_lines


def test_each_line_is_answered_until_an_empty_one(typing, adapterhub, tmp_path, monkeypatch):
    loads = []
    original = Predictor.predict_examples
    monkeypatch.setattr(
        Predictor, "predict_examples", lambda self, *a: loads.append(a[0]) or original(self, *a)
    )
    code, out, err = typing("classification", "the end\na plot\n\nnot read\n")
    assert code == 0, err
    lines = [line.split("\t") for line in out.splitlines()]
    assert [len(line) for line in lines] == [2, 2]
    assert [[example.text for example in each] for each in loads] == [["the end"], ["a plot"]]
    assert "text, then Enter; an empty line or Ctrl-D ends" in err
    monkeypatch.setattr("sys.stdin", Terminal("the end"))  # and the end of input
    out = succeeded(adapterhub("predict", tmp_path / "run", "--json"))
    assert json.loads(out)["text"] == "the end"


PAIRS = "the end\na good end\nthe plot\n\nthe plot\ta film\n"


@pytest.mark.parametrize(
    ("task", "lines", "said", "answers"),
    [
        *((task, PAIRS, "second text> ", 2) for task in ("question-answering", "reward")),
        ("multiple-choice", "the end\nthe end\tgood\tbad\n", "a text and two or more choices", 1),
    ],
)
def test_other_texts_are_asked_for_or_given(task, lines, said, answers, typing):
    """An error is told, and the next line is answered."""
    code, out, err = typing(task, lines)
    assert (code, len(out.splitlines())) == (0, answers), err
    assert said in err
    assert "error: " in err


def test_a_chat_goes_on_until_it_begins_anew(typing, monkeypatch):
    asked = []
    streamed = Predictor.streamed

    def noted(self, examples, how):
        asked.append(examples[0].messages)
        return streamed(self, examples, how)

    monkeypatch.setattr(Predictor, "streamed", noted)
    code, out, err = typing("causal-lm", "a film\na plot\n/new\nan end\n", "--max-new-tokens", "2")
    assert code == 0, err
    assert err.count("/new begins a new conversation") == 1
    first = out.split("\n")[0]
    assert asked == [
        (("user", "a film"),),
        (("user", "a film"), ("assistant", first), ("user", "a plot")),
        (("user", "an end"),),
    ]


@pytest.mark.parametrize("task", ["seq2seq", "denoising"])
def test_other_tasks_write_each_text_alone(task, typing, adapterhub, tmp_path):
    out = succeeded(typing(task, "the film\nthe film\n"))
    first, second = out.splitlines()
    assert first == second
    out = succeeded(adapterhub("predict", tmp_path / "run", "the film", "--stream"))
    assert out.splitlines() == [first]


# `--input`: Parquet in, Parquet out, and nothing lost by a kill.


@pytest.fixture(scope="module")
def two(backbone, tmp_path_factory):
    """Train two adapters of one backbone, with two and six classes."""
    return train_two(backbone, tmp_path_factory.mktemp("trained"))


def test_one_adapter_into_one_file(adapterhub, two, tmp_path):
    source, output = write_table(tmp_path / "rows"), tmp_path / "out.parquet"
    words = ("predict", two["mood"].reference, "--input", source, "--output", output)
    out = succeeded(adapterhub(*words))
    assert out.strip() == f"{TABLE_ROWS} rows in 10 parts: {output}"
    found = [json.loads(row["prediction"]) for row in pq.read_table(output).to_pylist()]
    texts = [text for text, _ in sentences(TABLE_ROWS)]
    shown = succeeded(adapterhub("predict", two["mood"].reference, "--json", *texts))
    assert [row["label"] for row in found] == [row["label"] for row in json_lines(shown)]
    assert not Path(f"{output}.parts").exists()
    refused(adapterhub(*words), "already there")


def test_a_column_names_the_adapter(adapterhub, two, tmp_path):
    source, output = write_table(tmp_path / "rows"), tmp_path / "out"
    words = ["predict", "--input", source, "--output", output, "--route-column", "adapter"]
    for name, adapter in two.items():
        words += ["--adapter", f"{name}={adapter.reference}"]
    words += ["--into", "guess"]
    succeeded(adapterhub(*words))
    rows = pq.read_table(sorted(output.glob("part-*.parquet"))[0]).to_pylist()
    assert list(rows[0]) == ["id", "text", "adapter", "guess"]
    sizes = {row["adapter"]: len(json.loads(row["guess"])["scores"]) for row in rows}
    assert sizes == {"mood": 2, "thing": 6}
    # What is missing is computed again; what a killed process has begun and not written is no part.
    parts = sorted(output.glob("part-*.parquet"))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in parts}
    for path in parts[3:5]:
        path.rename(path.with_name(f".{path.name}.abcd.new"))
    code, _, err = adapterhub(*words)
    assert (code, "8 of 10 parts are there already" in err) == (0, True), err
    assert [path.read_bytes() for path in parts] == [content for content, _ in before.values()]
    kept = [path for path in parts if path.stat().st_mtime_ns == before[path][1]]
    assert kept == parts[:3] + parts[5:]
