"""Texts that a language model samples while it is trained, as tokens.

The model samples from its own distribution with the adapter that is active: every token of the
vocabulary is a candidate, with the probability that the model gives it. The draws depend on the
weights and the seed alone; random states of torch are neither read nor changed. Modules that are in
training mode are so again afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adapterhub.backbones.end_tokens import with_stops
from adapterhub.status import Display, showing
from adapterhub.tasks.common.base import Encoded
from adapterhub.tasks.common.batches import IGNORED, Row
from adapterhub.tasks.common.language_models import Generation, Writing, generated_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Completion:
    """A sampled continuation of a prompt.

    Attributes:
        prompt: the tokens of the prompt, as the model got them.
        tokens: the sampled tokens, with the token that ends the text if it was reached.
        ended: whether it was reached, before the longest length.
    """

    prompt: list[int]
    tokens: list[int]
    ended: bool

    @property
    def row(self) -> Row:
        """The row of prompt and completion, with the completion as labels."""
        ids = self.prompt + self.tokens
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": [IGNORED] * len(self.prompt) + self.tokens,
        }


def sample_completions(
    model: PreTrainedModel,
    prompts: Encoded,
    seed: Sequence[int],
    *,
    copies: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int = 64,
) -> list[Completion]:
    """Sample continuations of prompts from a decoder that is being trained.

    Args:
        model: the model, with the adapter that samples active.
        prompts: the rows of prompts, encoded by a task that generates: `labelled=False`.
        seed: numbers that determine the draws, such as the seed of a run and the step.
        copies: the continuations of each prompt, which follow each other in the result.
        temperature: divides the logits.
        top_p: samples from the most probable tokens whose total probability reaches this value.
        batch_size: the most rows that are generated at a time.

    Raises:
        TypeError: the task of the prompts does not generate.
    """
    import numpy as np
    import torch

    from adapterhub.anatomy.backbone import Backbone
    from adapterhub.backbones.probe import evaluation_mode

    task = prompts.task
    if not isinstance(task, Generation):
        raise TypeError(f"{task.name} does not generate texts")
    rows = [row for row in prompts.rows for _ in range(copies)]
    repeated = replace(prompts, rows=rows, owners=tuple(range(len(rows))))
    ends = {*with_stops(Backbone.of(model).stops, task.stops(prompts.setting))}
    device = model.device
    number = int(np.random.SeedSequence([*seed]).generate_state(1)[0])
    devices = [device] if device.type == "cuda" else []
    # The checkpoint may set a penalty, under which the texts are not the model's own.
    sampling = Writing(temperature=temperature, top_p=top_p).sampling(repetition_penalty=1.0)
    with torch.random.fork_rng(devices=devices), evaluation_mode(model), showing(Display()):
        torch.manual_seed(number)
        with sampling:
            generated = generated_tokens(model, repeated, batch_size, replace(task, beams=1))
    return [
        _completion(row["input_ids"], ids, ends) for row, ids in zip(rows, generated, strict=True)
    ]


def _completion(prompt: list[int], tokens: list[int], ends: set[int]) -> Completion:
    """Return a completion without the padding after its end."""
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    return Completion(prompt, tokens if end is None else tokens[: end + 1], end is not None)
