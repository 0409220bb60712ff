"""Sequence to sequence: translation, summarization and other text-to-text tasks.

    example      a text and its target text
    row          the tokens of the filled template; `labels`: the tokens of the target
    prediction   a generated text
    metrics      BLEU and chrF, ROUGE or exact match; loss and perplexity of the targets

Training uses teacher forcing: the decoder sees the target's tokens before the one it predicts
(Sutskever et al. 2014, https://arxiv.org/abs/1409.3215). Evaluation generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from adapterhub.backbones.end_tokens import ended
from adapterhub.config.options import option
from adapterhub.data.chat_formats import instruction_columns
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.examples import Example, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few, read_parallel
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import Encoded, Prediction, Task, one_row_each
from adapterhub.tasks._language_models import WritesTargets, WritesTexts, generate
from adapterhub.tasks._registry import register_task
from adapterhub.tasks._rows import Row, Setting, limit_of, rows_from_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_task
@dataclass(frozen=True)
class Seq2Seq(WritesTargets, WritesTexts):
    """Text to text.

    Rows of `train.jsonl`:

        {"text": "The cat sleeps.", "label": "Die Katze schläft."}
        {"text": "It is raining.", "label": "Es regnet."}

    Two parallel plain-text files are read as well: `data.train` and `data.train_target`. T5 was
    trained with a prefix: `template: "translate English to German: {text}"`.

    `predict` prints the generated text:

        Die Katze schläft.
        {"generated": "Die Katze schläft."}
    """

    metric: Literal["bleu", "rouge", "exact"] = option("bleu", "metric of generated texts")
    template: str = option("{text}", "the input, with {text} for the text")
    max_target: int = option(128, "longest target, in tokens; longer ones are truncated")

    name = "seq2seq"
    summary = "text to text: translation, summarization"
    columns = WANTS["targets"]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template)

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Read two columns, text and label, or two parallel plain-text files."""
        target = options.target(split)
        if labelled and target is not None:
            return _read_parallel(source, target, options.encoding)
        return read_pairs(source, options, split, labelled)

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Choose columns, unless the data is two parallel files."""
        if labelled and options.target(split) is not None:
            return self, ColumnChoice(options)
        return self, fitted_pairs(source, options, split, labelled)

    # Rows

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Tokenize inputs and targets, each truncated to its own limit."""
        texts = [self.template.replace("{text}", e.text) for e in examples]
        rows = rows_from_columns(
            setting.tokenizer(texts, truncation=True, max_length=limit_of(setting))
        )
        for row in rows:
            row.pop("token_type_ids", None)
        if labelled:
            limit = min(self.max_target, setting.positions)
            targets = [str(e.label) for e in examples]
            encoded = setting.tokenizer(text_target=targets, truncation=True, max_length=limit)
            for row, ids in zip(rows, encoded["input_ids"], strict=True):
                row["labels"] = ended(ids, setting.tokenizer, limit)
        return one_row_each(self, examples, setting, rows)

    def unlimited(self) -> Seq2Seq:
        """Return the task without a limit of targets."""
        return replace(self, max_target=1 << 30)

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether neither the input nor the target is truncated."""
        return all(
            length <= limit
            for length, (_, _, limit) in zip(
                self.row_lengths(row), self.limits(setting), strict=True
            )
        )

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """Add the targets, which have a limit of their own."""
        limit = min(self.max_target, setting.positions)
        return [*super().limits(setting), ("targets", "max_target of the task", limit)]

    def row_lengths(self, row: Row) -> list[int]:
        """Count the tokens of the input and of the target."""
        return [len(row["input_ids"]), len(row.get("labels", ()))]

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Say if no text ends."""
        return self.endless_note(data.setting)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate a text for each example."""
        return list(generate(model, data, batch_size, self))


def check_template(template: str) -> None:
    """Refuse a template without {text}.

    Raises:
        ConfigError: it has none.
    """
    if "{text}" not in template:
        raise ConfigError(f"invalid template {template!r}", expected="a template with {text}")


def read_pairs(source: str, options: DataOptions, split: str, labelled: bool) -> list[Example]:
    """Read texts and their targets from two columns.

    Raises:
        DataError: the source cannot be read, a text is missing, or one with a target is empty.
    """
    choice = fitted_pairs(source, options, split, labelled)
    text_column, label_column = choice.options.text_column, choice.options.label_column

    def build(text: Any, target: Any = None) -> Example:
        refuse(text_problem(text, text_column, allow_empty=not labelled))
        if labelled:
            refuse(text_problem(target, label_column, allow_empty=False))
        return Example(text, None, target)

    columns = [text_column, label_column] if labelled else [text_column]
    return read_rows(source, choice.options, split, columns, build)


def fitted_pairs(source: str, options: DataOptions, split: str, labelled: bool) -> ColumnChoice:
    """Choose the columns of texts and targets, also those of formats of instructions.

    Raises:
        DataError: the source cannot be read, or its columns are in doubt.
    """
    choice = instruction_columns(source, options, split)
    return choice or choose_columns(source, options, split, Seq2Seq.columns, labelled=labelled)


def _read_parallel(source: str, target: str, encoding: str | None) -> list[Example]:
    table = read_parallel(source, target, encoding)
    texts, targets = (list(map(str, column)) for column in table.take(["text", "target"]))
    for file, column in ((source, texts), (target, targets)):
        if empty := [f"line {i}" for i, text in enumerate(column, start=1) if not text.strip()]:
            raise DataError(
                f"{file} has empty lines",
                offenders=first_few(empty),
                hint="delete these lines in both files",
            )
    return [Example(text, None, label) for text, label in zip(texts, targets, strict=True)]
