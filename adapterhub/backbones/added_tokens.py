"""Remove added tokens from a tokenizer, for which transformers and tokenizers have no function.

A fast tokenizer is read again, in place, from its own serialization without them, and keeps its
model: numbers of a Unigram model lose their last bit when they are read. Ids of added tokens follow
each other, so that only the last ones can be removed: others would get new ids.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from adapterhub.errors import MismatchError


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

    Args:
        tokenizer: the tokenizer.
        contents: the tokens; none of them is in the vocabulary of its model, and no other token
            has a higher id.
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
