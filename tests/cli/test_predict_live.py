"""`adapterhub predict ADAPTER` on a terminal: each line is answered at once, chats go on."""

from __future__ import annotations

import io
import json
import os

import pytest

from adapterhub.inference.open import Predictor
from tests.kit.session import succeeded
from tests.kit.task_cases import CASES


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


@pytest.mark.parametrize("task", ["question-answering", "reranking", "reward", "multiple-choice"])
def test_other_texts_are_asked_for_or_given(task, typing):
    """An error is told, and the next line is answered."""
    if task == "multiple-choice":
        code, out, err = typing(task, "the end\nthe end\tgood\tbad\n")
        assert "needs a text and two or more choices" in err
        expected = 1
    else:
        code, out, err = typing(task, "the end\na good end\nthe plot\n\nthe plot\ta film\n")
        assert "second text> " in err
        assert "error: " in err
        expected = 2
    assert code == 0, err
    assert len(out.splitlines()) == expected


def test_a_chat_goes_on_until_it_begins_anew(typing, monkeypatch):
    asked = []
    original = Predictor.streamed
    monkeypatch.setattr(
        Predictor,
        "streamed",
        lambda self, examples, how: (
            asked.append(examples[0].messages) or original(self, examples, how)
        ),
    )
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


def test_a_real_terminal(trained, adapterhub, monkeypatch):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    os.write(ours, b"the end\n\x04")
    with open(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        code, out, err = adapterhub("predict", trained)
    os.close(ours)
    assert code == 0, err
    assert out.split("\t")[0] in ("neg", "pos")
