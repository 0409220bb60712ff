"""The tokenizer of a backbone: who it is, and which tokens are new to it.

    identity = sha256(vocabulary, merges, special tokens, the ids of a probe text)

The probe shows what normalization and splitting do, however a version of transformers writes them
down. Tokens that were added after the backbone was loaded are not of its identity, nor is the
padding token, which many backbones lack, nor the chat template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.errors import AttachError, MismatchError

_TOKENIZER = "_adapterhub_tokenizer"
_SPECIAL = ("bos", "eos", "unk", "sep", "cls", "mask")
# Case, accents, digits, contractions, runs of blanks, code, other scripts, an emoji.
_PROBE = (
    "Zürich's naïve Café — don't pay 12345.67€ or 007!  \tdef f(x):\n\n    return x**2  # ok?",
    "\u4f60\u597d\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f642 \ufb01 \uff12 A\u0301",
)


class TokenizerSnapshot:
    """The tokenizer that is used with a model, as it was when they came together.

    Tokens with ids from `size` on were added later, or are those that the checkpoint lacks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        # Now: a token that is added later may match in the probe.
        self.probe = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBE]
        self._known: tuple[object, str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenizerSnapshot:
        # A copied model is used with the same tokenizer.
        return self

    def identity(self) -> str:
        """The identity of the tokenizer without the new tokens, 64 hexadecimal digits."""
        special = {name: getattr(self.tokenizer, f"{name}_token", None) for name in _SPECIAL}
        key = (len(self.tokenizer), tuple(map(str, special.values())))
        if self._known is None or self._known[0] != key:
            vocabulary = self.tokenizer.get_vocab()
            old = sorted(pair for pair in vocabulary.items() if pair[1] < self.size)
            names = {name: str(token) for name, token in special.items() if token is not None}
            facts = [old, _merges(self.tokenizer), names, self.probe]
            self._known = key, hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self._known[1]

    def chat_template(self) -> str | None:
        """The chat template, the default one of several; None without one."""
        template = self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def new_tokens(self) -> list[tuple[int, AddedToken]]:
        """The tokens that the backbone does not know, by their ids."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return sorted(((i, t) for i, t in tokens if i >= self.size), key=lambda pair: pair[0])

    def add(self, wanted: Sequence[tuple[int, AddedToken]]) -> None:
        """Let the tokenizer have tokens with these ids.

        Raises:
            MismatchError: it has others there; nothing is added then.
        """
        vocabulary = self.tokenizer.get_vocab()
        free = max(vocabulary.values(), default=-1) + 1
        missing = [(i, token) for i, token in wanted if token.content not in vocabulary]
        wrong = [
            f"{token.content!r}: {vocabulary[token.content]}, the adapter has {i}"
            for i, token in wanted
            if vocabulary.get(token.content, i) != i
        ]
        wrong += [
            f"{token.content!r}: would be {free + n}, the adapter has {i}"
            for n, (i, token) in enumerate(missing)
            if free + n != i
        ]
        if wrong:
            raise MismatchError(
                "the adapter's new tokens have other ids in this tokenizer",
                offenders=wrong,
                expected="the tokenizer of the backbone, with no other tokens added",
                hint="model, tokenizer = load_backbone(...)",
            )
        if missing:
            self.tokenizer.add_tokens([token for _, token in missing])


def _merges(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The merges of a BPE, in their order; versions write a pair as a list or with a blank."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def remember_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> TokenizerSnapshot:
    """Remember the tokenizer that is used with a model; `size` tokens of it are the backbone's."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise AttachError(
            f"{type(tokenizer).__name__} is not a tokenizer", expected="one of transformers"
        )
    known = tokenizer_snapshot(model)
    if known is None or known.tokenizer is not tokenizer:
        known = TokenizerSnapshot(tokenizer, size)
        setattr(model, _TOKENIZER, known)
    return known


def tokenizer_snapshot(model: PreTrainedModel) -> TokenizerSnapshot | None:
    """The tokenizer that is used with a model, if that is known."""
    return getattr(model, _TOKENIZER, None)
