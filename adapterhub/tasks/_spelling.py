"""Texts as tokens of speech models: letters that CTC has outputs for, and targets of decoders."""

from __future__ import annotations

import copy
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from adapterhub.data.table import first_few
from adapterhub.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def writes_letters(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has a token for each letter, as those of CTC have."""
    return hasattr(tokenizer, "word_delimiter_token")


def letter_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of the letters of each text.

    Texts are in the case of the vocabulary, if it has only one, and punctuation that it lacks is
    left out.

    Raises:
        DataError: texts have other characters that the vocabulary lacks.
    """
    vocabulary = tokenizer.get_vocab()
    letters = {token for token in vocabulary if len(token) == 1 and token.isalpha()}
    cased: Callable[[str], str] = str
    if letters and all(letter == letter.upper() for letter in letters):
        cased = str.upper
    elif letters and all(letter == letter.lower() for letter in letters):
        cased = str.lower
    missing: Counter[str] = Counter()
    spelled = []
    for text in texts:
        kept, lacking = [], set()
        for character in " ".join(cased(text).split()):
            if character in vocabulary or character == " ":
                kept.append(character)
            elif unicodedata.category(character)[0] not in "PS":
                lacking.add(character)
        missing.update(lacking)
        spelled.append(" ".join("".join(kept).split()))
    if missing:
        raise DataError(
            "texts have characters that the tokenizer of the backbone lacks",
            offenders=first_few([f"{c!r}: in {n:,} texts" for c, n in missing.most_common()]),
            expected=f"its letters: {' '.join(sorted(letters))}",
            hint="spell the texts with these letters, such as numbers as words, or another "
            "backbone",
        )
    return [list(ids) for ids in tokenizer(spelled)["input_ids"]]


def target_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, language: str | None
) -> list[list[int]]:
    """Return what a decoder learns to write for each text, up to the end-of-sequence token.

    The first token of Whisper's prefix and others is left out: the decoder starts with it.

    Args:
        texts: the spoken texts.
        tokenizer: the tokenizer of an encoder-decoder.
        language: the language to begin with, for tokenizers that have several.

    Raises:
        ConfigError: the tokenizer has no such language.
    """
    if language is not None:
        tokenizer = _in_language(tokenizer, language)
    rows = []
    for ids in tokenizer(list(texts))["input_ids"]:
        row = list(ids)
        if row and row[0] != tokenizer.eos_token_id and _is_special(tokenizer, row[0]):
            del row[0]
        if not row or row[-1] != tokenizer.eos_token_id:
            row.append(tokenizer.eos_token_id)
        rows.append(row)
    return rows


def _in_language(tokenizer: PreTrainedTokenizerBase, language: str) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer whose texts begin with a language."""
    own = copy.deepcopy(tokenizer)
    try:
        own.set_prefix_tokens(language=language, task="transcribe")
    except AttributeError:
        raise ConfigError(
            f"language={language}: the tokenizer of the backbone has no languages to choose from",
            hint="leave out language",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"language={language} is none of the backbone's: {str(error).splitlines()[0]}",
            expected="the code of a language, such as en",
        ) from None
    return own


def _is_special(tokenizer: PreTrainedTokenizerBase, index: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(index)
    return index in tokenizer.all_special_ids or bool(added is not None and added.special)
