"""What is sampled, by the options of each row, its seed and place; and pieces of text."""

from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapterhub.errors import ConfigError
from adapterhub.serving import GenerationOptions
from adapterhub.serving.generation.detokenize import TextPieces
from adapterhub.serving.generation.request import GeneratedToken
from adapterhub.serving.generation.sampling import NextToken, choose_tokens

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])


def draws(options, count=4000, logits=LOGITS):
    asked = [NextToken(options, 7, place) for place in range(count)]
    chosen = choose_tokens(logits.expand(count, -1), asked)
    return Counter(token.id for token in chosen)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"top_p": 0.8, "top_k": 2}, [0, 1]),
        ({"temperature": 0.3, "top_p": 0.9}, [0]),
        ({"temperature": 1e-6}, [0]),
        ({"temperature": 1e-50}, [0]),
        ({"temperature": 0}, [0]),
    ],
)
def test_tokens_have_the_probabilities_of_the_options(options, kept):
    """As transformers filters: temperature first, then top_k, then top_p."""
    options = GenerationOptions(**options)
    found = draws(options)
    expected = (LOGITS / max(options.temperature, 1e-6)).softmax(0)[kept]
    expected = expected / expected.sum()
    assert set(found) == set(kept)
    for token, share in zip(kept, expected.tolist(), strict=True):
        assert found[token] / 4000 == pytest.approx(share, abs=0.03)


def test_a_large_vocabulary_is_filtered_as_a_small_one():
    """More tokens than are looked at first have the probability together."""
    logits = torch.zeros(1000)
    found = draws(GenerationOptions(top_p=0.5), 2000, logits)
    assert len(found) > 400
    logits[:3] = 12
    assert set(draws(GenerationOptions(top_p=0.5), 500, logits)) <= {0, 1, 2}


def test_places_and_seeds_differ():
    options = GenerationOptions()
    same = choose_tokens(torch.zeros(40, 50), [NextToken(options, 1, 0)] * 40)
    places = choose_tokens(torch.zeros(40, 50), [NextToken(options, 1, n) for n in range(40)])
    seeds = choose_tokens(torch.zeros(40, 50), [NextToken(options, n, 0) for n in range(40)])
    assert len({token.id for token in same}) == 1
    assert min(len({token.id for token in each}) for each in (places, seeds)) > 15


def test_log_probabilities_are_those_of_the_model():
    options = GenerationOptions(temperature=0.3, logprobs=2, top_k=1)
    (token,) = choose_tokens(LOGITS[None], [NextToken(options, 0, 0)])
    scores = LOGITS.log_softmax(0)
    assert token.logprob == pytest.approx(float(scores[0]))
    assert token.alternatives == ((0, float(scores[0])), (1, float(scores[1])))
    (token,) = choose_tokens(LOGITS[None], [NextToken(GenerationOptions(logprobs=0), 0, 0)])
    assert token.logprob is not None
    assert token.alternatives == ()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_give_no_token(wrong):
    logits = torch.stack([LOGITS, LOGITS.index_fill(0, torch.tensor([3]), wrong), LOGITS])
    for temperature in (0, 1):
        asked = [NextToken(GenerationOptions(temperature=temperature), 0, n) for n in range(3)]
        found = choose_tokens(logits, asked)
        assert [token is None for token in found] == [False, True, False]


def test_options_out_of_range_are_refused():
    for options in (
        {"max_tokens": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0},
        {"top_p": 1.5}, {"top_k": -1}, {"seed": 1 << 64}, {"stop": ("",)}, {"stop": ("a",) * 17},
        {"logprobs": 21}, {"logprobs": -1},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(options))):
            GenerationOptions(**options)


# Pieces of text: whole characters, and nothing of a text at which to stop.


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


def test_the_space_of_a_first_word_is_kept():
    """Tokenizers like SentencePiece's leave it out of the first word that they decode."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([2]) == "b"
    pieces = TextPieces(tokenizer, [1], ())
    assert pieces.next_text(2) == " b"
