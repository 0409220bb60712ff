"""What is below the head of a language model, and the loss of tokens in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, CohereConfig, Gemma2Config

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common import language_models
from adapterhub.tasks.common.language_models import (
    few_tokens,
    logits_at_once,
    plain_head,
    states_below,
    targets_of,
    token_chunks,
    token_loss,
    token_losses,
    whole_output,
)
from tests.kit import tiny_models

SMALL = {"vocab_size": 120, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "t5", "bart"])
def test_the_head_reads_these_states(architecture: str) -> None:
    model = tiny_models.language_model(architecture)
    head = plain_head(model)
    batch = tiny_models.batch()
    batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        logits = head(states_below(model, head, batch))
        assert torch.equal(logits, whole_output(model, head, batch).logits)
    assert not head._forward_pre_hooks
    assert not head._forward_hooks


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, final_logit_softcapping=30.0),
        CohereConfig(**SMALL, logit_scale=0.0625, pad_token_id=0),
    ],
    ids=["bounded", "scaled"],
)
def test_logits_that_are_not_those_of_the_head(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 1e-3  # tanh(z) is nearly z
        assert whole_output(model, plain_head(model), tiny_models.batch()) is None


def test_targets() -> None:
    labels = torch.tensor([[-100, 5, 6]])
    assert targets_of({"labels": labels}, shifted=False).tolist() == [[-100, 5, 6]]
    assert targets_of({"labels": labels}, shifted=True).tolist() == [[5, 6, -100]]


def test_few_tokens_have_their_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head = nn.Linear(2, 100)
    assert logits_at_once(head, 1000) == 1000
    assert logits_at_once(None, 10**9) == 10**9
    monkeypatch.setattr(language_models, "_WORTHWHILE", 10_000)
    monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 550})
    assert logits_at_once(head, 99) == 99
    assert logits_at_once(head, 100) == 5
    assert [range(12)[part] for part in token_chunks(12, head)] == [
        range(5),
        range(5, 10),
        range(10, 12),
    ]
    assert logits_at_once(nn.Linear(2, 10**4), 100) == 1  # one token is the least


@pytest.mark.parametrize("last", [0, 63, 64, 199])
def test_few_tokens_end_with_the_last_learned_one(last: int) -> None:
    ids = torch.arange(200)[None]
    labels = torch.full_like(ids, -100)
    labels[0, last] = last
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    few = few_tokens(row)
    assert {tuple(tensor.shape) for tensor in few.values()} == {(1, min(last + 1, 64))}
    assert few["input_ids"][0, -1] == few["labels"][0, -1] == last
    sources = few_tokens(row | {"labels": labels[:, :100]})  # those of an encoder are not cut
    assert sources["input_ids"].shape == (1, 200)
    assert sources["labels"].shape == (1, 64 if last == 199 else min(last + 1, 64))
    pictures = row | {"pixel_values": torch.zeros(1, 3, 4, 4)}
    assert few_tokens(pictures)["input_ids"].shape == (1, 200)


def test_a_model_that_does_not_take_so_few_tokens_keeps_its_logits() -> None:
    model = tiny_models.language_model("llama")

    def refuse(*_: Any) -> None:
        raise ValueError("the length has to be a multiple of 128")

    model.register_forward_pre_hook(refuse)
    assert whole_output(model, plain_head(model), tiny_models.batch()) is None


@pytest.mark.parametrize("tokens", [0, 1, 5, 11])
def test_losses_of_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 100})
    torch.manual_seed(tokens)
    head, states = nn.Linear(4, 20), torch.randn(tokens, 4)
    targets = torch.randint(0, 20, (tokens,))
    with torch.no_grad():
        found = token_losses(states.bfloat16(), head.bfloat16(), targets)
        expected = F.cross_entropy(head(states.bfloat16()).float(), targets, reduction="none")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("change", ["hooked", "subclass", "child", "own forward"])
def test_other_heads(change: str) -> None:
    model = tiny_models.language_model("llama")
    head = model.lm_head
    assert plain_head(model) is head
    if change == "hooked":
        head.register_forward_hook(lambda *_: None)
    elif change == "subclass":
        head.__class__ = type("Quantized", (nn.Linear,), {})
    elif change == "child":
        head.add_module("child", nn.Identity())
    else:
        head.forward = head.forward
    assert plain_head(model) is None


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq", "masked-lm"])
def test_evaluations_are_the_same(
    task: str, backbones: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(backbones({"causal-lm": "llama", "seq2seq": "t5", "masked-lm": "bert"}[task]))
    model, tokenizer = ah.load_backbone(folder, task=task)
    if task == "masked-lm":
        model = AutoModelForMaskedLM.from_pretrained(folder)
    texts = ["the movie was very good", "a", "the plot was bad and the film very dull"]
    examples = [Example(text, None, text[:9]) for text in texts]
    data = parse_task(task).encode(examples, Setting(tokenizer, 32), labelled=True)
    shifted, found, calls = task == "causal-lm", [], []
    counted = lambda *args: calls.append(1) or token_losses(*args)  # noqa: E731
    monkeypatch.setattr(language_models, "token_losses", counted)
    for least in (0, 1 << 60):
        monkeypatch.setattr(language_models, "_WORTHWHILE", least)
        monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 500})
        record: list[Any] = []
        metrics = token_loss(model, data, 2, shifted=shifted, record=record)
        found.append([*metrics.values(), *(v for each in record for v in each.as_dict().values())])
        assert len(calls) == 2  # batches, and none without chunks
    assert len(found[0]) == 2 + 2 * 3
    assert found[0] == pytest.approx(found[1], rel=1e-4)
