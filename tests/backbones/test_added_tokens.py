"""Added tokens are removed again; what cannot be restored is refused."""

from __future__ import annotations

import json

import pytest
import transformers
from tokenizers import AddedToken, NormalizedString, PreTokenizedString
from tokenizers.pre_tokenizers import PreTokenizer

from adapterhub.backbones.processor import check_removable, remove_added_tokens
from adapterhub.errors import MismatchError
from tests.kit.compare import differences, observed_tokenizer
from tests.kit.data import word_tokenizer

TOKENS = [
    AddedToken("<one>", special=True),
    AddedToken("<on", normalized=False, lstrip=True),
    AddedToken("words of two", single_word=True),
    "movies",
]
CONTENTS = [str(token) for token in TOKENS]


@pytest.mark.parametrize("make", [word_tokenizer, transformers.ByT5Tokenizer])
def test_tokens_leave_no_trace(make):
    tokenizer = make()
    tokenizer.add_tokens(["<mine>", "<o"])
    before = observed_tokenizer(tokenizer)
    check_removable(tokenizer)
    tokenizer.add_tokens(TOKENS)
    assert differences(before, observed_tokenizer(tokenizer))
    remove_added_tokens(tokenizer, CONTENTS)
    assert not differences(before, observed_tokenizer(tokenizer))
    tokenizer.add_tokens(TOKENS)
    assert tokenizer.convert_tokens_to_ids("<one>") == before["size"]


def test_long_tokens_of_a_python_tokenizer_are_removed():
    tokenizer = transformers.ByT5Tokenizer()
    before = json.dumps(tokenizer.tokens_trie.data)
    tokenizer.add_tokens([long := "x" * 5000, long + "y"])
    remove_added_tokens(tokenizer, [long + "y"])
    assert long in tokenizer.get_vocab()
    remove_added_tokens(tokenizer, [long])
    assert json.dumps(tokenizer.tokens_trie.data) == before


def test_a_backend_that_cannot_be_written_is_refused():
    class Letters:
        def pre_tokenize(self, text: PreTokenizedString) -> None:
            text.split(lambda i, part: [part])

        def split(self, text: NormalizedString) -> list[NormalizedString]:
            return [text]

    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Letters())
    with pytest.raises(MismatchError, match="could not be removed"):
        check_removable(tokenizer)
