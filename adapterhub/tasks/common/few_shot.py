"""Few-shot examples in front of each prompt (Brown et al. 2020, https://arxiv.org/abs/2005.14165).

The examples are drawn from training rows by a seed, and stored as options of the task in adapters
and recipes. A row that is itself an example gets only the others: its answer is never in its
prompt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Task
from adapterhub.tasks.common.batches import Setting, limit_of

Shot = tuple[str, ...]
"""The texts of an example, and its answer."""
SEPARATOR = "\n\n"
"""Separates examples that span several lines."""
EXAMPLES_HELP = "few-shot examples in front of each prompt: [[text, answer]]"
SHOTS_HELP = "few-shot examples that training draws from its rows, where `examples` are not given"


class FewShot(Task):
    """A task with the options `examples`, which precede each prompt, and `shots`."""

    examples: tuple[Shot, ...]
    shots: int

    def pools(self, examples: Sequence[Any]) -> Mapping[str, Sequence[Shot]]:
        """Return the candidate examples by label, or in one pool named ""."""
        raise NotImplementedError(self.name)

    def with_shots(self, examples: Sequence[Any], shots: int, seed: int) -> Task:
        """Draw `shots` examples per label, or in total, and put them in front of each prompt.

        The examples alternate between labels.

        Raises:
            DataError: there are too few examples.
        """
        self.check((), examples)
        pools = self.pools(examples)
        if short := [f"{n or 'examples'}: {len(p)}" for n, p in pools.items() if len(p) < shots]:
            raise DataError("too few examples of a label", offenders=short, expected=f"{shots}")
        draw = random.Random(seed)
        turns = zip(*(draw.sample(pool, shots) for pool in pools.values()), strict=True)
        drawn = tuple(shot for turn in turns for shot in turn)
        return replace(self, examples=drawn)  # type: ignore[type-var]

    def drawn(self, train: Sequence[Any], seed: int) -> Task:
        """Return the task with the examples that the option `shots` draws from training rows."""
        return self.with_shots(train, self.shots, seed) if self.draws_shots else self

    @property
    def draws_shots(self) -> bool:
        """Return whether examples are still to be drawn."""
        return self.shots > 0 and not self.examples

    def shots_before(self, *texts: str) -> list[Shot]:
        """Return the examples in front of a row: all but the row itself."""
        return [shot for shot in self.examples if shot[:-1] != texts]


def check_shots(shots: int, examples: Sequence[Shot]) -> None:
    """Reject a negative number of shots, and examples that are not a text and an answer.

    Raises:
        ConfigError: the options are invalid.
    """
    if shots < 0:
        raise ConfigError(f"shots is {shots}", expected="0 or more examples")
    if wrong := [repr(list(each)) for each in examples if len(each) != 2]:
        raise ConfigError(
            "few-shot examples that are not pairs",
            offenders=wrong,
            expected="[[text, answer], ...]",
        )


def shot_limit(setting: Setting, shot_tokens: int, others: int = 0) -> int:
    """Return the longest input with few-shot examples, which do not count as input length.

    `others` are the further tokens around a text.

    Raises:
        ConfigError: the examples leave no room for a text.
    """
    most = min(setting.positions, setting.tokenizer.model_max_length)
    if shot_tokens and shot_tokens + others >= most:
        raise ConfigError(
            f"the few-shot examples have {shot_tokens} tokens and leave no room for a text",
            expected=f"fewer or shorter ones: the model reads {most} tokens",
        )
    return min(limit_of(setting) + shot_tokens, most)


def text_room(shots: str, frame: str, behind: int, setting: Setting) -> int:
    """Count the tokens left for texts between few-shot examples and the frame around a text.

    `behind` is the number of answer tokens that are not part of the frame.

    Raises:
        ConfigError: no tokens are left.
    """
    tokenizer = setting.tokenizer
    shot_tokens = len(tokenizer(shots, add_special_tokens=False, verbose=False)["input_ids"])
    taken = len(tokenizer(shots + frame, verbose=False)["input_ids"]) + behind
    return shot_limit(setting, shot_tokens, taken - shot_tokens) - taken
