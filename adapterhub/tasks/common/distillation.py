"""Distillation: an adapter learns the probabilities that a teacher gives to each token or class.

    s, t    the student's and the teacher's probabilities: softmax(logits / temperature)
    m       beta t + (1 - beta) s

    forward_kl   KL(t || s) = sum of t (log t - log s)    Hinton et al. 2015, section 2
    reverse_kl   KL(s || t) = sum of s (log s - log t)    Gu et al. 2024, equation 1
    jsd          beta KL(t || m) + (1 - beta) KL(s || m)  Agarwal et al. 2024, equation 1

    loss = mean over positions of the divergence, plus sft_weight x the cross-entropy of the labels

The positions are those with a label: the tokens of responses, or one for each row of a classifier.
Unlike Hinton et al., the divergence is not multiplied by temperature^2, as in trl. The names
and values are the same as in trl's `generalized_jsd_loss`, whose beta=0 is forward_kl and beta=1
reverse_kl. The cross-entropy is left out of texts that the student sampled: its own tokens are not
right answers.

Hinton et al. 2015, https://arxiv.org/abs/1503.02531; Agarwal et al. 2024, "On-Policy Distillation
of Language Models", https://arxiv.org/abs/2306.13649; Gu et al. 2024, "MiniLLM",
https://arxiv.org/abs/2306.08543.

`training/teacher.py` has the teacher and its pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from adapterhub.config.options import option, range_problems
from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from adapterhub.tasks.common.base import Task

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
DIVERGENCE = "divergence"
"""The metric: the mean divergence of the evaluation rows, in nats."""
LABELLED = {
    "classification", "tagging", "seq2seq", "masked-lm", "causal-lm", "image-classification",
    "audio-classification", "image-text-to-text",
}  # fmt: skip
"""Heads whose logits give one distribution for each label."""


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of a run, and how its probabilities are learned.

    Raises:
        ConfigError: a number is out of range.
    """

    model: str | None = option(
        None,
        "trained adapter or model whose probabilities are learned",
        resumed="fixed",
    )
    divergence: Divergence = option(
        "forward_kl",
        "the divergence to minimize: forward_kl, reverse_kl or jsd",
        resumed="recorded",
    )
    beta: float = option(
        0.5,
        "the teacher's share of the mixture that jsd compares both with",
        resumed="recorded",
        above=0,
    )
    temperature: float = option(
        1.0, "divides the logits of both before they are compared", resumed="recorded", above=0
    )
    on_policy: float = option(
        0.0,
        "share of the batches whose responses the student samples itself (causal-lm)",
        resumed="recorded",
        least=0,
        most=1,
    )
    sft_weight: float = option(
        0.0,
        "add this much of the labels' cross-entropy to the divergence",
        resumed="recorded",
        least=0,
    )
    dtype: str | None = option(
        None, "precision of a teacher model (null: the backbone's)", resumed="recorded"
    )
    quantize: str | None = option(
        None, "quantization of a teacher model, as `quantize`", resumed="recorded"
    )

    def __post_init__(self) -> None:
        if problems := range_problems(self):
            raise ConfigError("these options of the teacher are out of range", offenders=problems)
        if self.beta >= 1:
            raise ConfigError(
                f"teacher.beta is {self.beta:g}",
                expected="a number between 0 and 1",
                hint="teacher.divergence=reverse_kl, or forward_kl for beta=0",
            )
        if self.model is None and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise ConfigError(
                "options of a teacher without one", hint="--teacher ADAPTER, or --teacher MODEL"
            )

    def problems(self, task: Task) -> list[str]:
        """List what keeps a task from being learned from this teacher."""
        reasons = []
        if task.head not in LABELLED:
            reasons.append(f"{task.name}: its outputs are not one distribution for each label")
        elif self.on_policy and task.name != "causal-lm":
            reasons.append(f"teacher.on_policy with {task.name}: only causal-lm samples responses")
        elif self.on_policy and task.streams:
            reasons.append("teacher.on_policy with raw text, which has no prompts")
        elif self.on_policy and task.packs:
            reasons.append("teacher.on_policy with pack=true: its rows have several prompts")
        return reasons


def divergences(student: Tensor, teacher: Tensor, options: TeacherOptions) -> Tensor:
    """Return the divergence of each position, in nats: (n,).

    student, teacher: logits, (n, vocabulary). If one has more columns than the other, which is
    padding of its vocabulary, the last ones are left out.
    """
    import torch
    import torch.nn.functional as F

    columns = min(student.shape[-1], teacher.shape[-1])
    s, t = (
        F.log_softmax(logits[..., :columns].float() / options.temperature, -1)
        for logits in (student, teacher)
    )
    if options.divergence == "forward_kl":
        return _kl(t, s)
    if options.divergence == "reverse_kl":
        return _kl(s, t)
    beta = torch.tensor(options.beta, device=s.device)
    mixture = torch.logaddexp(t + beta.log(), s + torch.log1p(-beta))
    return beta * _kl(t, mixture) + (1 - beta) * _kl(s, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of log probabilities: (n, vocabulary) -> (n,)."""
    return (p.exp() * (p - q)).sum(-1)
