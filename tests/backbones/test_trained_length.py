"""The length that a sentence encoder was trained with."""

from __future__ import annotations

import pytest

from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.pooling import trained_length


def test_that_of_the_packaged_sentence_encoder():
    folder, _ = find_backbone("sentence-transformers/all-MiniLM-L6-v2")
    assert trained_length(folder) == 256


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"max_seq_length": "9"}', "[" * 9999])
def test_none_without_a_record(text, tmp_path):
    if text is not None:
        (tmp_path / "sentence_bert_config.json").write_text(text)
    assert trained_length(tmp_path) is None
