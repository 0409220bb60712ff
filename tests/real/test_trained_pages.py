"""The pages on trained weights run, shortened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pages
import pytest

from tests.kit import processes

ROOT = Path(__file__).parents[2]
# What each needs besides: a program, or a folder of $ADAPTERHUB_DATA.
NEEDS = {
    "docs/tutorials/language-model.md": None,
    "docs/tutorials/speech.md": "espeak-ng",
    "docs/tutorials/translation.md": "multi30k",
}


def is_there(name: str | None) -> bool:
    folder = Path(os.environ.get("ADAPTERHUB_DATA", "data"))
    return name is None or shutil.which(name) is not None or (folder / name).is_dir()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", NEEDS)
def test_the_blocks_of_a_page_run(page: str, smollm2: str, flan_t5: str, whisper: str) -> None:
    if not is_there(NEEDS[page]):
        pytest.skip(f"{NEEDS[page]} is not there")
    ended = processes.run("scripts/pages.py", page, "--quick", folder=ROOT, timeout=850)
    assert ended.returncode == 0, ended.printed


def test_every_page_on_trained_weights_is_run() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if pages.ON_TRAINED_WEIGHTS in path.read_text(encoding="utf-8")
    }
    assert marked == set(NEEDS)
