"""The tokenizer of a backbone: its identity, and tokens that are added."""

from __future__ import annotations

import copy

import pytest
from tokenizers import AddedToken

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.processor import TokenizerSnapshot, snapshot_of
from adapterhub.errors import AttachError, MismatchError
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer


def snapshot(tokenizer=None):
    tokenizer = tokenizer or word_tokenizer()
    return TokenizerSnapshot(tokenizer, len(tokenizer))


def test_the_identity_ignores_added_tokens_padding_and_chat_template():
    first = snapshot()
    identity = first.identity()
    assert len(identity) == 64
    first.tokenizer.add_tokens(["<new>"])
    first.tokenizer.pad_token = "</s>"
    first.tokenizer.chat_template = "{{ messages }}"
    assert first.identity() == identity
    assert snapshot().identity() == identity


def test_the_identity_depends_on_special_tokens_and_on_the_encoding():
    identity = snapshot().identity()
    other = word_tokenizer()
    other.mask_token = "<unk>"
    assert snapshot(other).identity() != identity
    lower = word_tokenizer()
    from tokenizers import normalizers

    lower.backend_tokenizer.normalizer = normalizers.Replace("d", "the ")
    assert snapshot(lower).identity() != identity, "its vocabulary is the same, its encoding is not"


def test_added_tokens_are_listed_by_id():
    value = snapshot()
    assert value.new_tokens() == []
    value.tokenizer.add_tokens(["<one>", "<two>"])
    assert [(i, str(t)) for i, t in value.new_tokens()] == [
        (value.size, "<one>"), (value.size + 1, "<two>")
    ]  # fmt: skip


def test_tokens_are_added_with_their_ids():
    value = snapshot()
    tokens = [(value.size, AddedToken("<one>")), (value.size + 1, AddedToken("<two>"))]
    value.add(tokens)
    value.add(tokens)  # they exist already
    assert value.tokenizer.convert_tokens_to_ids(["<one>", "<two>"]) == [value.size, value.size + 1]


@pytest.mark.parametrize("before", [["<other>"], ["<two>", "<one>"]])
def test_tokens_that_would_get_other_ids_are_refused(before):
    value = snapshot()
    value.tokenizer.add_tokens(before)
    size = len(value.tokenizer)
    with pytest.raises(MismatchError, match="different ids") as error:
        value.add([(value.size, AddedToken("<one>")), (value.size + 1, AddedToken("<two>"))])
    assert len(error.value.offenders) == 2
    assert len(value.tokenizer) == size, "nothing is added"


def test_a_model_has_one_snapshot_per_tokenizer():
    model, tokenizer = tiny_models.model("bert"), word_tokenizer()
    backbone = Backbone.of(model)
    assert backbone.tokenizer is None
    first = backbone.tokenizer = snapshot_of(backbone, tokenizer, len(tokenizer))
    tokenizer.add_tokens(["<new>"])
    assert snapshot_of(backbone, tokenizer, len(tokenizer)) is first
    assert Backbone.of(copy.deepcopy(model)).tokenizer is first, (
        "a copied model uses the tokenizer too"
    )
    assert snapshot_of(backbone, word_tokenizer(), 5) is not first
    with pytest.raises(AttachError, match="str is not a tokenizer"):
        snapshot_of(backbone, "bert", 5)


def test_the_default_of_several_chat_templates_is_used():
    value = snapshot()
    value.tokenizer.chat_template = {"default": "a", "tools": "b"}
    assert value.chat_template() == "a"
    value.tokenizer.chat_template = None
    assert value.chat_template() is None
