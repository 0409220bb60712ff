"""The languages of encoder-decoders that translate between several.

    mBART                       text </s> code
    mBART-50, NLLB, M2M-100     code text </s>
    Marian                      >>code<< text </s>, and targets without a code

The tokenizers add the codes. The decoder starts at the target's code: it is the first token of the
targets, or the model moves it in front of them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from adapterhub.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Pair: TypeAlias = tuple[str | None, str | None]
"""The languages of an input and of its target."""

LANGUAGE_COLUMNS = ("src_lang", "tgt_lang")
"""The data columns and task options that name the languages of a pair."""

_CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
_PREFIX = re.compile(r"\s*>>[^<>\s]+<<")
_SPEAKING = threading.Lock()


class LanguageError(ConfigError):
    """A tokenizer requires a language that is not named, or lacks the named one."""


def language_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the token of each language whose code a tokenizer adds to texts."""
    speaks: Any = tokenizer
    if not hasattr(speaks, "set_tgt_lang_special_tokens") and not hasattr(speaks, "get_lang_id"):
        return {}
    if codes := getattr(speaks, "lang_code_to_id", None):
        return {code: int(i) for code, i in codes.items() if i != speaks.unk_token_id}
    names = [token for token in map(str, speaks.all_special_tokens) if _CODE.fullmatch(token)]
    return dict(zip(names, speaks.convert_tokens_to_ids(names), strict=True))


def languages_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the languages of a tokenizer that needs a choice, sorted."""
    return tuple(sorted(language_ids(tokenizer) or _prefixes(tokenizer)))


def _prefixes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the target languages of a multilingual Marian model: fra for >>fra<<."""
    codes: Sequence[str] = getattr(tokenizer, "supported_language_codes", ())
    return [code[2:-2] for code in codes]


def check_languages(
    pairs: Sequence[Pair], chosen: Pair, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Reject missing languages that a tokenizer requires, and languages that it lacks.

    `chosen` are the languages of the task, `pairs` the languages of each text.

    Raises:
        LanguageError: a language is rejected.
    """
    known = languages_of(tokenizer)
    listed = " ".join(known)  # without commas: NLLB's 202 fit the longest line of an error
    around = bool(language_ids(tokenizer))
    needed = LANGUAGE_COLUMNS if around else LANGUAGE_COLUMNS[1:] if known else ()
    named = [name for name, language in zip(LANGUAGE_COLUMNS, chosen, strict=True) if language]
    if unread := [name for name in named if name not in needed]:
        raise LanguageError(
            f"the tokenizer of this backbone reads no {' or '.join(unread)}",
            expected=f"{needed[0]} alone" if needed else "a backbone for several languages",
            hint=f"a task without {' and '.join(unread)}",
        )
    for name in needed:
        place = LANGUAGE_COLUMNS.index(name)
        languages = {
            pair[place]
            for pair, text in zip(pairs, texts, strict=True)
            if around or pair[place] or not _PREFIX.match(text)
        }
        if None in languages:
            typed = ", ".join(f"{n}={chosen[LANGUAGE_COLUMNS.index(n)] or '...'}" for n in needed)
            raise LanguageError(
                f"{name} is not given: the tokenizer of this backbone writes the language of "
                f"{'inputs' if name == 'src_lang' else 'targets'}",
                expected=f"one of {listed}",
                hint=f'--task "seq2seq({typed})", or columns {" and ".join(needed)} in the data',
            )
        for language in sorted(languages - {*known}, key=str):
            near = did_you_mean(str(language), known)
            alike = [code for code in known if code.startswith(str(language)[:2].lower())]
            raise LanguageError(
                f"{name} is {language!r}, which the tokenizer of this backbone does not have{near}",
                expected=f"one of {listed}",
                hint=f"{name}={alike[0]}" if alike and not near else "",
            )


def by_languages(pairs: Sequence[Pair]) -> dict[Pair, list[int]]:
    """Return the indices of the texts of each pair of languages."""
    groups: dict[Pair, list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair, []).append(index)
    return groups


def with_code(text: str, pair: Pair, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text with the target's code in front of it if the model is Marian's."""
    reads = pair[1] and _prefixes(tokenizer) and not _PREFIX.match(text)
    return f">>{pair[1]}<< {text}" if reads else text


@contextmanager
def speaking(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> Iterator[None]:
    """Set the two languages of a tokenizer inside; one thread at a time."""
    speaks: Any = tokenizer
    if None in pair or not language_ids(tokenizer):
        yield
        return
    with _SPEAKING:
        source, target = speaks.src_lang, speaks.tgt_lang
        try:
            speaks.src_lang, speaks.tgt_lang = pair
            yield
        finally:
            speaks.src_lang, speaks.tgt_lang = source, target


def target_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: Pair
) -> dict[str, Any]:
    """Return the options of `generate` that start a decoder at the code of the target.

    A code that begins targets is forced as the first token, as in transformers. mBART's code ends
    targets, and the model moves it in front of the first token in training.
    """
    code = language_ids(tokenizer).get(str(pair[1]))
    if code is None:
        return {}
    with speaking(tokenizer, pair):
        ids = tokenizer(text_target="")["input_ids"]
    if ids[:1] != [code] and _moves_last(model, ids):
        return {"decoder_start_token_id": code, "forced_bos_token_id": None}
    return {"forced_bos_token_id": code}


def _moves_last(model: PreTrainedModel, ids: list[int]) -> bool:
    """Return whether the decoder of a model starts with the last token of targets."""
    import torch

    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    return shift is not None and int(shift(torch.tensor([ids]))[0, 0]) == ids[-1]
