"""Flan-T5 translates and learns to translate better, Whisper writes speech, and pages run."""

import csv
import json
import os
import shutil
import subprocess
from pathlib import Path

import pages
import pytest
import torch

import adapterhub as ah
from adapterhub.cli.train import command
from adapterhub.inference.open import open_backbone
from adapterhub.tasks import parse_task
from tests.kit import processes

ASKED = "translate English to German: {text}"


def test_it_translates(flan_t5):
    model, tokenizer = ah.load_backbone(flan_t5, task="seq2seq")
    inputs = tokenizer(ASKED.format(text="The house is wonderful."), return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "Das Haus ist wunderbar."


def test_its_head_is_its_own(flan_t5):
    """transformers ties the head of a T5 whatever the argument: the folder says that it is not."""
    model, _ = ah.load_backbone(flan_t5, task="seq2seq")
    assert not torch.equal(model.lm_head.weight, model.shared.weight)


def test_an_adapter_lowers_the_loss(flan_t5, tmp_path):
    nouns = {"house": "Haus", "child": "Kind", "book": "Buch", "car": "Auto", "horse": "Pferd"}
    words = {"big": "groß", "small": "klein", "old": "alt", "new": "neu", "red": "rot"}
    rows = [(f"The {a} is {b}.", f"Das {nouns[a]} ist {words[b]}.") for a in nouns for b in words]
    for name, part in (("train", rows[::2]), ("eval", rows[1::2])):
        with open(tmp_path / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("source", "target"), *part])
    output = tmp_path / "run"
    words_typed = [
        "--backbone", flan_t5, "--task", f"seq2seq(template='{ASKED}')",
        "--train", str(tmp_path / "train.csv"), "--eval", str(tmp_path / "eval.csv"),
        "--text", "source", "--label", "target", "--output", str(output), "--epochs", "4",
        "--quiet", "train.report=false", "train.tensorboard=false",
    ]  # fmt: skip
    command(words_typed, standalone_mode=False)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [line["metrics"] for line in map(json.loads, lines) if line["event"] == "eval"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]


SAID = (
    "the quick brown fox jumps over the lazy dog",
    "good morning, how are you today",
    "please send me the invoice by the end of the week",
)


@pytest.fixture
def clips(tmp_path):
    """A table of sounds and what is said in them."""
    soundfile = pytest.importorskip("soundfile")
    if (speak := shutil.which("espeak-ng")) is None:
        pytest.skip("the speech synthesizer espeak-ng is not installed")
    rows = []
    for number, text in enumerate(SAID):
        raw, file = tmp_path / f"raw-{number}.wav", tmp_path / f"{number}.wav"
        subprocess.run([speak, "-s", "140", "-w", str(raw), text], check=True)
        samples, rate = soundfile.read(raw)
        soundfile.write(file, samples, rate)
        rows.append(f'{file.name},"{text}"')
    table = tmp_path / "clips.csv"
    table.write_text("\n".join(["audio,text", *rows]), encoding="utf-8")
    return table


def test_it_writes_what_is_said(whisper, clips):
    opened = open_backbone(whisper, parse_task("speech-recognition"))
    examples = opened.task.read(str(clips), opened.data, "eval")
    predictions = []
    metrics = opened.evaluate(examples, record=predictions)
    assert metrics["wer"] <= 0.25, [each.text for each in predictions]


ROOT = Path(__file__).parents[2]
# What each needs besides: a program, or a folder of $ADAPTERHUB_DATA.
NEEDS = {
    "docs/tutorials/language-model.md": None,
    "docs/tutorials/speech.md": "espeak-ng",
    "docs/tutorials/translation.md": "multi30k",
}


def is_there(name: str | None) -> bool:
    folder = Path(os.environ.get("ADAPTERHUB_DATA", "data"))
    return name is None or shutil.which(name) is not None or (folder / name).is_dir()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", NEEDS)
def test_the_blocks_of_a_page_run(page: str, smollm2: str, flan_t5: str, whisper: str) -> None:
    if not is_there(NEEDS[page]):
        pytest.skip(f"{NEEDS[page]} is not there")
    ended = processes.run("scripts/pages.py", page, "--quick", folder=ROOT, timeout=850)
    assert ended.returncode == 0, ended.printed


def test_every_page_on_trained_weights_is_run() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if pages.ON_TRAINED_WEIGHTS in path.read_text(encoding="utf-8")
    }
    assert marked == set(NEEDS)
