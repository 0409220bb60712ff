"""The ceilings of executed walks: a change may lower them, none may raise them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.apart
SCRIPT = Path(__file__).parents[1] / "scripts" / "walks.py"
# Files and doors of each walk, as `python scripts/walks.py` counts them. What threads and
# finalizers do varies by a door or two.
CEILINGS = {
    "attach": (32, 65),
    "save": (25, 45),
    "load": (46, 107),
    "publish": (18, 39),
    "train": (131, 449),
    "serve": (44, 86),
    "hub": (38, 76),
    "push": (27, 57),
}


@pytest.fixture(scope="module")
def counts():
    command = [sys.executable, str(SCRIPT), "--json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CEILINGS)
def test_a_walk_has_no_more_files_and_doors_than_before(counts, name):
    files, _, doors = counts[name]
    most_files, most_doors = CEILINGS[name]
    advice = f"see python scripts/walks.py --doors {name}"
    assert files <= most_files, f"{name}: {files} files, more than {most_files}: {advice}"
    assert doors <= most_doors, f"{name}: {doors} doors, more than {most_doors}: {advice}"
    assert doors > most_doors // 2, f"lower the ceilings of {name}: {files}, {doors}"


def test_every_walk_has_a_ceiling(counts):
    assert set(counts) == set(CEILINGS)
