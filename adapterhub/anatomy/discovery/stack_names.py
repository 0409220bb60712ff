"""The names of the stacks of a model that has several of one kind: vision, language, audio."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from adapterhub.anatomy.family import Stack

# What a stack reads, by the words of its path; the first that matches counts.
_READS = {
    "vision": r"vision|visual|image|vit\b|patch",
    "audio": r"audio|speech|acoustic|sound|wav",
    "language": r"language|text|llm",
}


def named(stacks: Sequence[Stack], by_input: bool) -> list[Stack]:
    """Return stacks with names of their own.

    A stack alone, or the encoder and the decoder of one model, keep their names. Others are named
    after what they read, by the words of their path; one whose path does not say that keeps its
    name, and what is still equal is numbered: `vision`, `vision2`.

    `by_input`: an encoder and a decoder read inputs of different kinds, pictures and text.
    """
    names = [stack.name for stack in stacks]
    if len(stacks) > 1 and (by_input or len(set(names)) < len(names)):
        names = [_read(stack) or stack.name for stack in stacks]
    seen: Counter[str] = Counter()
    unique = []
    for stack, name in zip(stacks, names, strict=True):
        seen[name] += 1
        unique.append(replace(stack, name=name + (str(seen[name]) if seen[name] > 1 else "")))
    return unique


def _read(stack: Stack) -> str | None:
    return next((name for name, words in _READS.items() if re.search(words, stack.layers)), None)
