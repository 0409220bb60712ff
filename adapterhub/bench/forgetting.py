"""What a backbone forgets: how much worse it predicts held text with an adapter than without.

The text is scored by the backbone's own language-model head, so only tasks that train that head's
model have it. Each kind of model is scored by the task that it was pre-trained with, with the same
masks or dropped spans for all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attached import disabled
from adapterhub.data.examples import data_hash, read_texts, sample
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.tasks import TASKS, Encoded, Setting, Task, parse_task
from adapterhub.tasks.causal_lm import CausalLM
from adapterhub.tasks.masked_lm import MaskedLM
from adapterhub.tasks.span_corruption import SpanCorruption

MOST_TEXTS = 200
LENGTH = 512  # tokens of a text that are read at once
_SEED = 0  # of masks and of dropped spans
_SCORED_BY: Mapping[str, Callable[[], Task]] = {
    "causal-lm": lambda: CausalLM(data="text"),
    "masked-lm": MaskedLM,
    "seq2seq": SpanCorruption,
}


@dataclass(frozen=True)
class HeldText:
    """Texts that nothing is trained on."""

    examples: tuple[Any, ...]

    @property
    def digest(self) -> str:
        """The sha256 of the texts."""
        return data_hash(list(self.examples))


def read_held(source: str, task: Task) -> HeldText:
    """Read held text for a task, some texts of it at most.

    Args:
        source: a text file with a text on each line, or a file with a column of texts.
        task: the task of the runs.

    Raises:
        ConfigError: the model of the task has no language-model head.
        DataError: the texts cannot be read.
    """
    if task.head not in _SCORED_BY:
        raise ConfigError(
            f"bench.held with {task.name}: its model has no language-model head that could read "
            "the text",
            expected=f"a task with one: {', '.join(_tasks_with_head())}",
            hint="leave bench.held out",
        )
    return HeldText(tuple(sample(read_texts(source, DataOptions()), MOST_TEXTS, _SEED)))


def _tasks_with_head() -> list[str]:
    return [name for name in sorted(TASKS) if parse_task(name).head in _SCORED_BY]


def encode_held(held: HeldText, kind: str, setting: Setting) -> Encoded:
    """Encode held text for the head of a language model.

    Args:
        held: the text.
        kind: the kind of the model, the `head` of a task.
        setting: the tokenizer and the positions of the model.

    Raises:
        ConfigError: the tokenizer lacks what the model was pre-trained with.
    """
    most = min(setting.max_length, LENGTH)
    setting = replace(setting, max_length=most, labels=(), seed=_SEED)
    return _SCORED_BY[kind]().encode(held.examples, setting, labelled=True)


def forgetting_of(adapter: Adapter, held: Encoded, batch_size: int) -> float:
    """Return the rise of the loss per token of held text that an adapter causes, in nats.

    Args:
        adapter: the active adapter.
        held: the text, encoded.
        batch_size: rows of a forward pass.
    """
    model = adapter.model
    with disabled(model):
        bare = held.task.evaluate(model, held, batch_size)["loss"]
    return held.task.evaluate(model, held, batch_size)["loss"] - bare
