"""Scores of label names after a prompt, against log-probabilities that are written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapterhub.backbones.load import load_backbone
from adapterhub.bench.label_scores import LabelScorer
from adapterhub.training.loading import make_ready

KINDS = {"gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq", "bart": "seq2seq",
         "bert": "masked-lm"}  # fmt: skip


def scorer_of(folder: Path, kind: str, labels: list[str]) -> LabelScorer:
    torch.manual_seed(0)
    model, tokenizer = load_backbone(str(folder), task=kind)
    make_ready(model)
    return LabelScorer(model.eval(), tokenizer, kind, labels, 40)


def by_hand(scorer: LabelScorer, kind: str, prompt: str, label: str) -> float:
    """Return the mean log-probability of a label, token by token, one pass for each."""
    tokenizer, model = scorer.tokenizer, scorer.model
    special = set(tokenizer.all_special_ids)
    ids = tokenizer(prompt)["input_ids"]
    words = [i for i in tokenizer(f" {label}")["input_ids"] if i not in special]
    found = []
    for place, token in enumerate(words):
        if kind == "causal-lm":
            start = [i for i in ids if i not in special or i == tokenizer.bos_token_id]
            logits = model(torch.tensor([start + words[:place]])).logits[0, -1]
        elif kind == "seq2seq":
            lead = [i for i in tokenizer(label)["input_ids"] if i in special][:-1]
            before = [model.config.decoder_start_token_id, *lead, *words[:place]]
            logits = model(input_ids=torch.tensor([ids]),
                           decoder_input_ids=torch.tensor([before])).logits[0, -1]  # fmt: skip
        else:
            masks = [tokenizer.mask_token_id] * len(words)
            row = torch.tensor([[*ids[:-1], *masks, ids[-1]]])
            logits = model(row).logits[0, len(ids) - 1 + place]
        found.append(float(logits.log_softmax(-1)[token]))
    return sum(found) / len(found)


@pytest.mark.parametrize("architecture", KINDS)
@torch.no_grad()
def test_scores_are_mean_log_probabilities(architecture: str, backbones: Any) -> None:
    words = _words(backbones("bert"))
    labels = [words[0], f"{words[1]} {words[2]}", f"{words[1]} {words[3]} {words[4]}"]
    scorer = scorer_of(backbones(architecture), KINDS[architecture], labels)
    assert scorer.possible
    prompts = [" ".join(words[5:8]), " ".join(words[3:15]), words[9]]
    found = scorer.scores(prompts)
    expected = [
        [by_hand(scorer, KINDS[architecture], prompt, label) for label in labels]
        for prompt in prompts
    ]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    alone = [scorer.scores([prompt])[0] for prompt in prompts]
    for one, other in zip(found, alone, strict=True):
        assert one == pytest.approx(other, abs=2e-5), "padding changes nothing"


def test_labels_share_the_passes_that_they_can(backbones: Any) -> None:
    words = _words(backbones("bert"))
    single, pair = words[:3], [f"{words[0]} {words[1]}", f"{words[0]} {words[2]}"]
    causal = backbones("gpt2")
    assert scorer_of(causal, "causal-lm", single).passes == 1
    assert scorer_of(causal, "causal-lm", [*single, *pair]).passes == 2
    assert scorer_of(backbones("bert"), "masked-lm", [*single, *pair]).passes == 2


def test_names_that_the_tokenizer_does_not_know_have_no_score(backbones: Any) -> None:
    assert not scorer_of(backbones("bert"), "masked-lm", ["qqqq", "zzzz"]).possible


def test_texts_are_cut_to_what_the_model_reads(backbones: Any) -> None:
    words = _words(backbones("bert"))
    scorer = scorer_of(backbones("gpt2"), "causal-lm", [words[0], f"{words[1]} {words[2]}"])
    room = scorer.room(words[3])
    cut = scorer.cut([" ".join(words[:5] * 20)] * 2, room)
    lengths = [len(scorer.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in cut]
    assert lengths == [room // 2] * 2


def _words(folder: Path) -> list[str]:
    words = (folder / "vocab.txt").read_text().split()
    return [word for word in words if word.isalpha()]
