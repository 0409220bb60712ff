"""A merged model is written as a checkpoint only if it computes the same when loaded."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from fixtures import word_tokenizer
from transformers import AutoModelForSequenceClassification

import adapterhub as ah
from adapterhub.errors import MergeError, OutputError
from adapterhub.merging.checkpoint import write_checkpoint


@pytest.fixture
def merged():
    model = tiny_models.model("bert").eval()
    tiny_models.scramble(ah.attach(model, "lora"))
    return model, ah.merge(model).expected


def test_transformers_alone_loads_it(merged, tmp_path):
    model, expected = merged
    differences = write_checkpoint(model, word_tokenizer(), tmp_path / "out", expected)
    assert max(differences.values()) < 1e-4
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    batch = tiny_models.batch()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_a_checkpoint_that_computes_something_else_is_not_written(merged, tmp_path):
    model, expected = merged
    wrong = {name: value + 1 for name, value in expected.items()}
    with pytest.raises(MergeError):
        write_checkpoint(model, word_tokenizer(), tmp_path / "out", wrong)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(merged, tmp_path):
    model, expected = merged
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError):
        write_checkpoint(model, word_tokenizer(), tmp_path / "out", expected)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
