"""Dialogues in one text: split into turns by common marks of speakers.

    Human: Hi.  Assistant: Hello.                          HH-RLHF, Vicuna
    ### Instruction: ... ### Response: ...                 Alpaca, Guanaco
    <|im_start|>user ... <|im_start|>assistant ...         output of chat templates

Texts with a common beginning may share the first words of an answer, too. So a dialogue is split
after the last answer mark that all texts share, not where they begin to differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from adapterhub.data.chat_formats import Message

Messages: TypeAlias = tuple[Message, ...]
"""Messages of a chat."""

_MOST_OTHERS = 0.1  # share of rows that may have another form, and are rejected individually


@dataclass(frozen=True)
class Dialogue:
    """The marks of user turns, assistant turns and the system message."""

    user: re.Pattern[str]
    assistant: re.Pattern[str]
    system: re.Pattern[str] | None = None
    end: re.Pattern[str] | None = None

    def divided(self, texts: Sequence[str]) -> tuple[str, list[str]]:
        """Return the common part of texts up to its last answer mark, and the answers.

        Raises:
            ValueError: the texts share no answer mark, or a user turn follows it.
        """
        place = self._place(texts)
        if not place:
            raise ValueError("the chosen and the rejected response share no turn of the assistant")
        answers = [text[place:] for text in texts]
        if any(self.user.search(answer) for answer in answers):
            raise ValueError("the chosen and the rejected dialogue differ before their last turns")
        return texts[0][:place].strip(), [self._ended(answer) for answer in answers]

    def fits(self, texts: Sequence[str]) -> bool:
        """Return whether texts share a user turn followed by an answer mark."""
        return self._place(texts) > 0

    def _place(self, texts: Sequence[str]) -> int:
        one = texts[0]
        first = self.user.search(one)
        marks = [mark.end() for mark in self.assistant.finditer(one)] if first else []
        places = [
            place for place in marks
            if first and first.end() < place and all(t.startswith(one[:place]) for t in texts)
        ]  # fmt: skip
        return max(places, default=0)

    def _ended(self, text: str) -> str:
        return (text if self.end is None else self.end.sub("", text)).strip()

    def messages(self, text: str) -> Messages:
        """Return the beginning of a dialogue, up to an answer mark, as messages."""
        kinds = {"user": self.user, "assistant": self.assistant, "system": self.system}
        marks = sorted(
            (mark.start(), mark.end(), role)
            for role, pattern in kinds.items() if pattern is not None
            for mark in pattern.finditer(text)
        )  # fmt: skip
        ends = [begin for begin, _, _ in marks[1:]] + [len(text)]
        turns = [("system", text[: marks[0][0]])] if marks else []
        turns += [(role, text[at:end]) for (_, at, role), end in zip(marks, ends, strict=True)]
        ended = [(role, self._ended(content)) for role, content in turns]
        return tuple((role, content) for role, content in ended if content)


def _dialogue(user: str, assistant: str, system: str = "", end: str = "") -> Dialogue:
    kinds = (re.compile(each) if each else None for each in (system, end))
    return Dialogue(re.compile(user), re.compile(assistant), *kinds)


_USERS = "Human|HUMAN|User|USER|Customer|Client|Person"
_OTHERS = "Assistant|ASSISTANT|AI|Bot|BOT|GPT|ChatGPT|Model|Agent|Chatbot"
# Unmistakable marks come first; marks in the middle of a line come last.
_DIALOGUES = (
    _dialogue(r"<\|im_start\|>user\b", r"<\|im_start\|>assistant\b", r"<\|im_start\|>system\b",
              r"<\|im_end\|>"),
    _dialogue(r"<\|start_header_id\|>user<\|end_header_id\|>",
              r"<\|start_header_id\|>assistant<\|end_header_id\|>",
              r"<\|start_header_id\|>system<\|end_header_id\|>",
              r"<\|(eot_id|begin_of_text)\|>"),
    _dialogue(r"<start_of_turn>user\b", r"<start_of_turn>model\b", "", r"<end_of_turn>|<bos>"),
    _dialogue(r"<\|(user|prompter)\|>", r"<\|assistant\|>", r"<\|system\|>",
              r"<\|(end|endoftext|eot)\|>|</s>"),
    _dialogue(r"\[INST\]", r"\[/INST\]", "", r"</?s>"),
    _dialogue(r"###\s*(Instruction|Human|User|Input|Question)s?\s*:?",
              r"###\s*(Response|Assistant|Output|Answer)s?\s*:", r"###\s*System\s*:?"),
    _dialogue(rf"(?m)^[ \t]*({_USERS})[ ]?:", rf"(?m)^[ \t]*({_OTHERS})[ ]?:",
              r"(?m)^[ \t]*(System|SYSTEM)[ ]?:"),
    _dialogue(rf"(?<!\w)({_USERS})[ ]?:", rf"(?<!\w)({_OTHERS})[ ]?:"),
    _dialogue(r"(?m)^[ \t]*(Question|QUESTION|Q)[ ]?:", r"(?m)^[ \t]*(Answer|ANSWER|A)[ ]?:"),
    _dialogue(r"^\s*(Question|QUESTION|Q)[ ]?:", r"(?<!\w)(Answer|ANSWER|A)[ ]?:"),
)  # fmt: skip


def dialogue_of(rows: Sequence[Sequence[object]]) -> Dialogue | None:
    """Return the marks of turns shared by the texts of each row, or None.

    A few rows may have another form.
    """
    texts = [[str(text) for text in row] for row in rows if all(isinstance(t, str) for t in row)]
    if not rows or len(texts) < len(rows):
        return None
    most = _MOST_OTHERS * len(texts)
    return next(
        (each for each in _DIALOGUES if sum(not each.fits(row) for row in texts) <= most), None
    )


def begins_with(prompt: str, text: object) -> bool:
    """Return whether a text begins with a prompt, and goes on with another word."""
    front = prompt.strip()
    if not isinstance(text, str) or not front or not text.lstrip().startswith(front):
        return False
    rest = text.lstrip()[len(front) :]
    return bool(rest.strip()) and not (front[-1].isalnum() and rest[0].isalnum())


def behind(prompt: str, text: object) -> object:
    """Return the rest of a text after the prompt that it begins with."""
    if not isinstance(text, str) or not begins_with(prompt, text):
        return text
    return text.lstrip()[len(prompt.strip()) :].strip()
