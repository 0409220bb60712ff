"""CPT: its bound, its start, its files."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.loop.engine import Engine
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from tests.kit import tiny_models

IDS = [5, 6, 7, 8]


def started():
    """A CPT in an engine; the prompt starts at the embeddings of some tokens."""
    model = tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT)
    adapter = ah.attach(model, "cpt(length=4, epsilon=0.4)")
    (placed,) = adapter.placed
    table = model.get_input_embeddings().weight.detach()
    assert all(any(torch.equal(row, token) for token in table) for row in placed.module.start)
    assert torch.equal(placed.module.prompt, placed.module.start)
    with torch.no_grad():
        for tensor in (placed.module.prompt, placed.module.start):
            tensor.copy_(table[IDS])
    options = RunOptions(
        learning_rate=0.02, weight_decay=0, max_grad_norm=0, warmup=0, schedule="constant", eps=1e-3
    )
    engine = Engine(AdapterTrainee(adapter), options)
    engine.begin(8)
    return model, adapter, placed.module, engine


def rows(seed):
    batch = tiny_models.batch(seed=seed)
    labels = batch["input_ids"].clone()
    labels[:, 0] = -100  # which peft would learn from the last virtual token
    return batch | {"labels": labels}


def test_no_token_leaves_its_bound():
    _, _, module, engine = started()
    bound, lengths = 0.4 * (32 / 2048) ** 0.5, []
    for seed in range(4):
        engine.step([rows(seed)], range(1), done=1.0)
        lengths.append((module.prompt - module.start).detach().norm(dim=1))
    assert lengths[0].min() > 0
    assert all(each.max() <= bound + 1e-6 for each in lengths)
    assert lengths[-1].max() == pytest.approx(bound, abs=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_its_steps_are_those_of_peft():
    peft = pytest.importorskip("peft")
    _, _, module, engine = started()
    base = tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT)
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=IDS, opt_projection_format_epsilon=0.4
    )
    theirs = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad], lr=0.02, weight_decay=0, eps=1e-3
    )
    encoder = theirs.prompt_encoder["default"]
    for seed in range(4):
        engine.step([rows(seed)], range(1), done=1.0)
        given = rows(seed)
        # Types of tokens, to which peft adds 1; multiples of 4 have labels.
        types = torch.full_like(given["labels"], 3)
        theirs(**given, input_type_mask=types).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        change = encoder.get_projection()
        torch.testing.assert_close(module.prompt - module.start, change, atol=1e-5, rtol=1e-4)


def test_its_files_are_those_of_a_prompt(tmp_path):
    model, adapter, module, engine = started()
    engine.step([rows(0)], range(1), done=1.0)
    adapter.save(tmp_path / "saved")
    again = tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT)
    loaded = ah.load(again, tmp_path / "saved")
    assert [method.name for method in loaded.methods] == ["prompt"]
    (tensor,) = loaded.tensors().values()
    assert torch.equal(tensor, module.prompt)
    assert adapter.count() == 4 * 32 == loaded.count()
    with torch.no_grad():
        expected = model.eval()(**tiny_models.batch()).logits
        assert torch.equal(again.eval()(**tiny_models.batch()).logits, expected)
