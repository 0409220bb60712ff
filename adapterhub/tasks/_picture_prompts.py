"""Prompts with pictures: the text before the answer, and the answers as they are learned.

chat template   the messages, with their pictures; an answer is what a message of the assistant adds
own template    with {image} and {text}, for one message; the answer ends with the token that ends
                texts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from adapterhub.backbones.end_tokens import ended, template_stops, text_stops
from adapterhub.data.picture_chats import Turn
from adapterhub.errors import ConfigError
from adapterhub.tasks._chat_template import chat_text
from adapterhub.tasks._rows import IGNORED, Row

TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What a processor returns with a value for each token; all else is of the pictures."""

_PLAIN = "{image}\n{text}\n"
_BARE = "{image}{text}"  # processors that mark a suffix end the prompt themselves


def check_picture_template(template: str | None) -> None:
    """Refuse a template without a place for the picture and the question.

    Raises:
        ConfigError: one is missing, or there are several places for the picture.
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
    """The text with a placeholder for each picture, and what follows it.

    Attributes:
        prompt: the text that the model reads.
        answer: the text that it learns to write behind it; "" to predict.
        special: whether the tokenizer adds its special tokens to the prompt.
        earlier: where answers begin and end in the prompt; they are learned, too.
    """

    prompt: str
    answer: str
    special: bool
    earlier: tuple[tuple[int, int], ...] = ()

    def pieces(self) -> list[tuple[str, bool]]:
        """Divide the prompt into texts that are read, and answers, which are learned (true)."""
        cuts = [0, *(place for span in self.earlier for place in span), len(self.prompt)]
        texts = [self.prompt[begin:end] for begin, end in pairwise(cuts)]
        return [(text, bool(number % 2)) for number, text in enumerate(texts)]


class PicturePrompts:
    """Makes prompts and tokens for one processor.

    Raises:
        ConfigError: the processor has no placeholder for pictures.
    """

    def __init__(self, processor: Any, template: str | None) -> None:
        from adapterhub.backbones.processor import image_placeholder, learns_suffix

        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        self.suffix = learns_suffix(processor)
        placeholder = image_placeholder(processor)
        if placeholder is None or self.tokenizer is None:
            raise ConfigError(
                f"{type(processor).__name__} has no token that stands for a picture",
                expected="a backbone that reads pictures among the tokens of a text, such as "
                "HuggingFaceTB/SmolVLM-256M-Instruct or Qwen/Qwen2-VL-2B-Instruct",
            )
        self.placeholder, self.chat, self.given = placeholder, None, template
        if template is None:
            self.chat = _chat_template(processor)
            template = _BARE if self.suffix else _PLAIN
        self.template = template

    def texts(self, turns: Sequence[Turn], answer: str | None) -> PromptedPicture:
        """Return the texts for some messages; the data of others may have the placeholder in it.

        Raises:
            ConfigError: the chat template has another form, or there is none for a chat.
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
        return PromptedPicture(prompt, whole[len(prompt) :], not begun, earlier)

    def _earlier(self, messages: list[dict[str, Any]], prompt: str) -> tuple[tuple[int, int], ...]:
        """Find the answers in a prompt; those with a picture are only read.

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
        return tuple(spans)

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

    def _formatted(self, turns: list[dict[str, Any]], begun: bool) -> str:
        return chat_text(self.tokenizer, turns, generation_prompt=begun, template=self.chat)

    def row(self, texts: PromptedPicture, pictures: Sequence[Any], *, labelled: bool) -> Row:
        """Return the tokens of a prompt, with those of its pictures, and of the answer.

        Args:
            texts: the prompt and the answer.
            pictures: the decoded pictures.
            labelled: whether to add the answer, and the labels.

        Raises:
            ConfigError: the processor returns a value for each token besides its tokens.
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
        """Return the tokens of a text that is read, with those of its pictures."""
        if not pictures:
            ids = self._without_end(self._ids(text, special))
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        encoded = self.processed([PromptedPicture(text, "", special)], [pictures], tensors=False)
        ids = list(encoded["input_ids"][0])
        for name in encoded.keys() - TOKENS:
            if _for_each_token(encoded[name], len(ids)):
                raise ConfigError(
                    f"{type(self.processor).__name__} returns {name}, with a value for each token",
                    expected="a backbone whose pictures are tokens of the text",
                )
        kept = len(self._without_end(ids))
        return {name: list(encoded[name][0][:kept]) for name in TOKENS & encoded.keys()}

    def _learned(self, ids: list[int]) -> Row:
        """Return the tokens of an answer; of the kind 1, they attend to what is before them."""
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
        """Return what the processor makes of some prompts and their pictures.

        Args:
            texts: the prompts.
            pictures: the decoded pictures of each.
            tensors: whether to return tensors, padded to the longest prompt; else lists.
        """
        from adapterhub.backbones.processor import picture_inputs

        prompts = [text.prompt for text in texts]
        special = texts[0].special
        return picture_inputs(self.processor, pictures, prompts, tensors=tensors, special=special)

    def _without_end(self, ids: list[int]) -> list[int]:
        """Remove the token by which a tokenizer ends texts."""
        tokenizer = self.tokenizer
        ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
        return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids

    def _answer(self, texts: PromptedPicture) -> list[int]:
        """Tokenize an answer; a template may end it, else the token that ends texts does."""
        tokenizer = self.tokenizer
        ids = self._ids(texts.answer)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        by_template = self.chat is not None and not special.isdisjoint(ids)
        return ids if by_template else ended(ids, tokenizer)

    def stops(self) -> list[int]:
        """Return the token behind an answer: the template's, else the one that ends texts."""
        by_template = template_stops(self.tokenizer, self.chat) if self.chat is not None else []
        return by_template or text_stops(self.tokenizer)


def _joined(parts: Sequence[Row]) -> Row:
    """Join the tokens of texts that are read and of answers, with what processors return of them.

    What a part lacks is zero, and texts that are read have no labels.
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
    """Return the chat template of a processor, or of its tokenizer; None: it has none."""
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return str(template) if template else None


def _for_each_token(value: Any, tokens: int) -> bool:
    """Return whether a value of one example has as many items as there are tokens."""
    shape: tuple[int, ...] = getattr(value, "shape", ())
    if not shape and isinstance(value, list) and value:
        first = value[0]
        shape = 1, len(first) if hasattr(first, "__len__") else 0
    return len(shape) > 1 and shape[1] == tokens
