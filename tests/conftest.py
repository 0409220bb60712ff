"""Shared fixtures: tiny backbones on disk, small data files, and the command line.

What is slow to import is imported where a test first needs it: some folders do without torch.
"""

import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kit import session
from tests.kit.selection import ALL
from tests.kit.session import home_in

# The hooks that write the tables of docs/reference/support.md and docs/guides/interchange.md.
whole_matrix = os.environ.get("ADAPTERHUB_MATRIX") == "full"
pytest_plugins = ["tests.kit.matrix", "tests.kit.peft_differential"] if whole_matrix else []

# A slow machine is not a failure. Examples are the same in each run, and new ones in
# `make test-all`; one that failed is kept as an `@example`, not in a database.
settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    derandomize=not ALL,
    print_blob=True,
)
settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """Let the clients of huggingface_hub 1 leave sockets to the garbage collector, as they do."""
    if version("huggingface_hub").startswith("1."):
        sockets = "ignore:unclosed <socket:ResourceWarning"
        traces = "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
        for line in (sockets, traces):
            config.addinivalue_line("filterwarnings", line)


def pytest_collectstart() -> None:
    """Collect no garbage meanwhile: nearly all that is imported and collected stays."""
    gc.disable()


# Rooms by how often their tests had to change with the package, in the last 600 commits: what fails
# most often runs first. Tests of the whole tree come before them.
ROOMS = ("", "cli", "training", "serving", "tasks", "contract", "registry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of these rooms first; the order depends on nothing but the paths."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.relative_to(Path(__file__).parent).parts
        room = folder[0] if folder else ""
        return ROOMS.index(room) if room in ROOMS else len(ROOMS)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's rounds, and make them rarer.

    Nearly all of it stays: a collection would take two seconds. pytest attaches its handlers to
    each logger that does not propagate, six times in a test, and torch has eighty.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)  # full collections are made below
    gc.enable()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def settle() -> None:
    """Collect all garbage; later collections leave out what lives by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def settled() -> None:
    """Keep full collections short, in a module that makes many."""
    settle()


_tests_run = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Collect all garbage between tests, now and then, and not in the middle of one."""
    if next(_tests_run) % 250 == 0:
        settle()


_home_numbers = itertools.count()


@pytest.fixture(scope="session")
def homes(tmp_path_factory) -> Path:
    """The parent of the users' folders of all tests."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(scope="session", autouse=True)
def session_home(homes) -> Iterator[None]:
    """Give what is prepared for several tests a home of its own, and leave out slow calls."""
    with home_in(homes / "session", homes / "cache"), session.left_out():
        yield


@pytest.fixture(autouse=True)
def no_home(homes) -> Iterator[None]:
    """Set the user's registry, trusted keys and record of versions to new, missing files."""
    with home_in(homes / str(next(_home_numbers)), homes / "cache"):
        yield  # the cache, of digests, is shared by the tests


@pytest.fixture(scope="module")
def charts() -> Iterator[None]:
    """Draw charts, which other modules leave out."""
    with session.charts_drawn():
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Seed torch, so that results do not depend on the order of tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """Save a tiny BERT and its tokenizer to a folder."""
    from transformers import BertTokenizerFast

    from tests.kit import tiny_models
    from tests.kit.data import WORDS

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
    from tests.kit import media, tiny_models
    from tests.kit.data import word_tokenizer

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
    from tests.kit.data import sentences, write_tsv

    rows = sentences(64)
    return write_tsv(tmp_path / "train.tsv", rows), write_tsv(tmp_path / "dev.tsv", rows[::3])


@pytest.fixture
def recipe_with(backbone, data, tmp_path):
    """Return a function that reads a recipe: the tiny backbone, the small data, and KEY=VALUE."""
    from adapterhub.recipe.recipe import read

    files = {"train": str(data[0]), "eval": str(data[1])}

    def recipe(*words: str, output: str = "run", folder: Path = backbone):
        flags = {"backbone": str(folder), "output": str(tmp_path / output), "data": files}
        return read(None, words, flags)

    return recipe


@pytest.fixture
def key():
    """Create a key; without the package cryptography the test is skipped."""
    from tests.kit.registries import new_key

    return new_key()


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
    """Return a function that runs `adapterhub train` on the tiny backbone and data, or others."""

    def run(
        *arguments: object, output: Path | None = None,
        folder: Path = backbone, file: object = None,
    ) -> tuple[int, str, str]:  # fmt: skip
        files = ("--train", file or data[0], "--eval", file or data[1])
        options = ("train.tensorboard=false", "train.report=false")  # a report takes half a second
        where = ("--backbone", folder, *files, "--output", output or tmp_path / "run")
        return adapterhub("train", *where, *options, *arguments)

    return run


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster of two nodes, in the process that `tests/test_on_ray.py` starts."""
    from tests.kit.server import two_nodes

    with two_nodes() as address:
        yield address


@pytest.fixture(scope="session")
def new_state() -> Iterator[Callable[[], tuple[Any, str]]]:
    """Return what makes a new database and a new place in a bucket, for hubs of processes."""
    shared_state = pytest.importorskip("tests.kit.real_hub")
    pytest.importorskip("psycopg")
    pytest.importorskip("moto")
    if shared_state.programs() is None:
        pytest.skip("PostgreSQL is not installed")
    with shared_state.shared_state() as created:
        yield created
