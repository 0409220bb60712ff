"""Pictures with text to text: questions on pictures, captions, instructions.

    example      a picture, a question or none, and the answer
    row          the file, which is decoded for each batch, and the tokens of prompt and answer,
                 with those of the picture; `labels`: the tokens of the answer
    prediction   a generated answer
    metrics      exact match, BLEU and chrF or ROUGE; loss and perplexity of the answers

The backbone has an encoder of pictures whose outputs take the places of tokens in the text of a
language model (Liu et al. 2023, https://arxiv.org/abs/2304.08485, section 4.1). The loss covers
only answers, each token predicted from those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, ColumnChoice
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.data.picture_chats import (
    PLACE,
    AskedPicture,
    PictureChat,
    Turn,
    ask,
    chat_choice,
    read_asked,
    read_chats,
)
from adapterhub.data.table import first_few
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks._base import Encoded, Prediction, Task, one_row_each
from adapterhub.tasks._generation import Generation, WritesTexts, generate
from adapterhub.tasks._picture_prompts import (
    TOKENS,
    PicturePrompts,
    PromptedPicture,
    check_picture_template,
)
from adapterhub.tasks._registry import register_task
from adapterhub.tasks._rows import IGNORED, Row, Setting, pad
from adapterhub.tasks._show import learned_line, token_texts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Asked: TypeAlias = AskedPicture | PictureChat


@register_task
@dataclass(frozen=True)
class ImageTextToText(Generation, WritesTexts):
    """Pictures with text to text: questions on pictures, captions.

    Rows of `train.csv`, with files relative to the folder of the table:

        image,question,answer
        1.png,Which animal is this?,a cat
        2.png,What color is the car?,red

    A table without questions has captions; the option `prompt` is then asked of each picture.
    Chats with several messages and pictures are columns `messages` and `images`, or those of LLaVA;
    the messages of the assistant are learned.

    The prompt is the chat template of the backbone's processor, filled with the picture and the
    question; without one, or with `template`, it is the picture, the question and a line feed. No
    row is cut: one that is longer than `tokens`, or than the backbone reads, is refused. A backbone
    may need thousands of tokens for a large picture; `pixels` scales pictures down first.

    `predict` prints the answer:

        a cat
        {"generated": "a cat"}
    """

    metric: Literal["bleu", "rouge", "exact"] = option("exact", "metric of generated answers")
    prompt: str = option("Describe the picture.", "the question of rows without one")
    template: str | None = option(
        None, "the prompt, with {image} and {text} (null: the processor's chat template)"
    )
    tokens: int = option(4096, "longest row of picture and texts; longer ones are refused")
    pixels: int | None = option(None, "scale larger pictures down to so many pixels (null: never)")

    name = "image-text-to-text"
    summary = "pictures with text to text: questions on pictures, captions"
    decodes = True
    input_name = "image"
    pair_name = "question"
    columns = WANTS["asked pictures"]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_picture_template(self.template)
        if self.tokens < 1 or (self.pixels is not None and self.pixels < 1):
            raise ConfigError(
                f"tokens is {self.tokens}, pixels is {self.pixels}", expected="1 or more"
            )

    def for_model(self, model: PreTrainedModel) -> ImageTextToText:
        """Return the task, if the backbone writes its answer behind the prompt.

        Raises:
            ConfigError: it is an encoder-decoder.
        """
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{model.name_or_path} writes with a decoder of its own",
                expected="a backbone that reads pictures among the tokens of a text, such as "
                "LLaVA, SmolVLM or Qwen2-VL",
            )
        return self

    # Examples

    def decode(self, data: bytes) -> Any:
        """Decode a picture: RGB, upright, with `pixels` pixels at most."""
        picture = open_picture(data)
        width, height = picture.size
        if self.pixels is None or width * height <= self.pixels:
            return picture
        factor = (self.pixels / (width * height)) ** 0.5
        return picture.resize((max(int(width * factor), 1), max(int(height * factor), 1)))

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Choose columns, or those of chats; that there are no questions is told."""
        if chats := chat_choice(source, options, split):
            return self, chats
        _, choice = super().fitted(source, options, split, labelled=labelled)
        if choice.options.pair is not None:
            return self, choice
        asked = f"no column of questions: {self.prompt!r} is asked of each picture"
        return self, ColumnChoice(choice.options, choice.table, (*choice.notes, asked))

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read pictures, their questions if there are some, and the answers; or chats."""
        if chats := chat_choice(source, options, split):
            return list(read_chats(source, chats.options, split, self.decode, labelled=labelled))
        return read_asked(source, options, split, self.columns, self.decode, labelled=labelled)

    def example(self, fields: Sequence[str], options: DataOptions) -> AskedPicture:
        """Open the picture of a path, with a question."""
        return ask(fields[0], fields[1] if len(fields) > 1 else "", self.decode)

    def fields(self, options: DataOptions) -> int:
        """Return 2: a picture and a question."""
        return 2

    def shown(self, example: Asked) -> list[str]:
        """Return the names of the pictures, and the question, or the messages of a chat."""
        if len(example.turns) == 1:
            return [example.name, *[example.question] * bool(example.question)]
        lines = (f"{role}: {' '.join(p or PLACE for p in parts)}" for role, parts in example.turns)
        return [example.name, "\n".join(lines)]

    # Rows

    def _texts(self, example: Asked, prompts: PicturePrompts) -> PromptedPicture:
        turns: tuple[Turn, ...] = example.turns
        if not example.question:
            *before, (role, parts) = turns
            turns = (*before, (role, (*(p for p in parts if p is None), self.prompt)))
        return prompts.texts(turns, example.label)

    def _decoded(self, example: Asked) -> list[Any]:
        return [picture.decoded(self.decode) for picture in example.pictures]

    def encode(self, examples: Sequence[Asked], setting: Setting, *, labelled: bool) -> Encoded:
        """Tokenize prompts, with as many tokens as each picture takes, and answers.

        Raises:
            DataError: rows are longer than they may be, or answers have tokens of pictures.
            ConfigError: the processor is of another kind.
        """
        prompts = PicturePrompts(setting.processor, self.template)
        rows: list[Row] = []
        for example in examples:
            texts = self._texts(example, prompts)
            row = prompts.row(texts, self._decoded(example), labelled=labelled)
            rows.append(row | {"file": example, "texts": texts})
        self._check(rows, setting, prompts)
        return one_row_each(self, examples, setting, rows)

    def _check(self, rows: Sequence[Row], setting: Setting, prompts: PicturePrompts) -> None:
        """Refuse rows of which the model would not read all, and answers that name a picture.

        Args:
            rows: the rows.
            setting: how many tokens the backbone reads.
            prompts: what made the rows.
        """
        reads = min(setting.positions, setting.tokenizer.model_max_length)
        most = min(self.tokens, reads)
        long = [row for row in rows if self.size(row) > most]
        if long:
            needed = max(map(self.size, long))
            larger = f"--task 'image-text-to-text(tokens={needed})', or " * (needed <= reads)
            raise DataError(
                f"{len(long):,} of {len(rows):,} rows are longer than {most:,} tokens",
                offenders=first_few([f"{_told(r)}: {self.size(r):,} tokens" for r in long]),
                expected=f"rows of which the backbone reads all: {reads:,} tokens at most",
                hint=f"{larger}smaller pictures: pixels=200000 in the options of the task",
            )
        named = [row for row in rows if prompts.placeholder in row["texts"].answer]
        if named:
            raise DataError(
                f"{len(named):,} answers have {prompts.placeholder}, which stands for a picture",
                offenders=first_few([_told(row) for row in named]),
                hint="take it out of the answers",
            )

    def stops(self, setting: Setting) -> list[int]:
        """Return the token behind an answer."""
        return PicturePrompts(setting.processor, self.template).stops()

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Say if no text ends."""
        return self.endless_note(data.setting)

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """Return no limit: rows are refused, and none is truncated."""
        return []

    def size(self, row: Row) -> int:
        """Return the number of tokens, with those of the picture."""
        return len(row["input_ids"])

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the pictures of a batch, and pad its tokens on the right."""
        return self.prompt_batch(rows, setting, "right")

    def prompt_batch(self, rows: Sequence[Row], setting: Setting, side: str) -> dict[str, Tensor]:
        """Return the tokens of some rows, padded on a side, and the inputs of their pictures.

        Args:
            rows: the rows.
            setting: the processor.
            side: the side on which tokens are padded.
        """
        kept = TOKENS | {"labels"}
        tokens = [{k: v for k, v in row.items() if k in kept} for row in rows]
        batch = pad(tokens, setting.tokenizer, side)
        if not rows:
            return batch
        prompts = PicturePrompts(setting.processor, self.template)
        pictures = [self._decoded(row["file"]) for row in rows]
        processed = prompts.processed([row["texts"] for row in rows], pictures)
        return batch | {k: v for k, v in processed.items() if k not in kept}

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens, the shapes of the picture's inputs, and what is learned."""
        texts = groupby(token_texts(row["input_ids"], setting.tokenizer))
        counted = [(text, len(list(group))) for text, group in texts]
        words = (f"{text}x{n}" if n > 3 else " ".join([text] * n) for text, n in counted)
        facts = {"tokens": " ".join(words)}
        batch = self.collate([row], setting)
        pictures = batch.keys() - TOKENS - {"labels"}
        facts |= {name: " x ".join(map(str, batch[name].shape)) for name in sorted(pictures)}
        if "labels" in row:
            facts["learned"] = learned_line(row["labels"], setting.tokenizer)
        return facts

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate an answer for each picture."""
        rows = [_prompt_of(row) for row in data.rows]
        return list(generate(model, replace(data, rows=rows), batch_size, self))


def _prompt_of(row: Row) -> Row:
    """Return a row without the answer, which is the last of those that are learned."""
    labels = [*row.get("labels", [IGNORED] * len(row["input_ids"]))]
    end = len(labels)
    while end and labels[end - 1] != IGNORED:
        end -= 1
    return {k: v[:end] if k in TOKENS else v for k, v in row.items() if k != "labels"}


def _told(row: Row) -> str:
    """Name a row: its picture and its question."""
    example = row["file"]
    return f"{example.name} {example.question[:60]!r}" if example.question else str(example.name)
