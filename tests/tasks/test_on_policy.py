"""Texts that a model samples while it is trained."""

from __future__ import annotations

import torch

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.on_policy import sample_completions
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer

TOKENIZER = word_tokenizer("<s>", "")
SETTING = Setting(TOKENIZER, 32, positions=64)


def prompts(new_tokens=6):
    task = parse_task(f"causal-lm(new_tokens={new_tokens})")
    texts = ("the movie was", "a plot")
    return task.encode([Example(text) for text in texts], SETTING, labelled=False)


def trained_model():
    model = tiny_models.language_model("llama")
    tiny_models.scramble(ah.attach(model, "lora"))
    return model


def test_draws_depend_on_the_seed_alone_and_leave_the_model_as_it_was():
    model = trained_model().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    first = sample_completions(model, prompts(), (3, 1), copies=4)
    torch.manual_seed(9)
    assert sample_completions(model, prompts(), (3, 1), copies=4) == first
    assert sample_completions(model, prompts(), (3, 2), copies=4) != first
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(9).get_state())


def test_a_completion_ends_at_its_end_token_and_is_the_label_of_its_row():
    ends = TOKENIZER.eos_token_id
    found = sample_completions(trained_model(), prompts(), (0,), copies=60)
    assert {each.ended for each in found} == {True, False}
    for each in found:
        assert (each.tokens[-1] == ends) == each.ended
        assert ends not in each.tokens[:-1]
        assert each.ended or len(each.tokens) == 6
        assert each.row["input_ids"] == each.prompt + each.tokens
        assert each.row["labels"] == [-100] * len(each.prompt) + each.tokens
    assert [each.prompt for each in found[::60]] == [row["input_ids"] for row in prompts().rows]


def test_tokens_are_drawn_with_the_probabilities_of_the_active_adapter():
    model, rows = trained_model(), prompts(1)
    found = sample_completions(model, rows, (0,), copies=3000, batch_size=3000)
    counts = torch.zeros(tiny_models.VOCAB)
    for each in found[:3000]:
        counts[each.tokens[0]] += 1 / 3000
    with torch.no_grad():
        logits = model(torch.tensor([rows.rows[0]["input_ids"]])).logits[0, -1]
    expected = logits.softmax(-1)
    error = (expected * (1 - expected) / 3000).sqrt()
    assert ((counts - expected).abs() < 4.5 * error + 1e-3).all()
