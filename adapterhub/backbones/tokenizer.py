"""The tokenizer of a backbone: its identity, and the tokens added to it.

    identity = sha256(vocabulary, merges, special tokens, the ids of a probe text)

The probe text covers normalization and splitting, which transformers versions serialize
differently. The identity does not include tokens added after the backbone was loaded, the padding
token, which many backbones lack, or the chat template.
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
# Case, accents, digits, contractions, repeated spaces, code, other scripts, an emoji.
_PROBE = (
    "Zürich's naïve Café — don't pay 12345.67€ or 007!  \tdef f(x):\n\n    return x**2  # ok?",
    "\u4f60\u597d\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f642 \ufb01 \uff12 A\u0301",
)


class TokenizerSnapshot:
    """A model's tokenizer, and its state when it was first used with the model.

    Tokens with ids from `size` on were added later, or have no embedding in the checkpoint.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        # Encoded now, because a token added later may match in the probe text.
        self.probe = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBE]
        self._cached: tuple[object, str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenizerSnapshot:
        # A copied model is used with the same tokenizer.
        return self

    def identity(self) -> str:
        """Compute the identity of the tokenizer without new tokens, 64 hexadecimal digits."""
        special = {name: getattr(self.tokenizer, f"{name}_token", None) for name in _SPECIAL}
        key = (len(self.tokenizer), tuple(map(str, special.values())))
        if self._cached is None or self._cached[0] != key:
            vocabulary = self.tokenizer.get_vocab()
            original = sorted(pair for pair in vocabulary.items() if pair[1] < self.size)
            names = {name: str(token) for name, token in special.items() if token is not None}
            facts = [original, _merges(self.tokenizer), names, self.probe]
            self._cached = key, hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self._cached[1]

    def chat_template(self) -> str | None:
        """Return the chat template, the default one of several; None if there is none."""
        template = self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def new_tokens(self) -> list[tuple[int, AddedToken]]:
        """List the added tokens with their ids, sorted by id."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return sorted(((i, t) for i, t in tokens if i >= self.size), key=lambda pair: pair[0])

    def add(self, tokens: Sequence[tuple[int, AddedToken]]) -> None:
        """Add tokens with these ids to the tokenizer, unless it has them already.

        Raises:
            MismatchError: a token has or would get another id; no token is added then.
        """
        vocabulary = self.tokenizer.get_vocab()
        free = max(vocabulary.values(), default=-1) + 1
        missing = [(i, token) for i, token in tokens if token.content not in vocabulary]
        wrong = [
            f"{token.content!r}: {vocabulary[token.content]}, the adapter has {i}"
            for i, token in tokens
            if vocabulary.get(token.content, i) != i
        ]
        wrong += [
            f"{token.content!r}: would be {free + n}, the adapter has {i}"
            for n, (i, token) in enumerate(missing)
            if free + n != i
        ]
        if wrong:
            raise MismatchError(
                "the adapter's new tokens have different ids in this tokenizer",
                offenders=wrong,
                expected="the tokenizer of the backbone, with no other tokens added",
                hint="model, tokenizer = load_backbone(...)",
            )
        if missing:
            self.tokenizer.add_tokens([token for _, token in missing])


def _merges(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the merges of a BPE in order; versions serialize a pair as a list or with a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def remember_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> TokenizerSnapshot:
    """Record the tokenizer that is used with a model.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        size: the number of token ids that belong to the backbone.

    Raises:
        AttachError: `tokenizer` is not a transformers tokenizer.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise AttachError(
            f"{type(tokenizer).__name__} is not a tokenizer", expected="a transformers tokenizer"
        )
    snapshot = tokenizer_snapshot(model)
    if snapshot is None or snapshot.tokenizer is not tokenizer:
        snapshot = TokenizerSnapshot(tokenizer, size)
        setattr(model, _TOKENIZER, snapshot)
    return snapshot


def tokenizer_snapshot(model: PreTrainedModel) -> TokenizerSnapshot | None:
    """Return the tokenizer that is used with a model, if it was recorded."""
    return getattr(model, _TOKENIZER, None)
