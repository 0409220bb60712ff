"""Divergences from a teacher: their equations in plain numbers, and the loss of trl."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from adapterhub.errors import ConfigError
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.distillation import TeacherOptions, divergences
from adapterhub.training.teacher import Scores, distillation_loss

STUDENT, TEACHER = [0.5, -1.0, 2.0], [1.5, 0.0, -0.5]


def softmax(logits, temperature):
    weights = [exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def kl(p, q):
    return sum(a * (log(a) - log(b)) for a, b in zip(p, q, strict=True))


def jsd(beta):
    def of(s, t):
        m = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]
        return beta * kl(t, m) + (1 - beta) * kl(s, m)

    return of


EQUATIONS = {
    "forward_kl": lambda s, t: kl(t, s),
    "reverse_kl": kl,
    "jsd": jsd(0.5),
    "jsd, beta=0.2": jsd(0.2),
}


def options(case, **more):
    name, _, beta = case.partition(", beta=")
    return TeacherOptions("t", divergence=name, **({"beta": float(beta)} if beta else {}), **more)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("case", EQUATIONS)
def test_a_divergence_is_its_equation(case, temperature):
    how = options(case, temperature=temperature)
    padded = torch.tensor([[*TEACHER, 9.0]])  # an entry that the student's vocabulary lacks
    for teacher in (torch.tensor([TEACHER]), padded):
        (found,) = divergences(torch.tensor([STUDENT]), teacher, how).tolist()
        expected = EQUATIONS[case](softmax(STUDENT, temperature), softmax(TEACHER, temperature))
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta": 1.0}, "reverse_kl"),
        ({"beta": 0}, "beta: 0, must be more than 0"),
        ({"temperature": 0}, "temperature"),
        ({"on_policy": 1.5}, "on_policy"),
        ({"sft_weight": -1.0}, "sft_weight"),
        ({"model": None, "sft_weight": 1.0}, "without one"),
    ],
)
def test_options_out_of_range_are_refused(given, message):
    with pytest.raises(ConfigError) as error:
        TeacherOptions(**{"model": "t"} | given)
    assert message in str(error.value)


def logits(seed, rows=2, tokens=5, width=11):
    return torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([[IGNORED, IGNORED, 3, 7, IGNORED], [IGNORED, 2, 2, 4, 1]])


@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("at_once", [1, 22, 1 << 20])
def test_parts_of_positions_have_the_loss_and_gradient_of_all(at_once, weight, monkeypatch):
    monkeypatch.setattr("adapterhub.training.teacher._LOGITS", at_once)
    how, learned = options("jsd", sft_weight=weight), LABELS[:, 1:] != IGNORED
    head, targets = torch.nn.Linear(6, 11).requires_grad_(False), LABELS[:, 1:][learned]
    states = logits(3, width=6)[:, :-1].requires_grad_()
    teacher = Scores(logits(2)[:, :-1][learned])
    found = distillation_loss(Scores(states[learned], head), teacher, targets, how)
    expected = divergences(head(states[learned]), teacher.below, how).sum()
    cross = torch.nn.functional.cross_entropy(head(states[learned]), targets, reduction="sum")
    expected = expected + weight * cross
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, other in zip(
        torch.autograd.grad(3 * found, states), torch.autograd.grad(3 * expected, states),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize(
    "case", ["forward_kl", "reverse_kl", "jsd", "jsd, beta=0.1", "jsd, beta=0.9"]
)
def test_a_loss_and_its_gradients_are_those_of_trl(case, temperature):
    gkd = pytest.importorskip("trl.experimental.gkd")
    how = options(case, temperature=temperature)
    beta = {"forward_kl": 0, "reverse_kl": 1}.get(how.divergence, how.beta)
    student, teacher = (4 * logits(seed) for seed in (0, 1))
    learned, count = LABELS[:, 1:] != IGNORED, int((LABELS[:, 1:] != IGNORED).sum())
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    found = distillation_loss(
        Scores(ours[:, :-1][learned]), Scores(teacher[:, :-1][learned]), None, how
    ) / count  # fmt: skip
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        theirs[:, :-1], teacher[:, :-1], LABELS[:, 1:], beta=beta, temperature=temperature
    )
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
    found.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-6, atol=2e-6)
