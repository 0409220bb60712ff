"""Which calls are replayed, which layers are frozen, and what a replayed layer returns."""

from functools import partial

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.probe import evaluation_mode
from adapterhub.speed import frozen_cache
from adapterhub.speed.frozen_cache import LayerCall, plans_of_calls, stack_rows
from tests.kit import tiny_models
from tests.kit.tiny_models import NO_DROPOUT

IDS = torch.tensor([[5, 6, 7, 1], [5, 6, 1, 1]])
RIGHT = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def keys(**inputs):
    """Return the keys of the rows of a call."""
    return stack_rows(inputs).keys


def test_a_row_is_known_by_its_tokens_wherever_its_padding_is():
    right = keys(input_ids=IDS, attention_mask=RIGHT)
    left = keys(input_ids=IDS.roll(1, 1)[:1], attention_mask=RIGHT[:1].roll(1, 1))
    assert right[0] == left[0] == keys(input_ids=IDS[:1, :3])[0]
    assert right[1] == keys(input_ids=IDS[1:, :2])[0]
    types = keys(input_ids=IDS, attention_mask=RIGHT, token_type_ids=torch.zeros_like(IDS))
    places = keys(input_ids=IDS, attention_mask=RIGHT, position_ids=torch.zeros_like(IDS))
    assert len({*right, *types, *places}) == 6


def test_inputs_that_are_not_only_rows_of_tokens_are_computed(subtests):
    cases = [
        {"inputs_embeds": torch.zeros(2, 4, 8)},
        {"input_ids": IDS, "pixel_values": torch.zeros(2, 3)},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)},
        {"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])},
        {"input_ids": IDS, "attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]])},
        {"input_ids": IDS, "position_ids": torch.arange(4)[None]},
    ]
    for inputs in cases:
        with subtests.test(inputs=inputs):
            assert stack_rows(inputs) is None


def call(number, trains=False, output=None):
    """Return a call of a layer."""
    hidden = torch.zeros(2, 4, 8, requires_grad=trains)
    return LayerCall(number, hidden if output is None else output, hidden)


def test_the_frozen_layers_are_those_below_the_first_gradient(subtests):
    cases = [
        ([0, 1, 2], 2, 2),
        ([0, 1, 2], 9, 3),
        ([0, 1, 2], 0, 0),
        ([0, 0, 1, 1], 2, 1),  # shared layers, one after the other
        ([0, 1, 0, 1], 3, 0),  # layer 0 computes between calls of a layer that trains
        ([1, 0], 1, 0),  # not in the order of their numbers
    ]
    for numbers, trains, below in cases:
        with subtests.test(numbers=numbers):
            rows = stack_rows({"input_ids": IDS})
            calls = [call(number, n >= trains) for n, number in enumerate(numbers)]
            plans = plans_of_calls(calls, rows)
            assert [plan.below for plan in plans] == ([below] * 2 if below else [])
            if below:
                assert [plan.layers for plan in plans] == [(below - 1,), tuple(range(below))]


def test_layers_that_hand_tensors_on_may_need_the_first():
    rows = stack_rows({"input_ids": IDS})
    output = (torch.zeros(1), torch.zeros(1), None, "x")
    plans = plans_of_calls([call(0, output=output), call(1, output=output)], rows)
    assert [plan.computes_first for plan in plans] == [False, True] * 2
    assert plans[0].others == (None, None, "x")


def replayed(model, replay):
    """Record a batch of a model with a head that trains, and replay it; return the batch."""
    batch = tiny_models.batch()
    rows = [{k: v[n : n + 1] for k, v in batch.items()} for n in range(len(batch["input_ids"]))]
    singles = [partial(model, **row) for row in rows]
    plan = frozen_cache.find_plan(model, replay, partial(model, **batch), singles)
    with evaluation_mode(model), torch.no_grad():
        recorder = frozen_cache.StateRecorder(replay, plan.layers, 99)
        recorded = frozen_cache.record_runs(recorder, singles, plan)
    replay.plan, replay.recorded = plan, [recorded]
    return batch


def test_only_calls_like_the_recorded_one_are_replayed():
    """An error in a replayed pass leaves nothing behind."""
    model = tiny_models.model("bert", **NO_DROPOUT)
    adapter = ah.attach(model, "head", name="mine")
    model.eval()
    computed = model(**tiny_models.batch()).logits
    with frozen_cache.replayable(adapter.anatomy, "encoder") as replay:
        batch = replayed(model, replay)
        assert not torch.equal(model(**batch).logits, computed)
        with_states = model(**batch, output_hidden_states=True)
        assert torch.equal(with_states.logits, computed)
        assert not torch.equal(with_states.hidden_states[0], with_states.hidden_states[1])
        other = batch | {"input_ids": batch["input_ids"].flip(0).roll(1, 1)}
        with pytest.raises((RuntimeError, ValueError)):
            model(**batch, labels=torch.zeros(7))
        expected = model(**other).logits
        replay.recorded = []
        assert torch.equal(model(**other).logits, expected)
    assert torch.equal(model(**other).logits, expected)
    assert torch.equal(model(**batch).logits, computed)
