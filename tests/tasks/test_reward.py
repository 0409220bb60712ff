"""reward: the loss of trl, and predictions of one response."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import adapterhub as ah
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison
from adapterhub.errors import DataError
from adapterhub.tasks import Setting, parse_task
from tests.kit.data import write_json_lines

ROWS = [
    Comparison("the movie was", "very good", "bad"),
    Comparison("a plot is", "dull", "a great end"),
]


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
    rows = task.encode(ROWS, setting, labelled=True)
    record = []
    metrics = task.evaluate(model, rows, 2, record)
    assert metrics["margin"] == pytest.approx(sum(c.margin for c in record) / 2)
    for row, compared in zip(ROWS, record, strict=True):
        for response, reward in ((row.chosen, compared.chosen), (row.rejected, compared.rejected)):
            example = task.example([row.text, response], DataOptions())
            alone = task.encode([example], setting, labelled=False)
            (prediction,) = task.predict(model, alone, 1)
            ids = tokenizer(f"{row.text}\n{response}", return_tensors="pt")["input_ids"][:, :-1]
            with torch.no_grad():
                expected = model(ids).logits.item()
            assert prediction.value == pytest.approx(expected, abs=1e-5)
            assert prediction.value == pytest.approx(reward, abs=1e-5)


def test_data_to_predict_on_has_one_response(tmp_path):
    source = str(write_json_lines(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "c"}]))
    options = DataOptions(text="prompt", label="chosen", pair="rejected")
    rows = parse_task("reward").read(source, options, "eval", labelled=False)
    assert rows == [Comparison("p", "c")]
    with pytest.raises(DataError, match="response is missing"):
        parse_task("reward").example(["a prompt"], DataOptions())
