"""preference and reward: log probabilities, the reference, chats, losses and predictions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.route import only_foundations
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.preference import _log_probabilities
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer

ROWS = [
    Comparison("the movie was", "very good", "bad"),
    Comparison("a plot is", "dull", "a great end"),
    Comparison("the end", "fine", "poor"),
]
TOKENIZER = word_tokenizer("<s>", "")


def tiny_llama():
    torch.manual_seed(0)
    return tiny_models.model("llama", "causal-lm").eval()


def encoded(task):
    return task.encode(ROWS, Setting(TOKENIZER, 32, positions=64), labelled=True)


def tokens_of(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def test_orpo_reads_no_reference():
    task = parse_task("preference(loss_type=orpo)")
    assert not task.compares_with_reference
    rows = encoded(task)
    assert task.with_reference(tiny_llama(), rows, 4) is rows
    chats = parse_task("preference(data=chat)")
    assert chats.example(["a film"], DataOptions()).prompt == (("user", "a film"),)


def test_log_probabilities_are_of_the_responses_alone():
    model = tiny_llama()
    task = parse_task("preference(template='{text} ')")
    batch = encoded(task).batch([0])
    policy, tokens = _log_probabilities(model(**tokens_of(batch)), batch)
    assert tokens.tolist() == [[3, 2]]  # with the end of the text
    prompt = TOKENIZER("the movie was ")["input_ids"]
    for column, response in enumerate(("very good", "bad")):
        answer = TOKENIZER(response, add_special_tokens=False)["input_ids"]
        ids = [*prompt, *answer, TOKENIZER.eos_token_id]
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(scores[i - 1, ids[i]] for i in range(len(prompt), len(ids)))
        assert policy[0, column].item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("method", ["lora", "full", "prompt"])
def test_the_reference_is_the_model_with_the_adapter_off(method):
    model = tiny_llama()
    task = parse_task("preference")
    expected = task.with_reference(model, encoded(task), 4).rows
    adapter = ah.attach(model, method, name="a")
    for tensor in adapter.tensors().values():
        tensor.data.add_(torch.randn_like(tensor))
    with only_foundations(model):
        found = task.with_reference(model, encoded(task), 4).rows
    on = task.with_reference(model, encoded(task), 4).rows
    for row, own, other in zip(expected, found, on, strict=True):
        assert own["reference"] == pytest.approx(row["reference"], abs=1e-4)
        assert other["reference"] != pytest.approx(row["reference"], abs=1e-2)


def test_the_loss_is_minus_the_log_of_the_probability_of_the_choice():
    """P(chosen) = exp(s_c) / (exp(s_c) + exp(s_r)); trl's RewardTrainer has the same."""
    scores = torch.tensor([[1.0, -0.5], [0.2, 2.0]])  # chosen, rejected
    expected = -torch.log(scores.exp()[:, 0] / scores.exp().sum(1)).mean()
    output = SimpleNamespace(logits=scores.T.reshape(4, 1))
    loss = parse_task("reward").loss(None)
    assert torch.allclose(loss(output, {}), expected)


def test_a_prediction_is_the_reward_of_one_response(backbone):
    model, tokenizer = ah.load_backbone(str(backbone), task="regression")
    task, setting = parse_task("reward"), Setting(tokenizer, 32)
    rows = task.encode(ROWS[:2], setting, labelled=True)
    record = []
    metrics = task.evaluate(model, rows, 2, record)
    assert metrics["margin"] == pytest.approx(sum(c.margin for c in record) / 2)
    for row, compared in zip(ROWS[:2], record, strict=True):
        for response, reward in ((row.chosen, compared.chosen), (row.rejected, compared.rejected)):
            example = task.example([row.text, response], DataOptions())
            alone = task.encode([example], setting, labelled=False)
            (prediction,) = task.predict(model, alone, 1)
            ids = tokenizer(f"{row.text}\n{response}", return_tensors="pt")["input_ids"][:, :-1]
            with torch.no_grad():
                expected = model(ids).logits.item()
            assert prediction.value == pytest.approx(expected, abs=1e-5)
            assert prediction.value == pytest.approx(reward, abs=1e-5)
