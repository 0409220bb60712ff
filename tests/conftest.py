"""What several tests need: a tiny backbone on disk, small data files, and the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from fixtures import WORDS, sentences, word_tokenizer, write_tsv
from hypothesis import HealthCheck, settings
from support_table import pytest_runtest_logreport, pytest_runtest_makereport, pytest_sessionfinish
from transformers import BertTokenizerFast

# The hooks that write docs/support.md.
__all__ = ["pytest_runtest_logreport", "pytest_runtest_makereport", "pytest_sessionfinish"]

# A busy machine is no defect.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """A test draws the same values wherever it runs, alone or behind others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """A folder with a tiny BERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("backbones") / "tiny-bert"
    tiny_models.model("bert", "features").save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocab_file = folder / "vocab.txt"
    vocab_file.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(vocab_file)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def backbones(backbone, tmp_path_factory):
    """A folder with a tiny model and its tokenizer: "bert", one that generates, or a pair."""
    kinds = {"llama": ("causal-lm", "<s>", ""), "gpt2": ("causal-lm", "", ""),
             "t5": ("seq2seq", "", "</s>"), "bart": ("seq2seq", "<s>", "</s>")}  # fmt: skip
    made = {"bert": backbone}

    def folder_of(architecture: str) -> Path:
        if architecture not in made:
            task, *around = kinds[architecture]
            folder = tmp_path_factory.mktemp("backbones") / f"tiny-{architecture}"
            tiny_models.model(architecture, task).save_pretrained(folder)
            word_tokenizer(*around).save_pretrained(folder)
            made[architecture] = folder
        return made[architecture]

    return folder_of


@pytest.fixture
def data(tmp_path) -> tuple[Path, Path]:
    """Training and evaluation files that a tiny model learns."""
    rows = sentences(64)
    return write_tsv(tmp_path / "train.tsv", rows), write_tsv(tmp_path / "dev.tsv", rows[::3])


@pytest.fixture
def adapterhub(monkeypatch, capsys):
    """Runs the command line in this process: adapterhub("train", ...) -> (exit code, stdout,
    stderr)."""
    from adapterhub.cli import main

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["adapterhub", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def train(adapterhub, backbone, data, tmp_path):
    """Runs `adapterhub train` on the tiny backbone and data, with more words."""

    def run(*words: object, output: Path | None = None) -> tuple[int, str, str]:
        files = ("--train", data[0], "--eval", data[1])
        where = ("--output", output or tmp_path / "run")
        return adapterhub(
            "train", "--backbone", backbone, *files, *where, "train.tensorboard=false", *words
        )

    return run
