"""`adapterhub quickstart`, on a tiny backbone and small data."""

import errno
import importlib
import signal

import pytest

from adapterhub.data import tickets
from tests.kit import stand_ins
from tests.kit.session import succeeded

quickstart = importlib.import_module("adapterhub.cli.quickstart")


@pytest.fixture
def small(backbone, data, monkeypatch):
    """The quickstart on the tiny backbone; no subprocess predicts."""
    recipe = {
        "backbone": str(backbone),
        "data": {"train": str(data[0]), "eval": str(data[1])},
        "train": {"tensorboard": False, "report": False, "epochs": 1},
    }
    monkeypatch.setattr(quickstart, "RECIPE", recipe)
    predicted = []
    monkeypatch.setattr(quickstart.subprocess, "run", lambda words, **_: predicted.append(words))
    return predicted


def test_a_head_and_a_lora_are_trained_and_compared(small, adapterhub, tmp_path):
    """In a folder that is not there yet."""
    for name in ("runs", "runs-2"):
        (tmp_path / name).mkdir()
    out = succeeded(adapterhub("quickstart", "--output", tmp_path / "runs", "--quiet"))
    rows = {line[:22].strip(): line[22:].split() for line in out.splitlines()}
    assert len(rows["trained parameters"][0]) < len(rows["trained parameters"][1])
    assert len(rows["accuracy"]) == len(rows["macro F1"]) == 2
    adapter = tmp_path / "runs-3" / "lora" / "adapter"
    assert (adapter / "adapter.json").is_file()
    ((*_, command, folder, first, _, _),) = small
    assert (command, folder, first) == ("predict", str(adapter), quickstart.TEXTS[0])


@pytest.mark.parametrize("kind", ["stopped", "full disk"])
def test_what_stops_it_is_continued_by_a_command_that_exists(
    kind, small, adapterhub, tmp_path, monkeypatch
):
    """A quickstart has no --resume, and always begins anew."""
    from adapterhub.loop import report
    from adapterhub.recipe.output_folder import writing

    def advance(step):
        if kind == "stopped":
            signal.raise_signal(signal.SIGINT)
        else:
            with writing(tmp_path):
                raise OSError(errno.ENOSPC, "no space left")

    reporter_for = report.reporter_for

    def interrupting(*args, **options):
        reporter = reporter_for(*args, **options)
        reporter.advance = advance
        return reporter

    monkeypatch.setattr(report, "reporter_for", interrupting)
    code, _, err = adapterhub("quickstart", "--output", tmp_path / "runs", "--quiet")
    assert code == 2
    command = f"adapterhub train --resume --output {tmp_path / 'runs' / 'head'}"
    assert command in err
    assert (tmp_path / "runs" / "head" / "recipe.yaml").is_file()  # which that command reads


def test_a_chat_is_taught_and_both_answers_are_shown(small, adapterhub, tmp_path, monkeypatch):
    """On a language model of bytes with random weights: the score is low, and all steps are run."""
    folder = tmp_path / "language-model"
    folder.mkdir()
    for name, content in stand_ins.files("Qwen/Qwen3-0.6B").items():
        (folder / name).write_bytes(content)
    recipe = {
        "backbone": str(folder), "method": "lora",
        "task": "causal-lm(generate=true, new_tokens=4)",
        "train": {"tensorboard": False, "report": False, "max_steps": 2, "batch_size": 2,
                  "max_length": 400},
    }  # fmt: skip
    monkeypatch.setattr(quickstart, "CHAT_RECIPE", recipe)
    monkeypatch.setattr(tickets, "HELD_OUT", 5)
    out = succeeded(adapterhub("quickstart", "--chat", "--output", tmp_path / "runs", "--quiet"))
    scores = [line for line in out.splitlines() if "exact match" in line]
    assert [line.split("exact match")[1].split(" (")[0].strip() for line in scores] == ["0.000"] * 2
    assert all(line.endswith("n = 5)") for line in scores)
    assert out.count("\nbefore") == out.count("\nafter") == quickstart.SHOWN
    ((*_, command, adapter, text),) = small
    assert (command, adapter) == ("predict", str(tmp_path / "runs/lora/adapter"))
    assert text == quickstart.TICKET
