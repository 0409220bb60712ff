"""The tokenizer of a backbone: its identity, and the tokens added to it.

    identity = sha256(vocabulary, merges, special tokens, the ids of a probe text)

The probe text covers normalization and splitting, which transformers versions serialize
differently. The identity does not include tokens added after the backbone was loaded, the padding
token, which many backbones lack, or the chat template.

transformers and tokenizers have no function that removes added tokens. A fast tokenizer is read
again, in place, from its own serialization without them, and keeps its model: numbers of a Unigram
model lose their last bit when they are read. Ids of added tokens follow each other, so that only
the last ones can be removed: others would get new ids.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer
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


@dataclass(eq=False)
class BorrowedTokenizer:
    """What adapters have changed in a tokenizer, which models may share.

    `tokens` has the contents of tokens that adapters brought; `templates` the chat template that
    applies in each model, by a key of that model, the last one shown; `own` is the user's chat
    template meanwhile.
    """

    tokens: list[str] = field(default_factory=list)
    templates: dict[object, str] = field(default_factory=dict)
    own: Any = None


_BORROWED: WeakKeyDictionary[PreTrainedTokenizerBase, BorrowedTokenizer] = WeakKeyDictionary()


class TokenizerSnapshot:
    """A model's tokenizer, and its state when it was first used with the model.

    Tokens with ids from `size` on were added later, or have no embedding in the checkpoint.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        # Encoded now, because a token added later may match in the probe text.
        with _kept_settings(tokenizer):
            self.probe = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBE]
        self.borrowed = _BORROWED.setdefault(tokenizer, BorrowedTokenizer())
        self._cached: tuple[object, str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenizerSnapshot:
        # A copied model is used with the same tokenizer.
        return self

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)
        self.borrowed = _BORROWED.setdefault(self.tokenizer, self.borrowed)  # of a pickled model

    def identity(self, first_new: int | None = None) -> str:
        """Compute the identity of the tokenizer without new tokens, 64 hexadecimal digits.

        `first_new` is the lowest id of an adapter's new tokens, if that is below `size`.
        """
        size = self.size if first_new is None else min(self.size, first_new)
        special = {name: getattr(self.tokenizer, f"{name}_token", None) for name in _SPECIAL}
        key = (size, len(self.tokenizer), tuple(map(str, special.values())))
        if self._cached is None or self._cached[0] != key:
            vocabulary = self.tokenizer.get_vocab()
            original = sorted(pair for pair in vocabulary.items() if pair[1] < size)
            names = {name: str(token) for name, token in special.items() if token is not None}
            facts = [original, _merges(self.tokenizer), names, self.probe]
            self._cached = key, hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self._cached[1]

    def chat_template(self) -> str | None:
        """Return the user's chat template, the default one of several; None if there is none."""
        template = self.borrowed.own if self._shows_an_adapters() else self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def new_tokens(self) -> list[tuple[int, AddedToken]]:
        """List the added tokens with their ids, sorted by id."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return sorted(((i, t) for i, t in tokens if i >= self.size), key=lambda pair: pair[0])

    def add(self, tokens: Sequence[tuple[int, AddedToken]]) -> None:
        """Add tokens of an adapter with these ids to the tokenizer, unless it has them already.

        Raises:
            MismatchError: a token has or would get another id, or could not be removed again; no
                token is added then.
        """
        missing = self._missing(tokens)
        if not missing:
            return
        check_removable(self.tokenizer)
        contents = [token.content for token in missing.values()]
        try:
            self.borrowed.tokens += contents
            self.tokenizer.add_tokens(list(missing.values()))
            vocabulary = self.tokenizer.get_vocab()
            wrong = [
                f"{content!r}: {vocabulary.get(content)}, the adapter has {i}"
                for i, content in zip(missing, contents, strict=True)
                if vocabulary.get(content) != i
            ]
            if wrong:
                raise _different_ids(wrong)
        except BaseException:
            self.remove_unused(in_use=set(self.borrowed.tokens) - set(contents))
            raise

    def _missing(self, tokens: Sequence[tuple[int, AddedToken]]) -> dict[int, AddedToken]:
        """Return the tokens that are to be added, by id.

        Raises:
            MismatchError: a token has or would get another id.
        """
        vocabulary = self.tokenizer.get_vocab()
        free = max(vocabulary.values(), default=-1) + 1
        missing = {i: token for i, token in tokens if token.content not in vocabulary}
        wrong = [
            f"{token.content!r}: {vocabulary[token.content]}, the adapter has {i}"
            for i, token in tokens
            if vocabulary.get(token.content, i) != i
        ]
        wrong += [
            f"{token.content!r}: would be {free + n}, the adapter has {i}"
            for n, (i, token) in enumerate(missing.items())
            if free + n != i
        ]
        if wrong:
            raise _different_ids(wrong)
        return missing

    def remove_unused(self, in_use: Collection[str]) -> None:
        """Remove the tokens that adapters brought, up to the first one that is in use.

        A token behind them, the user's or an adapter's, would get another id: then they stay.
        """
        vocabulary = self.tokenizer.get_vocab()
        brought = {content for content in self.borrowed.tokens if content not in in_use}
        by_id = sorted(vocabulary.items(), key=lambda pair: -pair[1]) if brought else []
        removed = set(itertools.takewhile(brought.__contains__, (content for content, _ in by_id)))
        if removed:
            remove_added_tokens(self.tokenizer, removed)
        gone = brought - vocabulary.keys() | removed
        self.borrowed.tokens = [c for c in self.borrowed.tokens if c not in gone]

    def show(self, key: object, template: str | None) -> None:
        """Show the chat template that applies in a model, until another one does.

        Without a template of an adapter, the user's own applies. `key` identifies the model.
        """
        if template == self.borrowed.templates.get(key):
            return  # one that the user has set since stays
        self._hide(key)
        if template is None:
            return
        if not self._shows_an_adapters():
            self.borrowed.templates.clear()  # the user has replaced them
            self.borrowed.own = self.tokenizer.chat_template
        self.borrowed.templates[key] = template
        self.tokenizer.chat_template = template

    def _hide(self, key: object) -> None:
        """Show the template before that of a model; one that the user has set since stays."""
        borrowed = self.borrowed
        if self._shows_an_adapters():
            others = [template for k, template in borrowed.templates.items() if k != key]
            self.tokenizer.chat_template = others[-1] if others else borrowed.own
        borrowed.templates.pop(key, None)
        if not borrowed.templates:
            borrowed.own = None

    def _shows_an_adapters(self) -> bool:
        """Return whether the tokenizer shows the last adapter's template, not one of the user."""
        templates = list(self.borrowed.templates.values())
        return bool(templates) and self.tokenizer.chat_template == templates[-1]


def _different_ids(wrong: Sequence[str]) -> MismatchError:
    return MismatchError(
        "the adapter's new tokens have different ids in this tokenizer",
        offenders=wrong,
        expected="the tokenizer of the backbone, with no other tokens added",
        hint="model, tokenizer = load_backbone(...), or detach the adapters with the other tokens",
    )


@contextmanager
def _kept_settings(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Keep the settings of a tokenizer's backend, which each encoding resets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    encode_special_tokens = backend.encode_special_tokens
    try:
        yield
    finally:
        backend.encode_special_tokens = encode_special_tokens
        if truncation:
            backend.enable_truncation(**truncation)
        if padding:
            backend.enable_padding(**padding)


def _merges(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the merges of a BPE in order; versions serialize a pair as a list or with a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def snapshot_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> TokenizerSnapshot:
    """Return the snapshot of a tokenizer for a model: the recorded one, or a new one.

    `size` is the number of token ids that belong to the backbone.

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
    return snapshot


def remember_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> TokenizerSnapshot:
    """Record the tokenizer that is used with a model.

    `size` is the number of token ids that belong to the backbone.

    Raises:
        AttachError: `tokenizer` is not a transformers tokenizer.
    """
    snapshot = snapshot_of(model, tokenizer, size)
    record_snapshot(model, snapshot)
    return snapshot


def record_snapshot(model: PreTrainedModel, snapshot: TokenizerSnapshot | None) -> None:
    """Record a tokenizer as the one that is used with a model; None: there is none."""
    if snapshot is None:
        vars(model).pop(_TOKENIZER, None)
    else:
        vars(model)[_TOKENIZER] = snapshot


def tokenizer_snapshot(model: PreTrainedModel) -> TokenizerSnapshot | None:
    """Return the tokenizer that is used with a model, if it was recorded."""
    return getattr(model, _TOKENIZER, None)


def check_removable(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse to add tokens to a tokenizer from which they could not be removed again.

    Raises:
        MismatchError: a part of the tokenizer cannot be written, or not be read back as it was.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    try:
        text = backend.to_str()
        copied = Tokenizer.from_str(text)
        copied.model = backend.model
        problem = "" if copied.to_str() == text else "it is not read back as it was written"
    except Exception as error:  # tokenizers raises no narrower class
        problem = str(error)
    if problem:
        raise MismatchError(
            "new tokens could not be removed again from this tokenizer",
            offenders=[problem],
            expected="a tokenizer whose parts can be saved",
            hint="add the adapter's tokens yourself: tokenizer.add_tokens([...])",
        )


def remove_added_tokens(tokenizer: PreTrainedTokenizerBase, contents: Collection[str]) -> None:
    """Remove the last added tokens of a tokenizer: it is as it was before they were added.

    None of them is in the vocabulary of its model, and no other token has a higher id.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        _remove_from_python(tokenizer, contents)
        return
    parts = json.loads(backend.to_str())
    parts["added_tokens"] = [t for t in parts["added_tokens"] if t["content"] not in contents]
    model, encodes_special = backend.model, backend.encode_special_tokens
    backend.__setstate__(json.dumps(parts).encode())
    backend.model = model
    backend.encode_special_tokens = encodes_special  # not a part of the serialization


def _remove_from_python(tokenizer: Any, contents: Collection[str]) -> None:
    """Remove tokens from the attributes of a tokenizer that is written in Python."""
    for content in contents:
        tokenizer._added_tokens_decoder.pop(tokenizer._added_tokens_encoder.pop(content, None), 0)
        if content in tokenizer.tokens_trie._tokens:
            tokenizer.tokens_trie._tokens.remove(content)
            _prune(tokenizer.tokens_trie.data, content)
    tokenizer._extra_special_tokens[:] = [
        token for token in tokenizer._extra_special_tokens if str(token) not in contents
    ]
    tokenizer._update_total_vocab_size()


def _prune(trie: dict[str, Any], word: str) -> None:
    """Remove a word from a trie, with the branches that no other word needs."""
    path = [trie]
    for character in word:
        path.append(path[-1][character])
    path[-1].pop("", None)
    for node, character in zip(reversed(path[:-1]), reversed(word), strict=True):
        if node[character]:
            return
        del node[character]
