"""What a backbone forgets of held text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import sentences, write_tsv
from studies import planned

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.bench.conduct import run_study
from adapterhub.bench.forgetting import HeldText, encode_held, forgetting_of, read_held
from adapterhub.bench.study import Study, read_study
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError
from adapterhub.tasks import Encoded, Setting, parse_task

KINDS = {"gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq", "bert": "masked-lm"}
TEXTS = HeldText(tuple(Example(text) for text, _ in sentences(12)))


@pytest.mark.parametrize("architecture", KINDS)
def test_an_identity_adapter_forgets_nothing_and_another_one_does(
    architecture: str, backbones: Any
) -> None:
    model, held = loaded(backbones(architecture), KINDS[architecture])
    adapter = ah.attach(model, "lora", name="mine")
    assert forgetting_of(adapter, held, 4) == 0.0
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.copy_(torch.randn_like(tensor))
    assert forgetting_of(adapter, held, 4) != 0.0
    assert ah.adapters(model)["mine"] is not None


def test_it_is_the_difference_of_the_mean_losses(backbones: Any) -> None:
    model, held = loaded(backbones("gpt2"), "causal-lm")
    adapter = ah.attach(model, "full", name="mine")
    before = mean_loss(model, held)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    after = mean_loss(model, held)
    assert forgetting_of(adapter, held, 5) == pytest.approx(after - before, abs=1e-4)


def loaded(folder: Path, kind: str) -> tuple[Any, Encoded]:
    model, tokenizer = load_backbone(str(folder), task=kind)
    model.config.use_cache = False
    return model, encode_held(TEXTS, kind, Setting(tokenizer, 64))


@torch.no_grad()
def mean_loss(model: Any, held: Encoded) -> float:
    total, count = 0.0, 0
    for row in held.rows:
        ids = torch.tensor([row["input_ids"]])
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        total -= float(scores.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    return total / count


def test_tasks_without_the_head_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "held.txt"
    source.write_text("a good movie\nthe film was bad\n")
    with pytest.raises(ConfigError, match="no language-model head") as caught:
        read_held(str(source), parse_task("classification"))
    for name in ("causal-lm", "masked-lm", "prompted", "seq2seq", "span-corruption"):
        assert name in str(caught.value)
    assert len(read_held(str(source), parse_task("causal-lm")).examples) == 2


def test_a_tokenizer_without_sentinels_is_refused_before_any_run(backbones: Any) -> None:
    _, tokenizer = load_backbone(str(backbones("bert")), task="features")
    with pytest.raises(ConfigError):
        encode_held(TEXTS, "seq2seq", Setting(tokenizer, 64))


def test_final_runs_have_it_and_large_rates_forget(backbones: Any, tmp_path: Path) -> None:
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(60))]
    source = write_tsv(tmp_path / "mine.tsv", rows)
    held = tmp_path / "held.txt"
    held.write_text("\n".join(text for text, _ in sentences(20)) + "\n")
    flags = {"backbone": str(backbones("gpt2")), "output": str(tmp_path / "study"),
             "task": "causal-lm", "data": {"train": str(source)}}  # fmt: skip
    bench = {"methods": ("full",), "rates": 1, "seeds": 1, "steps": 6, "baseline": "full"}
    words = ["dtype=fp32", "train.batch_size=8"]
    plain = read_study(None, words, flags, bench)
    study: Study = replace(plain, bench=replace(plain.bench, held=str(held)))
    plan, folder, engine = planned(study, tmp_path)
    plan = replace(plan, groups=tuple(replace(group, rate=0.3) for group in plan.groups))
    (record,) = run_study(plan, folder, engine).records
    assert record.costs.forgetting is not None
    assert record.costs.forgetting > 0.5
    assert math.isfinite(record.costs.forgetting)
    bare = planned(plain, tmp_path / "plain")[0].contexts["mine"]
    assert bare.key(record.cell) != record.key, "it is measured in runs of its own"
