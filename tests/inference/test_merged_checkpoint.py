"""A merged model is written as a checkpoint only if it computes the same when loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import adapterhub as ah
from adapterhub.errors import MergeError, OutputError
from adapterhub.inference.merged_checkpoint import write_checkpoint
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer


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


def test_what_is_not_written(merged, tmp_path):
    model, expected = merged
    wrong = {name: value + 1 for name, value in expected.items()}
    with pytest.raises(MergeError):
        write_checkpoint(model, word_tokenizer(), tmp_path / "out", wrong)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError):
        write_checkpoint(model, word_tokenizer(), tmp_path / "out", expected)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("limit", [20, 500, 2000, 20_000, "the tokenizer"])
def test_a_full_disk_leaves_nothing(merged, tmp_path, limit, monkeypatch):
    """The system refuses bytes beyond a limit: of the model, or of the tokenizer alone."""
    resource = pytest.importorskip("resource")
    (model, expected), tokenizer = merged, word_tokenizer()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = model.save_pretrained

    def save_then_fill(folder):
        save(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))

    if limit == "the tokenizer":
        monkeypatch.setattr(model, "save_pretrained", save_then_fill)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OutputError, match="cannot write"):
            write_checkpoint(model, tokenizer, tmp_path / "out", expected)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
