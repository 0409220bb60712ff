"""Divergences from a teacher: their equations and those of trl; texts that a student samples."""

from math import exp, log

import pytest
import torch

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.tasks.common.distillation import TeacherOptions, divergences
from adapterhub.tasks.common.on_policy import sample_completions
from adapterhub.training.teacher import Scores, distillation_loss
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer

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
        ({"on_policy": 1.5}, "on_policy"),
        ({"model": None, "sft_weight": 1.0}, "without one"),
    ],
)
def test_options_out_of_range_are_refused(given, message):
    with pytest.raises(ConfigError) as error:
        TeacherOptions(**{"model": "t"} | given)
    assert message in str(error.value)


def random_logits(seed, rows=2, tokens=5, width=11):
    return torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([[IGNORED, IGNORED, 3, 7, IGNORED], [IGNORED, 2, 2, 4, 1]])


@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("at_once", [1, 22, 1 << 20])
def test_parts_of_positions_have_the_loss_and_gradient_of_all(at_once, weight, monkeypatch):
    monkeypatch.setattr("adapterhub.training.teacher._LOGITS", at_once)
    how, learned = options("jsd", sft_weight=weight), LABELS[:, 1:] != IGNORED
    head, targets = torch.nn.Linear(6, 11).requires_grad_(False), LABELS[:, 1:][learned]
    states = random_logits(3, width=6)[:, :-1].requires_grad_()
    teacher = Scores(random_logits(2)[:, :-1][learned])
    found = distillation_loss(Scores(states[learned], head), teacher, targets, how)
    expected = divergences(head(states[learned]), teacher.below, how).sum()
    cross = torch.nn.functional.cross_entropy(head(states[learned]), targets, reduction="sum")
    expected = expected + weight * cross
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(3 * loss, states) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize(
    "case", ["forward_kl", "reverse_kl", "jsd", "jsd, beta=0.1", "jsd, beta=0.9"]
)
def test_a_loss_and_its_gradients_are_those_of_trl(case, temperature):
    gkd = pytest.importorskip("trl.experimental.gkd")
    how = options(case, temperature=temperature)
    beta = {"forward_kl": 0, "reverse_kl": 1}.get(how.divergence, how.beta)
    student, teacher = (4 * random_logits(seed) for seed in (0, 1))
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


# Texts that a model samples while it is trained

TOKENIZER = word_tokenizer("<s>", "")
SETTING, TEXTS = Setting(TOKENIZER, 32, positions=64), ("the movie was", "a plot")


def prompts_of(new_tokens=6):
    task, examples = parse_task(f"causal-lm(new_tokens={new_tokens})"), map(Example, TEXTS)
    return task.encode([*examples], SETTING, labelled=False)


def trained_model():
    model = tiny_models.language_model("llama")
    tiny_models.scramble(ah.attach(model, "lora"))
    return model


def test_draws_depend_on_the_seed_alone_and_leave_the_model_as_it_was():
    model = trained_model().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    first = sample_completions(model, prompts_of(), (3, 1), copies=4)
    torch.manual_seed(9)
    assert sample_completions(model, prompts_of(), (3, 1), copies=4) == first
    assert sample_completions(model, prompts_of(), (3, 2), copies=4) != first
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(9).get_state())


def test_a_completion_ends_at_its_end_token_and_is_the_label_of_its_row():
    ends = TOKENIZER.eos_token_id
    found = sample_completions(trained_model(), prompts_of(), (0,), copies=60)
    assert {each.ended for each in found} == {True, False}
    for each in found:
        assert (each.tokens[-1] == ends) == each.ended
        assert ends not in each.tokens[:-1]
        assert each.ended or len(each.tokens) == 6
        assert each.row["input_ids"] == each.prompt + each.tokens
        assert each.row["labels"] == [-100] * len(each.prompt) + each.tokens
    assert [each.prompt for each in found[::60]] == [row["input_ids"] for row in prompts_of().rows]


def test_tokens_are_drawn_with_the_probabilities_of_the_active_adapter():
    model, rows = trained_model(), prompts_of(1)
    found = sample_completions(model, rows, (0,), copies=3000, batch_size=3000)
    counts = torch.zeros(tiny_models.VOCAB)
    for each in found[:3000]:
        counts[each.tokens[0]] += 1 / 3000
    with torch.no_grad():
        logits = model(torch.tensor([rows.rows[0]["input_ids"]])).logits[0, -1]
    expected = logits.softmax(-1)
    error = (expected * (1 - expected) / 3000).sqrt()
    assert ((counts - expected).abs() < 4.5 * error + 1e-3).all()
