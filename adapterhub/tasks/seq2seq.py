"""Sequence to sequence: translation, summarization and other text-to-text tasks.

    example      a text and its target text
    row          the tokens of the filled template; `labels`: the tokens of the target
    prediction   a generated text
    metrics      BLEU and chrF, ROUGE or exact match; loss and perplexity of the targets

Training uses teacher forcing: the decoder reads the target's tokens before the one it predicts
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
from adapterhub.data.tables import first_few, read_parallel, read_table
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Encoded, Prediction, Task, one_row_each, register_task
from adapterhub.tasks.common.batches import (
    Row,
    Setting,
    cut_text,
    in_order,
    limit_of,
    rows_from_columns,
)
from adapterhub.tasks.common.few_shot import (
    EXAMPLES_HELP,
    SEPARATOR,
    SHOTS_HELP,
    FewShot,
    Shot,
    check_shots,
    text_room,
)
from adapterhub.tasks.common.language_models import WritesTargets, WritesTexts, generate
from adapterhub.tasks.common.languages import (
    LANGUAGE_COLUMNS,
    Pair,
    by_languages,
    check_languages,
    language_ids,
    speaking,
    target_start,
    with_code,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LanguagePair(Example):
    """A text and its target, each with its language."""

    src_lang: str | None = None
    tgt_lang: str | None = None


@register_task
@dataclass(frozen=True)
class Seq2Seq(FewShot, WritesTargets, WritesTexts):
    """Text to text.

    Rows of `train.jsonl`:

        {"text": "The cat sleeps.", "label": "Die Katze schläft."}
        {"text": "It is raining.", "label": "Es regnet."}

    Two parallel plain-text files are read as well: `data.train` and `data.train_target`. T5 was
    trained with a prefix: `template: "translate English to German: {text}"`.

    mBART, mBART-50, NLLB, M2M-100 and multilingual Marian models require languages:
    `seq2seq(src_lang=en_XX, tgt_lang=de_DE)`, or columns `src_lang` and `tgt_lang` in the data if
    rows differ. Marian only uses the target language. The error for a missing language lists the
    languages of the model.

    `predict` prints the generated text:

        Die Katze schläft.
        {"generated": "Die Katze schläft."}
    """

    metric: Literal["bleu", "rouge", "exact"] = option("bleu", "metric of generated texts")
    template: str = option("{text}", "the input, with {text} for the text")
    max_target: int = option(128, "longest target, in tokens; longer ones are truncated")
    src_lang: str | None = option(
        None, "language of the texts, as the tokenizer names it: en_XX, eng_Latn", omitted=True
    )
    tgt_lang: str | None = option(
        None, "language of the targets, as the tokenizer names it", omitted=True
    )
    examples: tuple[Shot, ...] = option((), EXAMPLES_HELP, omitted=True)
    shots: int = option(0, SHOTS_HELP, omitted=True)

    name = "seq2seq"
    summary = "text to text: translation, summarization"
    columns = WANTS["targets"]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template)
        check_shots(self.shots, self.examples)

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Read two columns, text and label, or two parallel plain-text files."""
        target = options.target(split)
        if labelled and target is not None:
            return _read_parallel(source, target, options.encoding)
        return read_pairs(source, options, split, labelled, languages=True)

    def for_examples(self, examples: Sequence[Example]) -> Task:
        """Return the task with the languages of the data, if all rows have the same."""
        pairs = [*map(self.languages, examples)] or [(self.src_lang, self.tgt_lang)]
        sources, targets = ({*side} for side in zip(*pairs, strict=True))
        source = sources.pop() if len(sources) == 1 else self.src_lang
        target = targets.pop() if len(targets) == 1 else self.tgt_lang
        return self.between((source, target))

    def languages(self, example: Example) -> Pair:
        """Return the languages of an example, by default the task's."""
        own = (
            (example.src_lang, example.tgt_lang)
            if isinstance(example, LanguagePair)
            else (None,) * 2
        )
        return own[0] or self.src_lang, own[1] or self.tgt_lang

    def pools(self, examples: Sequence[Example]) -> dict[str, list[Shot]]:
        """Return the texts and their targets, each once.

        Raises:
            ConfigError: the examples have several languages.
        """
        if len({*map(self.languages, examples)}) > 1:
            raise ConfigError(
                "few-shot examples of several languages",
                expected="data of one source and one target language",
            )
        return {"": [*dict.fromkeys((e.text, str(e.label)) for e in examples)]}

    def between(self, languages: Pair) -> Seq2Seq:
        """Return the task between two languages; None keeps the task's own language."""
        source, target = languages
        return replace(self, src_lang=source or self.src_lang, tgt_lang=target or self.tgt_lang)

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns, unless the data is two parallel files."""
        if labelled and options.target(split) is not None:
            return self, ColumnChoice(options)
        return self, fitted_pairs(source, options, split, labelled)

    # Rows

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Tokenize inputs and targets, each truncated to its own limit.

        Raises:
            ConfigError: the tokenizer is multilingual, and the languages of a text are unknown.
        """
        texts = [self._input(e.text, setting) for e in examples]
        pairs = [self.languages(e) for e in examples]
        check_languages(pairs, (self.src_lang, self.tgt_lang), texts, setting.tokenizer)
        rows: dict[int, Row] = {}
        for pair, indices in by_languages(pairs).items():
            spoken = [with_code(texts[i], pair, setting.tokenizer) for i in indices]
            targets = [str(examples[i].label) for i in indices] if labelled else None
            with speaking(setting.tokenizer, pair):
                encoded = self._encode(spoken, targets, setting)
            rows |= zip(indices, encoded, strict=True)
        return one_row_each(self, examples, setting, in_order(rows))

    def _input(self, text: str, setting: Setting) -> str:
        """Return the filled template after the few-shot examples, cut to the room they leave."""
        filled = self.template.replace("{text}", text)
        shots = "".join(
            self.template.replace("{text}", shown) + f"\n{target}{SEPARATOR}"
            for shown, target in self.shots_before(text)
        )
        if not shots:
            return filled
        room = text_room(shots, self.template.replace("{text}", ""), 0, setting)
        cut = cut_text(text, setting.tokenizer, max(room, 1))
        return shots + self.template.replace("{text}", cut)

    def _encode(self, texts: list[str], targets: list[str] | None, setting: Setting) -> list[Row]:
        tokenizer = setting.tokenizer
        most = limit_of(setting)
        if self.examples:  # texts after them are cut already
            most = min(setting.positions, tokenizer.model_max_length)
        rows = rows_from_columns(tokenizer(texts, truncation=True, max_length=most))
        for row in rows:
            row.pop("token_type_ids", None)
        if targets is not None:
            limit = min(self.max_target, setting.positions)
            encoded = tokenizer(text_target=targets, truncation=True, max_length=limit)
            whole = bool(language_ids(tokenizer))  # mBART's targets end with their language
            for row, ids in zip(rows, encoded["input_ids"], strict=True):
                row["labels"] = ids if whole else ended(ids, tokenizer, limit)
        return rows

    def unlimited(self) -> Seq2Seq:
        """Return the task without a limit on targets."""
        return replace(self, max_target=1 << 30)

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether neither the input nor the target is truncated."""
        return not self.examples and all(
            length <= limit
            for length, (_, _, limit) in zip(
                self.row_lengths(row), self.limits(setting), strict=True
            )
        )

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """Add the limit of the targets, which have their own."""
        limit = min(self.max_target, setting.positions)
        return [*super().limits(setting), ("targets", "max_target of the task", limit)]

    def row_lengths(self, row: Row) -> list[int]:
        """Count the tokens of the input and of the target."""
        return [len(row["input_ids"]), len(row.get("labels", ()))]

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Warn if no text ends."""
        return self.endless_note(data.setting)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate a text for each example, in its language."""
        groups = by_languages([self.languages(example) for example in data.examples])
        written: dict[int, Prediction] = {}
        for pair, indices in groups.items():
            part = data if len(groups) == 1 else _part(data, indices)
            texts = generate(model, part, batch_size, self.between(pair))
            written |= zip(indices, texts, strict=True)
        return in_order(written)

    def start_options(self, model: PreTrainedModel, setting: Setting) -> dict[str, Any]:
        """Return the options that start the decoder at the target language."""
        return target_start(model, setting.tokenizer, (self.src_lang, self.tgt_lang))


def _part(data: Encoded, indices: Sequence[int]) -> Encoded:
    examples, rows = [data.examples[i] for i in indices], [data.rows[i] for i in indices]
    return replace(data, examples=examples, rows=rows, owners=range(len(rows)))


def check_template(template: str) -> None:
    """Reject a template without {text}.

    Raises:
        ConfigError: the template lacks {text}.
    """
    if "{text}" not in template:
        raise ConfigError(f"invalid template {template!r}", expected="a template with {text}")


def read_pairs(
    source: str, options: DataOptions, split: str, labelled: bool, *, languages: bool = False
) -> list[Example]:
    """Read texts and targets from two columns, and their `languages` if the data has them.

    Raises:
        DataError: the source cannot be read, a text is missing, or a text with a target is empty.
    """
    choice = fitted_pairs(source, options, split, labelled)
    text_column, label_column = choice.options.text_column, choice.options.label_column

    columns = [text_column, label_column] if labelled else [text_column]
    named = read_table(source, choice.options, split).columns if languages else ()
    codes = [name for name in LANGUAGE_COLUMNS if name in named and name not in columns]

    def build(text: Any, *cells: Any) -> Example:
        target = cells[0] if labelled else None
        own = dict(zip(codes, cells[labelled:], strict=True))
        refuse(text_problem(text, text_column, allow_empty=not labelled))
        if labelled:
            refuse(text_problem(target, label_column, allow_empty=False))
        refuse(*(text_problem(code, name, allow_empty=False) for name, code in own.items()))
        return LanguagePair(text, None, target, **own) if own else Example(text, None, target)

    columns += codes
    return read_rows(source, choice.options, split, columns, build)


def fitted_pairs(source: str, options: DataOptions, split: str, labelled: bool) -> ColumnChoice:
    """Infer the columns of texts and targets, including instruction formats.

    Raises:
        DataError: the source cannot be read, or its columns are ambiguous.
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
