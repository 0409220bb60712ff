"""Staged fine-tuning: train groups of backbone parameters, one after the other.

    stage k trains the groups 0..k          the next stage begins after `every` epochs, or
                                        after an equal part of the steps

An entry of `groups` is a word (`top 2`: the top two layers and all above them; `norms`,
`embeddings`, `everything`, `head`), a pattern over parameter names (`encoder.*.attn.*`), or several
of these joined by `+`. A parameter belongs to the first group that contains it; parameters outside
all groups stay frozen. The task head trains in every stage, so `[head, everything]` is linear
probing followed by full fine-tuning.

Parameters: the parameters of the groups.

Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution", section 3, https://arxiv.org/abs/2202.10054.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, did_you_mean
from adapterhub.methods.common.base import (
    StageSchedule,
    Unfreezing,
    Unfrozen,
    register_method,
)
from adapterhub.methods.norms import norm_parameters

WORDS = ("top 2", "norms", "embeddings", "everything", "head")
MOST_WORDS = 200  # each word is matched against every parameter


@dataclass(frozen=True)
class StagedUnfreezing(Unfreezing):
    """The base class of methods with stages.

    Training with a recipe follows the stages. In your own loop all groups train from the start,
    unless it calls `adapterhub.loop.trainee.enter_stage`.
    """

    every: int | Literal["plateau", "equal"] = option(
        1,
        "epochs per stage; equal: all stages have as many steps; plateau: until the main metric "
        "stops improving",
        least=1,
    )
    patience: int = option(1, "evaluations without improvement that count as a plateau", least=1)

    def stage_schedule(self) -> StageSchedule:
        """Begin a stage every `every` epochs, after equal parts of the run, or at each plateau."""
        if self.every == "equal":
            return StageSchedule(equal=True)
        return StageSchedule(None if self.every == "plateau" else self.every, self.patience)

    def stages(self, anatomy: Anatomy) -> dict[str, int]:
        """Return the first stage that trains each backbone parameter, by path."""
        raise NotImplementedError


@register_method
@dataclass(frozen=True)
class Staged(StagedUnfreezing):
    """Train groups of backbone parameters, one after the other."""

    name = "staged"
    training_options = ("every", "patience", "groups", "decay")
    paper = "Kumar et al. 2022, https://arxiv.org/abs/2202.10054"
    summary = "train groups of parameters one after the other: top layers, norms, everything"
    learning_rate = 5e-5

    groups: tuple[str, ...] = option(
        ("top 2", "norms", "everything"),
        "one group per stage: top N, norms, embeddings, everything, head, a pattern, or A + B",
    )
    decay: float = option(
        1.0, "learning rate divisor per layer, from the top down", least=0.01, most=100
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (words := sum(group.count("+") + 1 for group in self.groups)) > MOST_WORDS:
            raise ConfigError(f"{self.name} has {words} words", expected=f"at most {MOST_WORDS}")

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield the parameters of the groups, each from the stage of its group on.

        Raises:
            ConfigError: groups without parameters on this backbone.
        """
        above = anatomy.layers_above()
        for path, stage in self.stages(anatomy).items():
            yield Unfrozen(path, stage, self.decay ** -above[path])

    def stages(self, anatomy: Anatomy) -> dict[str, int]:
        """Return the number of the first group that contains each parameter."""
        stages: dict[str, int] = {}
        empty: list[str] = []
        for stage, group in enumerate(self.groups):
            for word in (part.strip() for part in group.split("+")):
                paths = _paths(word, anatomy)
                if not paths and word != "head":
                    empty.append(f"{word!r}{did_you_mean(word, WORDS)}")
                stages |= {path: stage for path in paths if path not in stages}
        if empty or not stages:
            raise ConfigError(
                f"groups of {self.name} name nothing on this backbone",
                offenders=empty or self.groups,
                expected="top N, norms, embeddings, everything, head, or a pattern over parameter "
                "names such as encoder.*.attn.*",
            )
        return {path: stages[path] for path in anatomy.parameters() if path in stages}


def _paths(word: str, anatomy: Anatomy) -> list[str]:
    """Return the paths of the parameters that one word of a group names."""
    parameters = anatomy.parameters()
    if word == "everything":
        return list(parameters)
    if word == "norms":
        return norm_parameters(anatomy)
    if word == "embeddings":
        return [path for path in parameters if anatomy.layer_of(path) == "below"]
    if match := re.fullmatch(r"top (\d{1,9})", word):
        above = anatomy.layers_above()
        return [path for path in parameters if above[path] < int(match[1])]
    return [path for path in parameters if fnmatch.fnmatchcase(anatomy.key(path), word)]
