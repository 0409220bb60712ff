"""What a speedup makes different in a step is found: loss, gradients, outputs, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adapterhub as ah
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedup, Speedups, Trial, Undo, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from tests.kit import tiny_models


@pytest.fixture
def adapter() -> Any:
    found = ah.attach(tiny_models.usual_model("llama"), "lora")
    tiny_models.scramble(found)
    return found


class Hooked(Speedup):
    """A change of one module's output."""

    refusal = "not hooked"

    def __init__(self, adapter: Any, function: Any, evaluated: bool = True) -> None:
        batches = with_and_without_padding(tiny_models.labelled_batch(adapter.model))
        self.trial = Trial(batches, batches if evaluated else ())
        self.module, self.function = adapter.model.get_submodule("model.norm"), function

    def patch(self, engine: Engine) -> Undo:
        hook = self.module.register_forward_hook(lambda m, i, output: self.function(output))
        return hook.remove

    def said(self) -> str:
        return "hooked"


def tried(adapter: Any, *speedups: Speedup) -> str:
    """Try some speedups; return what was said, and check that leaving undoes them."""
    notes: list[str] = []
    norm = adapter.model.model.norm
    with Speedups(speedups, notes.append) as used:
        used.enter(Engine(AdapterTrainee(adapter), RunOptions()))
        assert len(norm._forward_hooks) == len(used.used) == notes.count("hooked")
    assert not norm._forward_hooks
    return "; ".join(notes)


def failing(output: Tensor) -> Tensor:
    raise ValueError("no kernel\n\n  for this size\nand a third line")


def only_in_evaluation(output: Tensor) -> Tensor:
    return output if torch.is_grad_enabled() else 1.1 * output


class WrongGradient(torch.autograd.Function):
    """The identity, with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda output: output, None),
        (lambda output: output * (1 + 1e-6), None),
        (lambda output: 1.1 * output, "the loss would be different"),
        (WrongGradient.apply, "would be different"),
        (lambda output: output.detach(), "would have no gradient"),
        (only_in_evaluation, "of evaluations would be different"),
        (lambda output: output * torch.nan, "the loss would be different"),
        (failing, "ValueError: no kernel for this size"),
    ],
)
def test_what_differs_is_found(adapter, function, found):
    said = tried(adapter, Hooked(adapter, function))
    assert said == "hooked" if found is None else said.endswith(found)
    assert found is None or said.startswith("not hooked: ")
    if function is only_in_evaluation:  # without evaluation, only the step is compared
        assert tried(adapter, Hooked(adapter, function, evaluated=False)) == "hooked"


def test_dropout_draws_the_same_in_both_ways_and_nothing_of_the_run(adapter):
    before = torch.random.get_rng_state()
    adapter.model.model.layers[0].mlp.register_forward_hook(
        lambda m, i, output: nn.functional.dropout(output, 0.5)
    )
    assert tried(adapter, Hooked(adapter, lambda output: output)) == "hooked"
    dropout = Hooked(adapter, lambda output: nn.functional.dropout(output, 0.5))
    assert tried(adapter, dropout).endswith("would be different")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in adapter.parameters())


class Nothing(Speedup):
    """Has nothing to change for the tensors that train now."""

    def patch(self, engine: Engine) -> None:
        return None


def test_each_is_on_top_of_those_before_and_one_that_is_refused_is_not_tried_again(adapter):
    fine, wrong = (Hooked(adapter, lambda output, by=by: by * output) for by in (1, 2))
    notes: list[str] = []
    engine = Engine(AdapterTrainee(adapter), RunOptions())
    with Speedups([wrong, Nothing(), fine], notes.append) as speedups:
        for _ in range(2):
            speedups.enter(engine)
            assert speedups.used == [fine]
            assert len(fine.module._forward_hooks) == 1
    assert [note.partition(":")[0] for note in notes] == ["not hooked", "hooked", "hooked"]


def test_a_batch_is_tried_with_padding_and_without():
    batch = tiny_models.batch()
    full, padded = with_and_without_padding(batch)
    assert full["attention_mask"].all()
    assert padded["attention_mask"].sum() == full["attention_mask"].sum() - 1
    without_mask = {"input_ids": batch["input_ids"]}
    assert with_and_without_padding(without_mask) == [without_mask]
    short = {"attention_mask": torch.ones(3, 1)}
    assert with_and_without_padding(short) == [short]
