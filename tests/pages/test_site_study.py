"""The leaderboards of a study: their numbers are those of its records."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from adapterhub.cli._site import command_of, study_boards
from adapterhub.files.manifest import from_json

ROOT = Path(__file__).parents[2]
GLUE = ROOT / "benchmarks/studies/glue"
TASKS = {"sst2": "accuracy", "mrpc": "accuracy", "stsb": "pearson"}


@pytest.fixture(scope="module")
def boards():
    return {each.task: each for each in study_boards(GLUE)}


@pytest.fixture(scope="module")
def finals():
    """The test scores and parameters of the final runs, by task and method."""
    found = defaultdict(list)
    for path in sorted((GLUE / "records").glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            record = json.loads(line)
            cell = record["cell"]
            if cell["stage"] == "final" and record["status"] == "done":
                found[cell["task"], cell["method"]].append(record)
    return found


@pytest.mark.parametrize("task", TASKS)
def test_the_numbers_of_a_leaderboard_are_those_of_the_records(boards, finals, task):
    board = boards[task].board
    assert boards[task].backbone == "sentence-transformers/all-MiniLM-L6-v2"
    scores = {score.name: score for score in board.scores}
    assert len(scores) >= 30
    checked = 0
    for (of_task, method), records in finals.items():
        if of_task != task or len({r["cell"]["rate"] for r in records}) > 1:
            continue
        score = scores[method]
        mean = 100 * fmean(record["tested"][TASKS[task]] for record in records)
        # As shown: the records keep five digits of each row, from which the score is computed.
        assert score.value == pytest.approx(mean, abs=0.05)
        assert score.text.startswith(f"{score.value:.1f} ±")
        assert score.low < score.value < score.high
        assert score.interval == f"{score.low:.1f} to {score.high:.1f}"
        costs = records[0]["costs"]
        assert score.parameters == costs["trained"] + costs["head"]
        checked += 1
    assert checked >= 25
    values = [score.value for score in board.scores]
    assert values == sorted(values, reverse=True)


def test_the_report_has_the_same_numbers(boards):
    report = (GLUE / "report.md").read_text(encoding="utf-8")
    for task in TASKS:
        section = report.partition(f"## {task}:")[2].partition("\n## ")[0]
        for score in boards[task].board.scores:
            row = f"| {score.name} | {score.text} | {score.interval} |"
            assert row in section, row


def test_the_recipe_of_each_reference_adapter_is_a_command():
    files = sorted((ROOT / "registry").glob("*/*/v*/adapter.json"))
    assert len(files) >= 12
    for path in files:
        manifest = from_json(path.read_bytes())
        command = command_of(manifest)
        assert command.startswith(f"adapterhub train --backbone {manifest.backbone.id} --method ")
        assert " --train FILE" in command
