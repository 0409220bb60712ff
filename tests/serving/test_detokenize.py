"""Pieces of text: whole characters, and nothing of a text at which to stop."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapterhub.serving.generation.detokenize import TextPieces
from adapterhub.serving.generation.request import GeneratedToken


@pytest.fixture(scope="module")
def bytewise():
    """Return a tokenizer of one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: n + 1 for n, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


def given_out(tokenizer, text, stop=(), before="abc"):
    """Return the pieces of a text whose tokens come one by one."""
    pieces = TextPieces(tokenizer, tokenizer(before)["input_ids"], stop)
    found = []
    for token in tokenizer(text)["input_ids"]:
        piece = pieces.add(GeneratedToken(token, pieces.next_text(token)))
        found += [piece] if piece else []
        if pieces.stopped:
            return pieces, found
    last = pieces.end()
    return pieces, found + ([last] if last else [])


@pytest.mark.parametrize("text", ["plain", "né à Łódź", "日本語 👩‍👩‍👧 ok", " leading", "👍"])
def test_characters_are_whole(bytewise, text):
    pieces, found = given_out(bytewise, text)
    assert "".join(piece.text for piece in found) == pieces.text == text
    assert not any("\ufffd" in piece.text for piece in found)
    assert [t.id for piece in found for t in piece.tokens] == bytewise(text)["input_ids"]
    assert "".join(token.text for token in pieces.tokens) == text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("aaab", ("aab",), "a"),
        ("xENEND", ("END",), "xEN"),
        ("a\n\nb", ("\n\n",), "a"),
        ("first second", ("second", "first s"), ""),
        ("été là", ("é l",), "ét"),
        ("no stop", (), "no stop"),
        ("ends with E", ("END",), "ends with E"),
    ],
)
def test_a_text_stops_before_a_stop_text(bytewise, text, stop, expected):
    pieces, found = given_out(bytewise, text, stop)
    assert pieces.text == "".join(piece.text for piece in found) == expected
    assert pieces.stopped == (expected != text)
    shown = [token.id for piece in found for token in piece.tokens]
    assert shown == bytewise(text)["input_ids"][: len(shown)]
    assert bytewise.decode(shown).startswith(expected)


def test_what_may_be_a_stop_text_or_half_a_character_is_held_back(bytewise):
    pieces = TextPieces(bytewise, [], ("END",))
    shown = []
    for token in bytewise("xEN.")["input_ids"]:
        piece = pieces.add(GeneratedToken(token, pieces.next_text(token)))
        shown.append(piece.text if piece else "")
    assert shown == ["x", "", "", "EN."]
    pieces = TextPieces(bytewise, [], ())
    first = bytewise("é")["input_ids"][0]
    piece = pieces.add(GeneratedToken(first, pieces.next_text(first)))
    assert piece is None or piece.text == ""
    assert pieces.end().text == "\ufffd"  # it was cut by the end


def test_the_space_of_a_first_word_is_kept():
    """Tokenizers like SentencePiece's leave it out of the first word that they decode."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([2]) == "b"
    pieces = TextPieces(tokenizer, [1], ())
    assert pieces.next_text(2) == " b"
