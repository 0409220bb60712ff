"""What a change makes different in a step is found: loss, gradients, outputs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor, nn

import adapterhub as ah
from adapterhub.training.both_ways import BothWays, TriedBatch, with_and_without_padding


@pytest.fixture
def adapter() -> Any:
    found = ah.attach(tiny_models.usual_model("llama"), "lora")
    tiny_models.scramble(found)
    return found


def both_ways(adapter: Any, evaluated: bool = True) -> BothWays:
    batch = tiny_models.labelled_batch(adapter.model)
    return BothWays(
        adapter, TriedBatch(batch, batch if evaluated else None, lambda output, batch: output.loss)
    )


class Hook:
    """A change of one module's output, that can be undone."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        self.module, self.function, self.handle = module, function, None

    def make(self) -> None:
        self.handle = self.module.register_forward_hook(lambda m, i, output: self.function(output))

    def undo(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def difference(adapter: Any, function: Any, path: str = "model.norm", **options: Any) -> str | None:
    hook = Hook(adapter.model.get_submodule(path), function)
    try:
        return both_ways(adapter, **options).difference(hook.undo, hook.make)
    finally:
        hook.undo()


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
def test_what_differs_is_found(adapter: Any, function: Any, found: str | None) -> None:
    reason = difference(adapter, function)
    assert reason is None if found is None else str(reason).endswith(found)


def test_without_evaluation_only_the_step_is_compared(adapter: Any) -> None:
    assert difference(adapter, only_in_evaluation, evaluated=False) is None


def test_dropout_draws_the_same_in_both_ways_and_nothing_of_the_run(adapter: Any) -> None:
    before = torch.random.get_rng_state()
    assert difference(adapter, lambda output: nn.functional.dropout(output, 0.5)) is not None
    hook = Hook(adapter.model.model.norm, lambda output: nn.functional.dropout(output, 0.5))
    hook.make()
    assert both_ways(adapter).difference(lambda: None, lambda: None) is None
    hook.undo()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in adapter.parameters())


def test_a_batch_is_tried_with_padding_and_without() -> None:
    batch = tiny_models.batch()
    full, padded = with_and_without_padding(batch)
    assert full["attention_mask"].all()
    assert padded["attention_mask"].sum() == full["attention_mask"].sum() - 1
    without_mask = {"input_ids": batch["input_ids"]}
    assert with_and_without_padding(without_mask) == [without_mask]
    short = {"attention_mask": torch.ones(3, 1)}
    assert with_and_without_padding(short) == [short]
