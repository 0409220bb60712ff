"""The guides to a new method, architecture and task: followed to the letter in a copy."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pages
import pytest

from tests.kit import processes

ROOT = Path(__file__).parents[1]
# Page -> the tests that its command must run, and how often at least.
GUIDES = {
    "docs/tutorials/new-method.md": {
        "test_the_weight_gets_a_product_of_three": 3,
        "test_a_cell": 3,
    },
    "docs/tutorials/new-architecture.md": {
        "test_value_features_are_those_attention_uses": 1,
        "test_an_update_of_a_part_equals_the_update_of_its_rows": 3,
        "test_a_cell": 26,
    },
    "docs/tutorials/new-task.md": {
        "test_the_metrics_are_those_of_scikit_learn": 1,
        "test_a_prediction_is_on_the_scale": 4,
        "test_train_eval_predict": 1,
        "test_the_metrics_are_those_that_the_task_names": 1,
    },
}


@pytest.fixture
def follow(tmp_path: Path) -> Callable[[str], Counter[str]]:
    """Return a function that follows a guide: how many tests passed in it, by function."""

    def follow(page: str) -> Counter[str]:
        results = tmp_path / "results.xml"
        environment = {
            "PYTEST_ADDOPTS": f"--junitxml={results} -p no:cacheprovider",
            "MAKEFLAGS": r"PYTEST=.venv/bin/python\ -m\ pytest",  # one process, not two workers
        }
        words = (ROOT / "scripts/pages.py", ROOT / page, "--quick")
        ended = processes.run(*words, folder=tmp_path, environment=environment)
        assert ended.returncode == 0, ended.printed
        cases = list(ElementTree.parse(results).iter("testcase"))
        assert not [case for case in cases if len(case.findall("skipped"))]
        return Counter(case.attrib["name"].partition("[")[0] for case in cases)

    return follow


@pytest.mark.apart
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_leads_to_tests_that_pass(page: str, follow) -> None:
    passed = follow(page)
    assert {name: passed[name] >= least for name, least in GUIDES[page].items()} == dict.fromkeys(
        GUIDES[page], True
    ), passed


def test_every_page_of_a_copy_is_a_guide() -> None:
    in_copies = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if pages.IN_COPY in path.read_text(encoding="utf-8")
    }
    assert in_copies == set(GUIDES)


def test_a_block_is_added_at_the_end_of_a_file(tmp_path: Path) -> None:
    page = (
        '```python title="x.py"\none = 1\n```\n```python title="x.py, at the end"\ntwo = 2\n```\n'
    )
    pages.run_page("page", page, tmp_path)
    assert (tmp_path / "x.py").read_text() == "one = 1\n\ntwo = 2\n"
