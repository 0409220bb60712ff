"""The pages of the committed studies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from reference import studies as study_pages

pytestmark = pytest.mark.usefixtures("charts")

RECIPE = """\
# A study of two methods:
# which one?
#
#     cd FOLDER
#     adapterhub bench study.yaml
#
# Subsampled.
bench:
  methods: [lora, full]
"""


@pytest.fixture
def committed() -> Path:
    return study_pages.STUDIES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "other.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.md").write_text("# mine\n\n## sst2\n\nTake lora.\n", encoding="utf-8")
    monkeypatch.setattr(study_pages, "STUDIES", tmp_path)
    return tmp_path


def test_every_committed_recipe_is_in_the_overview() -> None:
    overview = study_pages.pages()["studies/index.md"]
    for path in study_pages.STUDIES.glob("*.yaml"):
        assert study_pages._TITLES[path.stem] in overview


def test_a_study_has_a_page_when_its_report_is_there(folder: Path) -> None:
    pages = study_pages.pages()
    assert list(pages) == ["studies/index.md", "studies/mine.md"]
    assert "- [mine](mine.md): A study of two methods: which one?" in pages["studies/index.md"]
    assert "- other: A study of two methods" in pages["studies/index.md"]
    page = pages["studies/mine.md"]
    assert page.startswith("# mine\n\nA study of two methods: which one?\n\n```text\ncd FOLDER\n")
    assert "Subsampled." in page
    assert page.count("# mine\n") == 1
    assert "Take lora." in page
    assert page.endswith(f"```yaml\n{RECIPE}```\n")


def test_the_first_table_has_metrics_and_only_tasks_on_which_something_was_learned() -> None:
    page = study_pages.pages()["studies/glue.md"]
    first, second = page.split("## All tasks\n")[1].split("## sst2")[0].split("**Undecided.**")
    assert "| method | sst2, accuracy | mrpc, accuracy | stsb, pearson |\n|---|---:|" in first
    assert "| method | cola, matthews | rte, accuracy |\n|---|---:|---:|\n| head | 2.4" in second
    assert "| majority class | 50.9 | 68.4 |  |\n| mean |  |  | 0.0 |" in first
    assert "peft lora" in first
    assert "peft lora" not in second


@pytest.mark.apart
def test_the_interactive_report_is_made_of_the_records(committed: Path, folder: Path) -> None:
    assert study_pages.assets() == {}
    assert "mine-charts.html" not in study_pages.pages()["studies/mine.md"]
    shutil.rmtree(folder / "mine")
    shutil.copytree(committed / "transfer-stsb", folder / "mine")
    (path,) = study_pages.assets().values()
    page = path.read_text(encoding="utf-8")
    assert "<svg" in page
    assert str(path.parent) not in page
    assert "(mine-charts.html)" in study_pages.pages()["studies/mine.md"]


def test_the_claims_are_a_page(folder: Path) -> None:
    (folder / "claims.md").write_text("## A claim\n", encoding="utf-8")
    pages = study_pages.pages()
    assert pages["studies/claims.md"].startswith("# Textbook claims\n")
    assert pages["studies/claims.md"].endswith("## A claim\n")
    assert "[Textbook claims](claims.md)" in pages["studies/index.md"]
