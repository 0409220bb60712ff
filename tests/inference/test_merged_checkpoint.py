"""A merged checkpoint on a full disk; tests/cli/test_merge.py has all else."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import OutputError
from adapterhub.inference.merged_checkpoint import write_checkpoint
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer


@pytest.fixture
def merged():
    model = tiny_models.model("bert").eval()
    tiny_models.scramble(ah.attach(model, "lora"))
    return model, ah.merge(model).expected


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
