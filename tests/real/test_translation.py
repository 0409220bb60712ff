"""Flan-T5: it translates, and learns to translate better."""

from __future__ import annotations

import csv
import json

import torch

import adapterhub as ah
from adapterhub.cli.train import command

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
