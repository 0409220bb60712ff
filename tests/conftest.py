"""Shared fixtures: tiny backbones on disk, small data files, and the command line."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import media
import pytest
import tiny_models
import torch
from fixtures import WORDS, sentences, word_tokenizer, write_tsv
from hypothesis import HealthCheck, settings
from transformers import BertTokenizerFast

# The hooks that write the tables of docs/reference/support.md and docs/guides/interchange.md.
pytest_plugins = ["support_table", "interchange_table"]

# A slow machine is not a failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


_home_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_home(monkeypatch, homes) -> None:
    """Set the user's registry, trusted keys and record of versions to new, missing files."""
    home = homes / str(next(_home_numbers))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("ADAPTERHUB_STATE", str(home / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(homes / "cache"))  # of digests, shared by the tests
    for variable in ("ADAPTERHUB_TRUST", "ADAPTERHUB_REQUIRE_SIGNATURES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def homes(tmp_path_factory) -> Path:
    """The parent of the users' folders of all tests."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Seed torch, so that results do not depend on the order of tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """Save a tiny BERT and its tokenizer to a folder."""
    folder = tmp_path_factory.mktemp("backbones") / "tiny-bert"
    tiny_models.model("bert", "features").save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocab_file = folder / "vocab.txt"
    vocab_file.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(vocab_file)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def backbones(backbone, tmp_path_factory):
    """Return a function from an architecture to a folder with a tiny model and its tokenizer."""
    kinds = {"llama": ("causal-lm", "<s>", ""), "gpt2": ("causal-lm", "", ""),
             "t5": ("seq2seq", "", "</s>"), "bart": ("seq2seq", "<s>", "</s>")}  # fmt: skip
    folders = {"bert": backbone}

    def folder_of(architecture: str) -> Path:
        if architecture not in folders and architecture in media.BACKBONES:
            folders[architecture] = tmp_path_factory.mktemp("backbones") / f"tiny-{architecture}"
            media.BACKBONES[architecture](folders[architecture])
        if architecture not in folders:
            task, *around = kinds[architecture]
            folder = tmp_path_factory.mktemp("backbones") / f"tiny-{architecture}"
            tiny_models.model(architecture, task).save_pretrained(folder)
            word_tokenizer(*around).save_pretrained(folder)
            folders[architecture] = folder
        return folders[architecture]

    return folder_of


@pytest.fixture
def data(tmp_path) -> tuple[Path, Path]:
    """Write training and evaluation files that a tiny model can learn."""
    rows = sentences(64)
    return write_tsv(tmp_path / "train.tsv", rows), write_tsv(tmp_path / "dev.tsv", rows[::3])


@pytest.fixture
def adapterhub(monkeypatch, capsys):
    """Return a function that runs the CLI in this process.

    `adapterhub("train", ...)` returns (exit code, stdout, stderr).
    """
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
    """Return a function that runs `adapterhub train` on the tiny backbone and data."""

    def run(*arguments: object, output: Path | None = None) -> tuple[int, str, str]:
        files = ("--train", data[0], "--eval", data[1], "--output", output or tmp_path / "run")
        options = ("train.tensorboard=false", "train.report=false")  # a report takes half a second
        return adapterhub("train", "--backbone", backbone, *files, *options, *arguments)

    return run
