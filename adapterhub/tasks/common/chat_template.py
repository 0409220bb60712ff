"""Chats as text: rendering by chat templates, and the spans of the answers.

transformers renders the templates, in Jinja's sandbox. A template formats whole chats. It may omit
parts of an answer (the reasoning of earlier turns), or format a message differently in the middle
of a chat. So the span of an answer is the text that changes when the answer is replaced, plus the
text that ends its turn, without trailing whitespace.

If a template marks the assistant's text by `{% generation %}`, the marked text is learned.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from adapterhub.data.chat_formats import ARGUMENTS, part_text
from adapterhub.errors import ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = Mapping[str, Any]
"""A message in the form passed to templates: its role, its content and its other keys."""
Span = tuple[int, int]
_MARK = "\ue0a1answer\ue0a2"  # of characters that no text has
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    generation_prompt: bool,
    template: str | None = None,
) -> str:
    """Format a chat by a template, by transformers' `apply_chat_template`.

    Each message has a role and a content: a text, or a list of parts; the first may have the
    template's other arguments. `generation_prompt` appends the beginning of a response.

    Raises:
        ConfigError: the template is broken or rejects the chat.
    """
    messages, arguments = _for_template(tokenizer, turns)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            chat_template=template,
            **arguments,
        )
    except Exception as error:  # a template raises anything, and its message is its own
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path} cannot be applied: "
            f"{type(error).__name__}: {one_line(str(error), 300)}",
            expected="messages that the template takes",
            hint="correct tokenizer.chat_template, or use pairs with a template of the task",
        ) from None
    return str(text)


def _for_template(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Separate messages from the template's other arguments.

    Arguments of `apply_chat_template` itself are dropped: data may not set them.
    """
    messages = [dict(turn) for turn in turns]
    arguments = messages[0].pop(ARGUMENTS, None) if messages else None
    if not isinstance(arguments, Mapping):
        return messages, {}
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    return messages, {
        k: v for k, v in arguments.items() if k in ("tools", "documents") or k not in own
    }


def marked_spans(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> list[Span] | None:
    """Return the (begin, end) spans that a template marks by `{% generation %}`, or None.

    The text of the chat is the result of an earlier call of `chat_text`.
    """
    messages, arguments = _for_template(tokenizer, turns)
    template = tokenizer.get_chat_template(None, arguments.get("tools"))
    if not _GENERATION.search(template):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **arguments},
    )
    spans: list[Span] = []
    for begin, end in sorted(rendered[1][0]):  # blocks in blocks are parts of these
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        elif begin < end:
            spans.append((begin, end))
    return spans


def fitted_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], *, generation_prompt: bool
) -> tuple[list[Turn], str]:
    """Return messages in a form that the tokenizer's template renders, and their text.

    Templates differ in their input: content as a list of parts or as text, missing or empty
    content, tool arguments as JSON or as objects. The form of the data is kept unless the template
    rejects it or renders it wrongly.

    Raises:
        ConfigError: the template is broken, or rejects every form of the chat.
    """
    tried: list[list[Turn]] = []
    rendered: tuple[list[Turn], str] | None = None
    refusal: ConfigError | None = None
    for changes in product((None, _joined), (None, _with_content), (None, _with_objects)):
        form = [dict(turn) for turn in turns]
        for change in filter(None, changes):
            form = [change(turn) for turn in form]
        if form in tried:
            continue
        tried.append([*form])
        try:
            text = chat_text(tokenizer, form, generation_prompt=generation_prompt)
        except ConfigError as error:
            refusal = refusal or error
            continue
        # Templates that take objects quote JSON a second time.
        as_given = all(each in text for turn in form for each in _arguments(turn))
        if as_given and not _shows_parts(form, text):
            return [*form], text
        rendered = rendered or ([*form], text)
    if rendered is None:
        assert refusal is not None
        begin = one_line(str(_joined(turns[0]).get("content") or ""), 80)
        raise ConfigError(
            refusal.problem,
            offenders=[f"the chat that begins with {begin!r}"],
            expected=refusal.expected,
            hint=refusal.hint,
        )
    return rendered


def _joined(turn: Turn) -> dict[str, Any]:
    """Return a message with its parts joined into one text."""
    content = turn.get("content")
    text = "".join(map(part_text, content)) if isinstance(content, list) else content
    return {**turn, "content": text} if "content" in turn else dict(turn)


def _with_content(turn: Turn) -> dict[str, Any]:
    return {"role": turn["role"], "content": "", **turn}


def _with_objects(turn: Turn) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as objects instead of JSON."""
    calls = list(map(_with_object, turn["tool_calls"])) if any(_arguments(turn)) else None
    return {**turn, "tool_calls": calls} if calls else dict(turn)


def _with_object(call: Any) -> Any:
    function = call.get("function", call)
    try:
        parsed = {**function, "arguments": json.loads(function["arguments"])}
    except (ValueError, KeyError, TypeError):
        return call
    return {**call, "function": parsed} if "function" in call else parsed


def _arguments(turn: Turn) -> Iterator[str]:
    """Yield the tool-call arguments that are JSON strings."""
    calls = turn.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield arguments


def _shows_parts(turns: Sequence[Turn], text: str) -> bool:
    """Return whether the text lacks a part of the messages, or contains a raw list of parts."""
    parts = [p for turn in turns if isinstance(turn.get("content"), list) for p in turn["content"]]
    shown = any(isinstance(part, Mapping) and str(part) in text for part in parts)
    return shown or any(part_text(part).strip() not in text for part in parts)


def answer_spans(
    render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn], text: str
) -> list[Span]:
    """Return the (begin, end) span of each answer in the text, with the end of its turn.

    `render` formats messages. If its second argument is true, it appends the beginning of a
    response. It may raise a ConfigError.

    Raises:
        ConfigError: the template rejects the chat with another answer.
    """
    spans: list[Span] = []
    done = 0
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            begin, end = _answer(render, turns, number, text, done)
            spans.append((begin, end))
            done = end
    return without_blanks(render, turns, text, spans)


def without_blanks(
    render: Callable[[Sequence[Turn], bool], str],
    turns: Sequence[Turn],
    text: str,
    spans: Sequence[Span],
) -> list[Span]:
    """Return the spans of answers without whitespace after the text that ends their turns.

    If a template writes only whitespace after an answer, the whitespace ends the turn.
    """
    if not any(text[begin:end][-1:].isspace() for begin, end in spans):
        return list(spans)
    number = next(n for n, turn in enumerate(turns) if turn["role"] == "assistant")
    ended = _behind(render, turns, number).rstrip()
    kept = [(begin, text[begin:end].rstrip()) for begin, end in spans]
    return [
        (begin, begin + len(answer)) if ended and answer.endswith(ended) else span
        for span, (begin, answer) in zip(spans, kept, strict=True)
    ]


def _behind(
    render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn], number: int
) -> str:
    """Return the text that a template writes after an answer at the end of a chat."""
    arguments = {k: v for k, v in turns[number].items() if k == ARGUMENTS}
    for content in (_MARK, [{"type": "text", "text": _MARK}]):
        answer = {"role": "assistant", "content": content, **arguments}
        _, mark, behind = (_tried(render, [*turns[:number], answer], False) or "").rpartition(_MARK)
        if mark:
            return behind
    return ""


def _answer(
    render: Callable[[Sequence[Turn], bool], str],
    turns: Sequence[Turn],
    number: int,
    text: str,
    done: int,
) -> Span:
    """Find one answer after position `done`."""
    beginning = _tried(render, turns[:number], True)
    follows = beginning is not None and len(beginning) >= done and text.startswith(beginning)
    opened = beginning or ""
    last = number == len(turns) - 1
    through = (text if last else _tried(render, turns[: number + 1], False)) or ""
    if follows and text.startswith(through) and len(through) > len(opened):
        return len(opened), len(through)
    begin, end, marked = _marked(render, turns, number, text)
    if follows:
        begin = len(opened)
    else:
        before = _tried(render, turns[:number], False)
        opening = opened[len(before) :] if before and opened.startswith(before) else ""
        place = text.rfind(opening, done, begin) if opening else -1
        begin = begin if place < 0 else place + len(opening)
    ended = _tried(render, [*turns[:number], marked], False) or ""
    behind = ended[ended.rfind(_MARK) + len(_MARK) :] if _MARK in ended else ""
    end += _common(text[end:], behind)
    return max(begin, done), max(end, begin, done)


def _marked(
    render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn], number: int, text: str
) -> tuple[int, int, Turn]:
    """Find the span of a chat's text that changes when one answer is replaced.

    Returns:
        Begin and end, equal if the template omits the answer, and the message with the other
        answer.

    Raises:
        ConfigError: the template rejects the chat.
    """
    turn, refusal = turns[number], None
    plain = {k: turn[k] for k in (ARGUMENTS,) if k in turn}
    plain |= {"role": "assistant", "content": _MARK}
    for marked in (plain, {**turn, "content": _MARK}, _all_marked(turn)):
        try:
            other = render([*turns[:number], marked, *turns[number + 1 :]], False)
        except ConfigError as error:
            refusal = refusal or error
            continue
        if _MARK in other:
            begin = _common(text, other)
            return begin, len(text) - _common(text[begin:][::-1], other[begin:][::-1]), marked
        refusal = None
    if refusal is not None:
        raise refusal
    return 0, 0, turn


def _common(one: str, other: str) -> int:
    """Count the characters of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _all_marked(value: Any, name: str = "") -> Any:
    """Return a message with the mark instead of each text, except the names of kinds."""
    if isinstance(value, Mapping):
        return {
            key: each if key == ARGUMENTS else _all_marked(each, str(key))
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_all_marked(each) for each in value]
    return _MARK if isinstance(value, str) and name not in ("role", "type", "id") else value


def _tried(
    render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn], opened: bool
) -> str | None:
    """Return the text of the beginning of a chat; None if the template rejects it."""
    try:
        return render(turns, opened)
    except ConfigError:
        return None


def unused_keys(
    render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn], text: str
) -> Counter[str]:
    """Count the message keys and arguments that do not affect the text of a chat."""
    counts = Counter(key for turn in turns for key in turn)
    for key in ("role", "content", ARGUMENTS):
        del counts[key]
    without: dict[str, list[Turn]] = {
        key: [{k: v for k, v in turn.items() if k != key} for turn in turns] for key in counts
    }
    value = turns[0].get(ARGUMENTS)
    arguments = value if isinstance(value, Mapping) else {}
    for key in arguments:
        others = {k: v for k, v in arguments.items() if k != key}
        without[key] = [{**turns[0], ARGUMENTS: others}, *turns[1:]]
        counts[key] += 1
    return Counter(
        {key: counts[key] for key in without if _tried(render, without[key], False) == text}
    )
