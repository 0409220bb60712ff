"""The study of one adapter with three heads beside three adapters."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import several_heads
from run_records import RunRecords
from several_heads import ALONE, JOINT, TASKS

from adapterhub.recipe.recipe import read_draft

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tasks", [["mrpc"], ["stsb"], list(TASKS)])
def test_its_recipes_are_valid_and_take_as_many_steps(tmp_path: Path, tasks: list[str]) -> None:
    recipe = read_draft(None, (), several_heads.recipe_of(tmp_path, tasks, 7, 150))
    assert recipe.train.max_steps == 150 * len(tasks)
    assert recipe.seed == 7
    assert list(recipe.tasks) == (tasks if len(tasks) > 1 else [])


def test_a_planted_difference_is_found_and_a_tie_is_none() -> None:
    draw = random.Random(0)
    table = several_heads.table([_record(seed, draw) for seed in (1, 2, 3)])
    cells = {line.split(" | ")[0][2:]: line for line in table.splitlines()[2:5]}
    p = {name: float(line.split("p = ")[1].split()[0]) for name, line in cells.items()}
    assert p["mrpc"] < 0.01 < 0.05 < p["rte"]
    assert p["stsb"] > 0.05
    assert "| all | bytes | 1 kB | 3 kB |" in table


def test_the_guide_has_the_table_of_the_committed_records() -> None:
    records = RunRecords(ROOT / "benchmarks" / "studies" / "several-heads").read()
    assert [each["seed"] for each in records] == [1, 2, 3]
    guide = ROOT / "docs" / "guides" / "multi-task.md"
    assert several_heads.table(records) in guide.read_text("utf-8")


def _record(seed: int, draw: random.Random) -> dict[str, Any]:
    def classes(rate: float) -> list[dict[str, str]]:
        return [
            {"label": "a", "prediction": "a" if draw.random() < rate else "b"} for _ in range(400)
        ]

    numbers = [{"label": float(i), "prediction": i + draw.random()} for i in range(50)]
    sides = {JOINT: (0.9, 0.6, 1000), ALONE: (0.7, 0.6, 3000)}
    return {"seed": seed, "steps": 150} | {
        kind: {
            "bytes": size,
            "seconds": 10.0,
            "rows": {"mrpc": classes(mrpc), "rte": classes(rte), "stsb": numbers},
        }
        for kind, (mrpc, rte, size) in sides.items()
    }
