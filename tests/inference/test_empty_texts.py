"""Inputs without a text: an error that names them, or an empty prediction, in every way in."""

import io
import json

import pandas as pd
import pytest
from tokenizers import Regex
from tokenizers.normalizers import Replace

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.serving import Engine, GenerationOptions
from tests.kit.data import json_lines, write_json_lines
from tests.kit.selection import long_table
from tests.kit.server import TaskExample, write_adapter
from tests.kit.session import refused, succeeded

NOTHING = ["", " ", "\n\t", "\u00a0", "\u3000", "\u200b\u200e", None, float("nan")]
KINDS = {
    "classification": ("bert", TaskExample("classification", "classification", ("neg", "pos"))),
    "on a decoder": ("gpt2", TaskExample("classification", "classification", ("neg", "pos"))),
    "multi-label": ("bert", TaskExample("multi-label", "multi-label", ("neg", "pos"))),
    "regression": ("bert", TaskExample("regression", "regression", ("score",))),
    "embedding": ("bert", TaskExample("embedding", "features")),
    "causal-lm": ("gpt2", TaskExample("causal-lm", "causal-lm")),
    "llama": ("llama", TaskExample("causal-lm", "causal-lm")),
    "seq2seq": ("t5", TaskExample("seq2seq", "seq2seq")),
}


@pytest.fixture
def adapter(backbones, tmp_path):
    def write(kind):
        architecture, example = KINDS[kind]
        return write_adapter(backbones(architecture), tmp_path / "run", example=example)

    return write


@long_table("kind", KINDS, 2)
def test_python_and_the_engine_refuse_or_keep_them(kind, adapter):
    folder = adapter(kind)
    model = ah.open(folder)
    good = model.predict("a film")
    letters = model.tokenizer(NOTHING[5], add_special_tokens=False)["input_ids"]
    for nothing in NOTHING[:5] + NOTHING[6:] if letters else NOTHING:
        with pytest.raises(DataError, match="no text") as error:
            model.predict(["a film", nothing])
        assert "item 1" in str(error.value)
        with pytest.raises(DataError, match="no text"):
            model.predict(nothing)
        first, empty = model.predict(["a film", nothing], keep_empty=True)
        assert first.as_dict().keys() == good.as_dict().keys()
        assert (str(empty), empty.label, empty.as_dict()) == ("", None, {"empty": True})
    for rows in ([{"text": "a film"}, {"text": None}], pd.DataFrame({"text": ["a film", None]})):
        with pytest.raises(DataError, match="row 1"):
            model.predict(rows)
        assert model.predict(rows, keep_empty=True)[1].as_dict() == {"empty": True}
    with Engine() as engine:
        asked = [engine.submit(folder, "  ")]
        if KINDS[kind][1].kind in ("causal-lm", "seq2seq"):
            asked.append(engine.generate(folder, " ", GenerationOptions(max_tokens=2)))
        for each in asked:
            with pytest.raises(DataError, match="no text"):
                each.result(60)
        assert "empty" not in engine.submit(folder, "a film").result(60)
        assert engine.submit(folder, "  ", keep_empty=True).result(60)["empty"] is True


def test_both_texts_of_a_pair_are_needed(backbone, tmp_path):
    pair = TaskExample("classification", "classification", ("neg", "pos"), pair="second")
    model = ah.open(write_adapter(backbone, tmp_path / "run", example=pair))
    for given in (("a film", ""), (" ", "a plot"), ("", ""), ("a film", None)):
        with pytest.raises(DataError, match="no text"):
            model.predict(given)
        assert model.predict(given, keep_empty=True).label is None
    rows = [{"text": "a film", "second": "a plot"}, {"text": "a film", "second": None}]
    with pytest.raises(DataError, match="row 1"):
        model.predict(rows)
    assert [p.label is None for p in model.predict(rows, keep_empty=True)] == [False, True]


@pytest.mark.parametrize("kind", ["classification", "multi-label", "seq2seq", "reranking"])
def test_an_evaluation_refuses_texts_without_tokens(kind, backbones, tmp_path, adapterhub):
    """Letters that a tokenizer leaves out, in each field that a prediction reads."""
    nothing = "\u200b\u200e\u0301"
    architecture, example = KINDS.get(kind, ("bert", TaskExample(kind, "regression", ("score",))))
    folder = write_adapter(backbones(architecture), tmp_path / "run", example=example)
    model = ah.open(folder)
    tokenizer = model.tokenizer
    tokenizer.backend_tokenizer.normalizer = Replace(Regex("[\u200b\u200e\u0301]"), "")
    if kind == "reranking":
        rows = [{"query": "a", "passage": p, "label": n} for n, p in ((1, "film"), (0, nothing))]
    else:
        label = ["neg"] if kind == "multi-label" else "neg"
        rows = [{"text": text, "label": label} for text in ("a film", nothing)]
    file = str(write_json_lines(tmp_path / "e.jsonl", rows))
    task, choice = model.task.fitted(file, DataOptions(), "eval")
    examples = task.read(file, choice.options, "eval")
    with pytest.raises(DataError, match="1 of 2 inputs has no text") as error:
        model.evaluate(examples, places=choice.places(len(examples)))
    assert error.value.offenders[0].startswith("e.jsonl, line 2")
    assert "keep" not in error.value.hint
    assert model.evaluate(examples[:1])


@pytest.mark.parametrize("kind", ["classification", "causal-lm"])
def test_the_command_line_names_the_file_and_the_line(
    kind, adapter, adapterhub, tmp_path, monkeypatch
):
    folder = adapter(kind)
    refused(adapterhub("predict", folder, "a film", " "), "text 2")
    out = succeeded(adapterhub("predict", folder, "a film", " ", "--json", "--keep-empty"))
    assert [row.get("empty", False) for row in json_lines(out)] == [False, True]
    monkeypatch.setattr("sys.stdin", io.StringIO("a film\n\na plot\n"))
    refused(adapterhub("predict", folder), "line 2")
    lines = tmp_path / "lines.txt"
    lines.write_text("a film\n\na plot\n")
    refused(adapterhub("predict", folder, "--data", lines), "lines.txt, line 2")
    rows = write_json_lines(tmp_path / "r.jsonl", [{"text": "a film"}, {"text": None}])
    refused(adapterhub("predict", folder, "--data", rows), "line 2")
    table = tmp_path / "t.parquet"
    pd.DataFrame({"text": ["a film", "", None]}).to_parquet(table)
    for file, missing in ((lines, [False, True, False]), (rows, [False, True])):
        output = tmp_path / f"{file.stem}.jsonl.out.jsonl"
        code, _, err = adapterhub("predict", folder, "--data", file, "--output", output,
                                  "--keep-empty")  # fmt: skip
        assert code == 0, err
        name = "label" if kind == "classification" else "generated"
        assert [row[name] is None for row in json_lines(output.read_text())] == missing
    words = ("predict", folder, "--input", table, "--output")
    assert adapterhub(*words, tmp_path / "no.parquet")[0] == 2
    succeeded(adapterhub(*words, tmp_path / "yes.parquet", "--keep-empty"))
    found = map(json.loads, pd.read_parquet(tmp_path / "yes.parquet")["prediction"])
    assert [each.get("empty", False) for each in found] == [False, True, True]
