"""Tiny translation models for several languages, with the tokenizer classes of transformers."""

from __future__ import annotations

import importlib
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MBart50Tokenizer, MBartTokenizer, NllbTokenizer

from tests.kit import tiny_models

WORDS = ["the", "cat", "dog", "sleeps", "barks", "die", "katze", "der", "hund", "schläft", "bellt",
         "le", "chat", "dort"]  # fmt: skip
PAIRS = [("the cat sleeps", "die katze schläft"), ("the dog barks", "der hund bellt")]
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_PIECES = [f"▁{word}" for word in WORDS]


@dataclass(frozen=True)
class Kind:
    """A family of models: its architecture, and how it names English, German and French."""

    architecture: str
    languages: tuple[str, str, str]


KINDS = {
    "mbart": Kind("mbart", ("en_XX", "de_DE", "fr_XX")),
    "mbart50": Kind("mbart", ("en_XX", "de_DE", "fr_XX")),
    "nllb": Kind("m2m_100", ("eng_Latn", "deu_Latn", "fra_Latn")),
    "m2m100": Kind("m2m_100", ("en", "de", "fr")),
    "marian": Kind("marian", ("", "deu", "fra")),
}
SAVED = ("mbart", "mbart50", "nllb")
"""The kinds whose tokenizers are read without the library sentencepiece."""


class Words:
    """What the two tokenizers of sentencepiece models call of it: a piece is a word."""

    def encode(self, text: str, out_type: type = str) -> list[str]:
        """Return the pieces of a text."""
        return [f"▁{word}" for word in text.split()]

    def decode(self, pieces: list[str]) -> str:
        """Return the text of pieces."""
        return "".join(pieces).replace("▁", " ").strip()

    decode_pieces = decode


def _of_sentencepiece(module: str) -> Any:
    """Import a module of transformers that imports sentencepiece, and give it `Words`."""
    stand_in: Any = types.ModuleType("sentencepiece")
    stand_in.SentencePieceProcessor = Words
    missing = "sentencepiece" not in sys.modules
    sys.modules.setdefault("sentencepiece", stand_in)
    try:
        loaded: Any = importlib.import_module(f"transformers.models.{module}")
    finally:
        if missing:
            del sys.modules["sentencepiece"]
    loaded.load_spm = lambda path, options: Words()
    if hasattr(loaded, "MarianTokenizer"):  # warns without the library sacremoses
        loaded.MarianTokenizer._setup_normalizer = lambda self: setattr(
            self, "punc_normalizer", lambda text: text
        )
    return loaded


def tokenizer(kind: str, folder: Path, **options: Any) -> Any:
    """Build the tokenizer of a kind; `options` are those of its class, such as `src_lang`."""
    scored = [(token, -float(i)) for i, token in enumerate([*_SPECIAL, *_PIECES])]
    if kind == "mbart":
        codes = [(code, 0.0) for code in MBartTokenizer().lang_code_to_id]
        return MBartTokenizer(vocab=[*scored, *codes, ("<mask>", 0.0)], **options)
    if kind == "mbart50":
        return MBart50Tokenizer(vocab=scored, **options)
    if kind == "nllb":
        letters = sorted({letter for piece in _PIECES for letter in piece})
        vocab = {token: i for i, token in enumerate([*_SPECIAL, *letters])}
        return NllbTokenizer(vocab=vocab, merges=[], **options)
    spm, words = folder / "source.spm", folder / "vocab.json"
    spm.touch()
    targets = [">>deu<<", ">>fra<<"] if kind == "marian" else []
    tokens = [*_SPECIAL, *targets, *_PIECES]
    words.write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
    if kind == "marian":
        module = _of_sentencepiece("marian.tokenization_marian")
        return module.MarianTokenizer(str(spm), str(spm), str(words), **options)
    module = _of_sentencepiece("m2m_100.tokenization_m2m_100")
    return module.M2M100Tokenizer(str(words), str(spm), **options)


def model(kind: str, tokenizer: Any) -> Any:
    """Build the model of a kind; it writes words, and others in French than in German."""
    size = max(len(tokenizer), max(getattr(tokenizer, "lang_code_to_id", {"": 0}).values()) + 1)
    start = tokenizer.pad_token_id if kind == "marian" else tokenizer.eos_token_id
    built: Any = tiny_models.model(
        KINDS[kind].architecture, "seq2seq", vocab_size=size, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=0, decoder_start_token_id=start,
        tie_word_embeddings=False, init_std=0.5, seed=4,
    )  # fmt: skip
    codes = [*getattr(tokenizer, "lang_code_to_id", {}).values(), *tokenizer.all_special_ids]
    built.lm_head.weight.data[codes] = 0.0  # words are written, not codes
    return built


def save(kind: str, folder: Path) -> Path:
    """Save a model and its tokenizer to a folder."""
    own = tokenizer(kind, folder)
    model(kind, own).save_pretrained(folder)
    own.save_pretrained(folder)
    return folder
