"""What several tests need: a tiny backbone on disk, small data files, and the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny
from hypothesis import HealthCheck, settings
from support import pytest_runtest_logreport, pytest_runtest_makereport, pytest_sessionfinish
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

# The hooks that write docs/support.md.
__all__ = ["pytest_runtest_logreport", "pytest_runtest_makereport", "pytest_sessionfinish"]

# A busy machine is no defect.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

WORDS = [
    "the",
    "a",
    "movie",
    "film",
    "was",
    "is",
    "very",
    "good",
    "great",
    "fine",
    "bad",
    "poor",
    "awful",
    "dull",
    "plot",
    "actor",
    "scene",
    "end",
]
GOOD, BAD = ("good", "great", "fine"), ("bad", "poor", "awful", "dull")


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """A folder with a tiny BERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("backbones") / "tiny-bert"
    tiny.model("bert", "features").save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocab_file = folder / "vocab.txt"
    vocab_file.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(vocab_file)).save_pretrained(folder)
    return folder


SENTINELS = [f"<extra_id_{i}>" for i in range(8)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def word_tokenizer(start: str = "", end: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with the special ids of `tiny`, that puts `start` and `end`
    around a text."""
    special = ["<unk>", "<pad>", "</s>", "<s>", "<mask>"]
    words = [*special, *SENTINELS, *WORDS, "user", "assistant", ":", "0", "1", "2", "3"]
    assert len(words) <= tiny.VOCAB
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(w, words.index(w)) for w in (start, end) if w]
    if around:
        single = " ".join(part for part in (start, "$A", end) if part)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>",
        bos_token="<s>", mask_token="<mask>", additional_special_tokens=SENTINELS,
        model_max_length=64, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


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
            tiny.model(architecture, task).save_pretrained(folder)
            word_tokenizer(*around).save_pretrained(folder)
            made[architecture] = folder
        return made[architecture]

    return folder_of


def write_json_lines(path: Path, rows: list[dict]) -> Path:
    """A JSON-lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sentences(count: int) -> list[tuple[str, str]]:
    """Sentences whose label one word decides, the same on every call."""
    rows = []
    for i in range(count):
        label, words = ("pos", GOOD) if i % 2 else ("neg", BAD)
        thing = ("movie", "film", "plot", "actor", "scene", "end")[i // 2 % 6]
        rows.append(
            (f"the {thing} was {'very ' * (i // 5 % 2)}{words[i // 3 % len(words)]}", label)
        )
    return rows


def write_tsv(path: Path, rows: list[tuple[str, ...]], header: str = "text\tlabel") -> Path:
    """A tab-separated file."""
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


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


def json_lines(text: str) -> list[dict]:
    """The objects of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]
