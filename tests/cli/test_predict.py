"""`adapterhub predict`: arguments, files, standard input, pairs of texts; damaged adapters."""

import io
import shutil

import pytest

from tests.kit import tiny_models
from tests.kit.data import json_lines, sentences, write_tsv
from tests.kit.session import refused, succeeded


def test_predict_from_a_file_and_from_standard_input(trained, adapterhub, data, monkeypatch):
    from_file = succeeded(adapterhub("predict", trained / "adapter", "--data", data[1], "--json"))
    texts = [row["text"] for row in json_lines(from_file)]
    assert texts == [text for text, _ in sentences(64)[::3]]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts) + "\n"))
    assert succeeded(adapterhub("predict", trained, "--json")) == from_file


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
    rows = [
        (text, f"a {('good', 'bad')[i % 2]} film", f"{i % 5}.5")
        for i, (text, _) in enumerate(sentences(40))
    ]
    file = write_tsv(tmp_path / "pairs.tsv", rows, header="one\ttwo\tscore")
    columns = ("--text", "one", "--pair", "two", "--label", "score", "--task", "regression")
    where = ("--train", file, "--eval", file, "--output", tmp_path / "run")
    words = ("train", "--backbone", backbone, *columns, *where, "train.report=false")
    succeeded(adapterhub(*words), "pearson", "spearman")
    out = succeeded(
        adapterhub("predict", tmp_path / "run", "the movie was good", "--pair", "a film", "--json")
    )
    assert isinstance(json_lines(out)[0]["value"], float)
    refused(adapterhub("predict", tmp_path / "run", "the movie was good"), "--pair")
    one = ("predict", tmp_path / "run", "a", "--pair", "b")
    refused(adapterhub(*one, "--all"), "--all: regression has no")


def test_the_wrong_backbone_for_an_adapter(adapterhub, trained, backbone, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(backbone, other)
    tiny_models.model("bert", "features", seed=1).save_pretrained(other)
    words = ("predict", trained, "good", "--backbone", other)
    refused(adapterhub(*words), "trained on a different backbone")


@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "manifest"])
def test_damaged_files(adapterhub, trained, damage):
    file = trained / "adapter" / ("adapter.json" if damage == "manifest" else "adapter.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    refused(adapterhub("predict", trained, "good"), "adapter.")
