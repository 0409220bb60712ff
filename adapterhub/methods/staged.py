"""Staged fine-tuning: groups of backbone parameters join the training one after the other.

    stage k trains the groups 0..k          the next stage begins after `every` epochs

A group is what one entry of `groups` names: a word (`top 2` layers with what stands above them,
`norms`, `embeddings`, `everything`, `head`), a pattern over parameter names (`encoder.*.attn.*`),
or several of these joined by `+`. A parameter belongs to the first group that names it; what none
names stays frozen. The task head trains in every stage, so `[head, everything]` is linear probing
followed by full fine-tuning. Parameters: those of the groups.

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
from adapterhub.backbones.layer_depth import layers_above
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, did_you_mean
from adapterhub.methods._base import StageSchedule, Unfreezing, Unfrozen, register_method
from adapterhub.methods._options import require_decay, require_positive
from adapterhub.methods.norms import norm_parameters

WORDS = ("top 2", "norms", "embeddings", "everything", "head")
MOST_WORDS = 200  # each is compared with every parameter


@dataclass(frozen=True)
class Paced(Unfreezing):
    """What methods with stages share: when the next one begins.

    Training with a recipe follows the stages. Another loop trains all groups from the start, unless
    it calls `adapterhub.training.stages.enter` itself.
    """

    every: int | Literal["plateau"] = option(
        1, "epochs in a stage; plateau: until the main metric stops to improve"
    )
    patience: int = option(1, "evaluations without improvement that are a plateau")

    def __post_init__(self) -> None:
        numbers = ("every",) if self.every != "plateau" else ()
        require_positive(self, *numbers, "patience")

    def pace(self) -> StageSchedule:
        """A stage each `every` epochs, or at each plateau."""
        return StageSchedule(None if self.every == "plateau" else self.every, self.patience)

    def stages(self, anatomy: Anatomy) -> dict[str, int]:
        """The stage from which each backbone parameter trains."""
        raise NotImplementedError


@register_method
@dataclass(frozen=True)
class Staged(Paced):
    """Chosen groups of backbone parameters join one after the other."""

    name = "staged"
    paper = "Kumar et al. 2022, https://arxiv.org/abs/2202.10054"
    summary = "groups of the backbone train one after the other: top layers, norms, everything"
    learning_rate = 5e-5

    groups: tuple[str, ...] = option(
        ("top 2", "norms", "everything"),
        "what joins in each stage: top N, norms, embeddings, everything, head, a pattern, or A + B",
    )
    decay: float = option(1.0, "the learning rate of a layer: that of the layer above over this")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_decay(self)
        if (words := sum(group.count("+") + 1 for group in self.groups)) > MOST_WORDS:
            raise ConfigError(f"{self.name} has {words} words", expected=f"at most {MOST_WORDS}")

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """The parameters of the groups, from the stage of their group on.

        Raises:
            ConfigError: groups that name nothing on this backbone.
        """
        above = layers_above(anatomy)
        for path, stage in self.stages(anatomy).items():
            yield Unfrozen(path, stage, self.decay ** -above[path])

    def stages(self, anatomy: Anatomy) -> dict[str, int]:
        """The first group that names each parameter."""
        found: dict[str, int] = {}
        wrong: list[str] = []
        for stage, group in enumerate(self.groups):
            for word in (part.strip() for part in group.split("+")):
                paths = _named(word, anatomy)
                if not paths and word != "head":
                    wrong.append(f"{word!r}{did_you_mean(word, WORDS)}")
                found |= {path: stage for path in paths if path not in found}
        if wrong or not found:
            raise ConfigError(
                f"groups of {self.name} name nothing on this backbone",
                offenders=wrong or self.groups,
                expected="top N, norms, embeddings, everything, head, or a pattern over parameter "
                "names such as encoder.*.attn.*",
            )
        return {path: found[path] for path in anatomy.parameters() if path in found}


def _named(word: str, anatomy: Anatomy) -> list[str]:
    """The backbone parameters that one word of a group names."""
    parameters = anatomy.parameters()
    if word == "everything":
        return list(parameters)
    if word == "norms":
        return norm_parameters(anatomy)
    if word == "embeddings":
        return [path for path in parameters if anatomy.layer_of(path) == "below"]
    if match := re.fullmatch(r"top (\d{1,9})", word):
        above = layers_above(anatomy)
        return [path for path in parameters if above[path] < int(match[1])]
    return [path for path in parameters if fnmatch.fnmatchcase(anatomy.key(path), word)]
