"""Code shared by tasks on comparisons: examples, rows of two responses, reward metrics."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from adapterhub.config.options import option
from adapterhub.data.chat_formats import as_read, opening
from adapterhub.data.columns import WANTS, ColumnChoice
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import (
    Comparison,
    are_chats,
    comparison_columns,
    has_comparisons,
    read_comparisons,
)
from adapterhub.tasks.causal_lm import (
    AUTO,
    TEMPLATE_HELP,
    CausalLM,
    Chat,
    chosen_template,
    prompt_template,
    template_note,
    unused_note,
)
from adapterhub.tasks.common.base import Encoded, Prediction, Task, one_row_each
from adapterhub.tasks.common.batches import Items, Row, Setting, batch_rows, pad
from adapterhub.tasks.common.metrics import TIE_DIGITS
from adapterhub.tasks.common.preview import learned_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Compared(Prediction):
    """The rewards of the chosen and of the rejected response, and the loss."""

    chosen: float
    rejected: float
    loss: float

    @property
    def margin(self) -> float:
        """The reward of the chosen response minus the reward of the rejected one."""
        return self.chosen - self.rejected

    @property
    def right(self) -> float:
        """1 if the chosen response has the higher reward, 0.5 for a tie, else 0."""
        return 0.5 if round(self.margin, TIE_DIGITS) == 0 else float(self.margin > 0)

    def as_dict(self) -> dict[str, Any]:
        """Return both rewards."""
        return {"chosen": self.chosen, "rejected": self.rejected}

    def __str__(self) -> str:
        return f"{self.margin:.3f}"


@dataclass(frozen=True)
class Rated(Prediction):
    """The reward of a response, and the loss."""

    reward: float
    loss: float

    def right(self, liked: bool) -> float:
        """1 if a liked response has a positive reward, or a disliked one a negative, else 0.

        A reward of 0 is half right.
        """
        return 0.5 if round(self.reward, TIE_DIGITS) == 0 else float((self.reward > 0) == liked)

    def as_dict(self) -> dict[str, Any]:
        """Return the reward."""
        return {"reward": self.reward}

    def __str__(self) -> str:
        return f"{self.reward:.3f}"


@dataclass(frozen=True)
class OfComparisons(Task):
    """The examples and rows of comparisons: a row has two responses to a prompt.

    If `rated`, an example has one response, and its row has a second one for the distance from the
    reference: the response of another example.
    """

    data: Literal["pairs", "chat"] = option(
        "pairs", "prompts that are texts, or chats (lists of messages)"
    )
    template: str | None = option(AUTO, TEMPLATE_HELP)

    main_metric = "accuracy"
    measures = ("accuracy", "margin", "loss")
    lower_is_better = frozenset({"loss"})
    most_tokens = 1024
    cut_note = CausalLM.cut_note
    groups = "prompts"
    columns = WANTS["comparisons"]
    outcomes = "choices"

    def for_model(self, model: PreTrainedModel) -> OfComparisons:
        """Return the task with the template that the tokenizer of the backbone chooses."""
        return replace(self, template=chosen_template(self.template, model))

    @property
    def model_note(self) -> str:
        """Return whether the tokenizer's chat template formats the pairs."""
        return template_note(self.name) if self.data == "pairs" and self.template is None else ""

    @property
    def language(self) -> CausalLM:
        """The task that encodes a prompt with one response."""
        return CausalLM(data=self.data, template=self.template)

    @property
    def rated(self) -> bool:
        """Whether examples are rated responses."""
        return False

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read prompts with a chosen and a rejected response, or with one that is rated."""
        if not self.rated or not labelled or not has_comparisons(source, options, split):
            return read_comparisons(source, options, split, labelled=labelled, rated=self.rated)
        pairs = read_comparisons(source, options, split)
        return [replace(p, **{other: ""}) for p in pairs for other in ("rejected", "chosen")]

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns; lists of messages are read as chats."""
        rated = self.rated and not has_comparisons(source, options, split)
        chats = labelled and self.data == "pairs" and are_chats(source, options, split, rated=rated)
        task = replace(self, data="chat") if chats else self
        return task, comparison_columns(source, options, split, labelled=labelled, rated=rated)

    def shown(self, example: Comparison) -> list[str]:
        """Return the prompt."""
        return [example.text]

    def group_of(self, example: Comparison) -> Hashable:
        """Return the prompt; for a chat, its first messages."""
        return opening(example.prompt or "")

    # Rows

    def encode(
        self, examples: Sequence[Comparison], setting: Setting, *, labelled: bool
    ) -> Encoded:
        """Encode one row per example, with the tokens of two responses after the prompt."""
        if self.rated:
            # Each prompt also with the response of the example before.
            own = [e.chosen or e.rejected for e in examples]
            others = [*own[-1:], *own[:-1]]
            first = [replace(e, chosen=text) for e, text in zip(examples, own, strict=True)]
            second = [replace(e, rejected=text) for e, text in zip(examples, others, strict=True)]
        else:
            first = second = list(examples)
        responses = [
            self.language.encode(
                [self.asked(e, setting, response) for e in each], setting, labelled=True
            ).rows
            for each, response in ((first, "chosen"), (second, "rejected"))
        ]
        rows: list[Row] = [
            {"responses": list(both), "input_ids": max((r["input_ids"] for r in both), key=len)}
            for both in zip(*responses, strict=True)
        ]
        if self.rated:
            rows = [row | {"liked": e.liked} for row, e in zip(rows, examples, strict=True)]
        return one_row_each(self, examples, setting, rows)

    def asked(self, example: Comparison, setting: Setting, response: str = "") -> Example | Chat:
        """Return a prompt as an example of causal-lm, with the `response` of that name, if any.

        Only the response is learned, not earlier answers. A prompt that was a text stays a text if
        no chat template formats prompts.
        """
        text = str(getattr(example, response)) if response else None
        template = prompt_template(self.template, setting.tokenizer)
        as_text = self.data == "pairs" and template is not None and bool(example.written)
        if as_text or isinstance(example.prompt, str):
            return Example(example.text, None, text)
        if text is None:
            return Chat(example.prompt)
        return Chat((*map(as_read, example.prompt), ("assistant", text)))

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the texts of both responses that are compared, or the one that is rated."""
        lines = [learned_line(each["labels"], setting.tokenizer) for each in row["responses"]]
        if self.rated:
            return {"liked" if row["liked"] else "disliked": lines[0]}
        return dict(zip(("chosen", "rejected"), lines, strict=True))

    def padding_side(self, setting: Setting) -> str:
        """Return the right side: no token attends to padding there."""
        return "right"

    def stacked(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad all chosen responses, and then all rejected ones: (2 batch, tokens)."""
        both = [row["responses"][number] for number in (0, 1) for row in rows]
        return pad(both, setting.tokenizer, self.padding_side(setting))

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """List the keys of messages that the chat template does not use."""
        prompts = [self.asked(example, data.setting) for example in data.examples]
        chats = [prompt for prompt in prompts if isinstance(prompt, Chat)]
        return unused_note(chats, data.setting.tokenizer)

    # Metrics

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that counts comparisons."""
        return batch_rows

    def metrics(
        self, examples: Sequence[Comparison], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute how often the chosen response wins, with ties by half, and mean rewards.

        Of rated responses: how often the sign of the reward is right, and the mean reward of the
        liked ones minus the mean of the disliked ones.
        """
        if self.rated:
            return self._rated_metrics(examples, predictions)
        compared = [p for p in predictions if isinstance(p, Compared)]
        columns = zip(*((p.right, p.margin, p.loss) for p in compared), strict=True)
        means = (math.fsum(values) / len(compared) for values in columns)
        return dict(zip(self.measures, means, strict=True))

    def _rated_metrics(
        self, examples: Sequence[Comparison], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        rated = [p for p in predictions if isinstance(p, Rated)]
        marks = [e.liked for e in examples]
        right = math.fsum(p.right(liked) for p, liked in zip(rated, marks, strict=True))
        sides = [
            [p.reward for p, liked in zip(rated, marks, strict=True) if liked == side]
            for side in (True, False)
        ]
        means = [math.fsum(rewards) / len(rewards) if rewards else 0.0 for rewards in sides]
        loss = math.fsum(p.loss for p in rated) / len(rated)
        return {"accuracy": right / len(rated), "margin": means[0] - means[1], "loss": loss}

    def outcome(self, example: Comparison, prediction: Prediction) -> dict[str, Any]:
        """Return the chosen response and the one with the higher reward, or marks if rated."""
        if isinstance(prediction, Rated):
            return {
                "texts": [example.text, example.chosen or example.rejected],
                "label": "liked" if example.liked else "disliked",
                "prediction": "liked" if prediction.reward > 0 else "disliked",
                "score": 0.5 * (1 + math.tanh(abs(prediction.reward) / 2)),
                "right": prediction.right(example.liked),
            }
        assert isinstance(prediction, Compared)
        return {
            "texts": [example.text],
            "label": example.chosen,
            "prediction": example.chosen if prediction.margin > 0 else example.rejected,
            "score": 0.5 * (1 + math.tanh(abs(prediction.margin) / 2)),
            "right": prediction.right,
        }
