"""Images with text to text: questions about images, captions, instructions.

    example      an image, an optional question, and the answer
    row          the file, which is decoded for each batch, and the tokens of prompt and answer,
                 and of the image; `labels`: the tokens of the answer
    prediction   a generated answer
    metrics      exact match, BLEU and chrF or ROUGE; loss and perplexity of the answers

The backbone has an image encoder whose outputs replace placeholder tokens in the text of a language
model (Liu et al. 2023, https://arxiv.org/abs/2304.08485, section 4.1). The loss covers only
answers, each token predicted from the tokens before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from adapterhub.backbones.end_tokens import ended, template_stops, text_stops
from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, ColumnChoice
from adapterhub.data.image_chats import (
    PLACE,
    AskedPicture,
    PictureChat,
    Turn,
    ask,
    chat_choice,
    read_asked,
    read_chats,
)
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.data.table import first_few
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Encoded, Prediction, Task, one_row_each, register_task
from adapterhub.tasks.common.batches import IGNORED, Row, Setting, pad, without_end
from adapterhub.tasks.common.chat_template import chat_text, without_blanks
from adapterhub.tasks.common.language_models import Generation, WritesTexts, generate
from adapterhub.tasks.common.preview import learned_line, token_texts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


Asked: TypeAlias = AskedPicture | PictureChat


@register_task
@dataclass(frozen=True)
class ImageTextToText(Generation, WritesTexts):
    """Images with text to text: questions about images, captions.

    Rows of `train.csv`, with files relative to the folder of the table:

        image,question,answer
        1.png,Which animal is this?,a cat
        2.png,What color is the car?,red

    A table without questions has captions; the option `prompt` is then the question for each image.
    Chats with several messages and images use the columns `messages` and `images`, or LLaVA's; the
    assistant's messages are learned.

    The prompt is the chat template of the backbone's processor, filled with the image and the
    question. Without a chat template, or with `template`, it is the image, the question and a line
    feed. Rows are not truncated: rows longer than `tokens`, or than the backbone's limit, are
    rejected. A backbone may need thousands of tokens for a large image; `pixels` scales images down
    first.

    `predict` prints the answer:

        a cat
        {"generated": "a cat"}
    """

    metric: Literal["bleu", "rouge", "exact"] = option("exact", "metric of generated answers")
    prompt: str = option("Describe the picture.", "the question of rows without one")
    template: str | None = option(
        None, "the prompt, with {image} and {text} (null: the processor's chat template)"
    )
    tokens: int = option(4096, "longest row of image and texts; longer ones are refused")
    pixels: int | None = option(None, "scale larger images down to so many pixels (null: never)")

    name = "image-text-to-text"
    summary = "images with text to text: questions about images, captions"
    decodes = True
    input_name = "image"
    pair_name = "question"
    groups = "images"
    columns = WANTS["images with questions"]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_picture_template(self.template)
        if self.tokens < 1 or (self.pixels is not None and self.pixels < 1):
            raise ConfigError(
                f"tokens is {self.tokens}, pixels is {self.pixels}", expected="1 or more"
            )

    def for_model(self, model: PreTrainedModel) -> ImageTextToText:
        """Return the task, if the backbone generates its answer after the prompt.

        Raises:
            ConfigError: the backbone is an encoder-decoder.
        """
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{model.name_or_path} writes with a decoder of its own",
                expected="a backbone that reads images among the tokens of a text, such as "
                "LLaVA, SmolVLM or Qwen2-VL",
            )
        return self

    # Examples

    def decode(self, data: bytes) -> Any:
        """Decode an image: RGB, upright, with at most `pixels` pixels."""
        picture = open_picture(data)
        width, height = picture.size
        if self.pixels is None or width * height <= self.pixels:
            return picture
        factor = (self.pixels / (width * height)) ** 0.5
        return picture.resize((max(int(width * factor), 1), max(int(height * factor), 1)))

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns of pairs or chats; report if there are no questions."""
        if chats := chat_choice(source, options, split):
            return self, chats
        _, choice = super().fitted(source, options, split, labelled=labelled)
        if choice.options.pair is not None:
            return self, choice
        note = f"no column of questions: {self.prompt!r} is asked of each image"
        return self, ColumnChoice(choice.options, choice.table, (*choice.notes, note))

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read images with optional questions and answers, or chats."""
        if chats := chat_choice(source, options, split):
            return list(read_chats(source, chats.options, split, self.decode, labelled=labelled))
        return read_asked(source, options, split, self.columns, self.decode, labelled=labelled)

    def example(self, fields: Sequence[str], options: DataOptions) -> AskedPicture:
        """Open the image of a path, with a question."""
        return ask(fields[0], fields[1] if len(fields) > 1 else "", self.decode)

    def fields(self, options: DataOptions) -> int:
        """Return 2: an image and a question."""
        return 2

    def shown(self, example: Asked) -> list[str]:
        """Return the names of the images, and the question or the messages of a chat."""
        if len(example.turns) == 1:
            return [example.name, *[example.question] * bool(example.question)]
        lines = (f"{role}: {' '.join(p or PLACE for p in parts)}" for role, parts in example.turns)
        return [example.name, "\n".join(lines)]

    def group_of(self, example: Any) -> Hashable:
        """Return the image, which may have several questions."""
        return str(example.pictures[0].sha256)

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
        """Tokenize prompts, with the tokens of their images, and answers.

        Raises:
            DataError: rows are too long, or answers contain image tokens.
            ConfigError: the processor is not supported.
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
        """Reject rows that the model cannot read whole, and answers with an image placeholder."""
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
                hint=f"{larger}smaller images: pixels=200000 in the options of the task",
            )
        named = [row for row in rows if prompts.placeholder in row["texts"].answer]
        if named:
            raise DataError(
                f"{len(named):,} answers have {prompts.placeholder}, which stands for an image",
                offenders=first_few([_told(row) for row in named]),
                hint="take it out of the answers",
            )

    def stops(self, setting: Setting) -> list[int]:
        """Return the token after an answer."""
        return PicturePrompts(setting.processor, self.template).stops()

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Warn if no text ends."""
        return self.endless_note(data.setting)

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """Return no limits: long rows are rejected, not truncated."""
        return []

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the images of a batch, and pad its tokens on the right."""
        return self.prompt_batch(rows, setting, "right")

    def prompt_batch(self, rows: Sequence[Row], setting: Setting, side: str) -> dict[str, Tensor]:
        """Return the tokens of rows, padded on one side, and the inputs of their images."""
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
        """Return the tokens, the shapes of the image inputs, and the learned tokens."""
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
        """Generate an answer for each image."""
        rows = [_prompt_of(row) for row in data.rows]
        return list(generate(model, replace(data, rows=rows), batch_size, self))


def _prompt_of(row: Row) -> Row:
    """Return a row without its answer, which is the last learned part."""
    labels = [*row.get("labels", [IGNORED] * len(row["input_ids"]))]
    end = len(labels)
    while end and labels[end - 1] != IGNORED:
        end -= 1
    return {k: v[:end] if k in TOKENS else v for k, v in row.items() if k != "labels"}


def _told(row: Row) -> str:
    """Name a row by its image and its question."""
    example = row["file"]
    return f"{example.name} {example.question[:60]!r}" if example.question else str(example.name)


TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""The processor outputs with a value for each token; all others belong to the images."""

_PLAIN = "{image}\n{text}\n"
_BARE = "{image}{text}"  # processors that mark a suffix end the prompt themselves


def check_picture_template(template: str | None) -> None:
    """Reject a template without placeholders for the image and the question.

    Raises:
        ConfigError: a placeholder is missing, or there are several for the image.
    """
    if template is None or (template.count("{image}") == 1 and "{text}" in template):
        return
    raise ConfigError(
        f"invalid template {template!r}",
        expected="a template with {image} once, and {text}",
        hint="template='{image}\\n{text}\\n', or null for the processor's own",
    )


@dataclass(frozen=True)
class PromptedPicture:
    """The text with a placeholder for each image, and its answer.

    Attributes:
        prompt: the text that the model reads.
        answer: the text to learn after it; "" for prediction.
        special: whether the tokenizer adds special tokens to the prompt.
        earlier: the spans of answers in the prompt, which are also learned.
    """

    prompt: str
    answer: str
    special: bool
    earlier: tuple[tuple[int, int], ...] = ()

    def pieces(self) -> list[tuple[str, bool]]:
        """Split the prompt into texts that are only read, and learned answers (true)."""
        cuts = [0, *(place for span in self.earlier for place in span), len(self.prompt)]
        texts = [self.prompt[begin:end] for begin, end in pairwise(cuts)]
        return [(text, bool(number % 2)) for number, text in enumerate(texts)]


class PicturePrompts:
    """Makes prompts and tokens for one processor.

        chat template   the messages, with their images; an answer is the text that an assistant
                        message adds
        own template    with {image} and {text}, for one message; the answer ends with the
                        end-of-text token

    Raises:
        ConfigError: the processor lacks a placeholder for images.
    """

    def __init__(self, processor: Any, template: str | None) -> None:
        from adapterhub.backbones.processor import image_placeholder, learns_suffix

        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        self.suffix = learns_suffix(processor)
        placeholder = image_placeholder(processor)
        if placeholder is None or self.tokenizer is None:
            raise ConfigError(
                f"{type(processor).__name__} has no image token",
                expected="a backbone that reads images among the tokens of a text, such as "
                "HuggingFaceTB/SmolVLM-256M-Instruct or Qwen/Qwen2-VL-2B-Instruct",
            )
        self.placeholder, self.chat, self.given = placeholder, None, template
        if template is None:
            self.chat = _chat_template(processor)
            template = _BARE if self.suffix else _PLAIN
        self.template = template

    def texts(self, turns: Sequence[Turn], answer: str | None) -> PromptedPicture:
        """Return the texts for messages; untrusted data may contain the placeholder.

        Raises:
            ConfigError: the chat template is not supported, or a chat has no chat template.
        """
        pictures = sum(part is None for _, parts in turns for part in parts)
        if self.chat is None:
            return self._filled(turns, answer, pictures)
        messages = [self._message(role, parts) for role, parts in turns]
        prompt = whole = self._formatted(messages, True)
        if answer is not None:
            messages.append({"role": "assistant", "content": [_text(answer)]})
            whole = self._formatted(messages, False)
        if not whole.startswith(prompt) or prompt.count(self.placeholder) != pictures:
            count = "one" if pictures == 1 else pictures
            raise ConfigError(
                f"the chat template of {type(self.processor).__name__} does not begin an answer "
                f"behind {count} {self.placeholder}",
                expected="a template that adds the answer to the text of the question",
                hint="--task \"image-text-to-text(template='{image}\\n{text}\\n')\"",
            )
        begun = prompt.startswith(self.tokenizer.bos_token or "\0")
        earlier = self._earlier(messages[: len(turns)], prompt)
        if answer is not None:
            ((_, end),) = without_blanks(
                self._formatted, messages, whole, [(len(prompt), len(whole))]
            )
            whole = whole[:end]
        return PromptedPicture(prompt, whole[len(prompt) :], not begun, earlier)

    def _earlier(self, messages: list[dict[str, Any]], prompt: str) -> tuple[tuple[int, int], ...]:
        """Find the answers in a prompt; answers with an image are only read.

        Raises:
            ConfigError: the chat template rewrites earlier messages.
        """
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._formatted(messages[:number], True)
            through = self._formatted(messages[: number + 1], False)
            if not (prompt.startswith(through) and through.startswith(before)):
                raise ConfigError(
                    f"the chat template of {type(self.processor).__name__} rewrites earlier "
                    "messages",
                    expected="a template in which each message only adds text",
                    hint="chats with one question and its answer",
                )
            if self.placeholder not in through[len(before) :]:
                spans.append((len(before), len(through)))
        return tuple(without_blanks(self._formatted, messages, prompt, spans))

    def _filled(self, turns: Sequence[Turn], answer: str | None, pictures: int) -> PromptedPicture:
        """Fill the template of the task with a message.

        Raises:
            ConfigError: there are several messages.
        """
        if len(turns) > 1:
            raise ConfigError(
                f"a chat has {len(turns)} messages before its answer, and the prompt is a template "
                "for one",
                expected="a backbone whose processor has a chat template"
                if self.given is None
                else "the chat template of the processor",
                hint="another backbone" if self.given is None else "leave template out",
            )
        text = " ".join(part for part in map(self._cleaned, turns[0][1]) if part)
        filled = self.template.replace("{image}", self.placeholder * pictures)
        return PromptedPicture(filled.replace("{text}", text), answer or "", True)

    def _cleaned(self, part: str | None) -> str:
        return "" if part is None else part.replace(self.placeholder, "").strip()

    def _message(self, role: str, parts: Sequence[str | None]) -> dict[str, Any]:
        content = [{"type": "image"} if p is None else _text(self._cleaned(p)) for p in parts]
        return {"role": role, "content": content}

    def _formatted(self, turns: Sequence[Mapping[str, Any]], begun: bool) -> str:
        return chat_text(self.tokenizer, turns, generation_prompt=begun, template=self.chat)

    def row(self, texts: PromptedPicture, pictures: Sequence[Any], *, labelled: bool) -> Row:
        """Return the tokens of a prompt with its images, and of the answer.

        `labelled` adds the answer and labels.

        Raises:
            ConfigError: the processor returns an unknown output with a value for each token.
        """
        parts: list[Row] = []
        rest = list(pictures)
        for text, learned in texts.pieces():
            count = text.count(self.placeholder)
            own, rest = rest[:count], rest[count:]
            special = texts.special and not parts
            ids = self._ids(text) if learned else []
            parts.append(self._learned(ids) if learned else self._read(text, own, special))
        parts += [self._learned(self._answer(texts))] if labelled else []
        row = _joined(parts)
        return row if labelled else {name: row[name] for name in row if name != "labels"}

    def _read(self, text: str, pictures: Sequence[Any], special: bool) -> Row:
        """Return the tokens of a text that is only read, with the tokens of its images."""
        if not pictures:
            ids = without_end(self._ids(text, special), self.tokenizer)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        encoded = self.processed([PromptedPicture(text, "", special)], [pictures], tensors=False)
        ids = list(encoded["input_ids"][0])
        for name in encoded.keys() - TOKENS:
            if _for_each_token(encoded[name], len(ids)):
                raise ConfigError(
                    f"{type(self.processor).__name__} returns {name}, with a value for each token",
                    expected="a backbone whose images are tokens of the text",
                )
        kept = len(without_end(ids, self.tokenizer))
        return {name: list(encoded[name][0][:kept]) for name in TOKENS & encoded.keys()}

    def _learned(self, ids: list[int]) -> Row:
        """Return the tokens of an answer; tokens of type 1 attend to earlier tokens."""
        kinds = [int(self.suffix)] * len(ids)
        mask = [1] * len(ids)
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds, "labels": ids}

    def _ids(self, text: str, special: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def processed(
        self,
        texts: Sequence[PromptedPicture],
        pictures: Sequence[Sequence[Any]],
        *,
        tensors: bool = True,
    ) -> dict[str, Any]:
        """Return the processor's outputs for prompts and their images.

        Tensors are padded to the longest prompt; otherwise lists are returned.
        """
        from adapterhub.backbones.processor import picture_inputs

        prompts = [text.prompt for text in texts]
        special = texts[0].special
        return picture_inputs(self.processor, pictures, prompts, tensors=tensors, special=special)

    def _answer(self, texts: PromptedPicture) -> list[int]:
        """Tokenize an answer; it ends as in the template, or with the end-of-text token."""
        tokenizer = self.tokenizer
        ids = self._ids(texts.answer)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        by_template = self.chat is not None and not special.isdisjoint(ids)
        return ids if by_template else ended(ids, tokenizer)

    def stops(self) -> list[int]:
        """Return the token after an answer: the template's, or the end-of-text token."""
        by_template = template_stops(self.tokenizer, self.chat) if self.chat is not None else []
        return by_template or text_stops(self.tokenizer)


def _joined(parts: Sequence[Row]) -> Row:
    """Join the tokens of read texts and of answers, with further processor outputs.

    Outputs that a part lacks are zero; texts that are only read have no labels.
    """
    read = {name for part in parts if "labels" not in part for name in part}
    missing = {"labels": IGNORED}
    return {
        name: [i for p in parts for i in p.get(name, [missing.get(name, 0)] * len(p["input_ids"]))]
        for name in (*sorted(read), "labels")
    }


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _chat_template(processor: Any) -> str | None:
    """Return the chat template of a processor or of its tokenizer, or None."""
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return str(template) if template else None


def _for_each_token(value: Any, tokens: int) -> bool:
    """Return whether an output of one example has as many items as there are tokens."""
    shape: tuple[int, ...] = getattr(value, "shape", ())
    if not shape and isinstance(value, list) and value:
        first = value[0]
        shape = 1, len(first) if hasattr(first, "__len__") else 0
    return len(shape) > 1 and shape[1] == tokens
