"""Whisper: it writes what a speech synthesizer says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from adapterhub.inference.open import open_backbone
from adapterhub.tasks import parse_task

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
