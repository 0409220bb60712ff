"""The ceilings of executed walks, in docs/architecture.md: changes lower them, none raises them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.apart
SCRIPT = Path(__file__).parents[1] / "scripts" / "walks.py"
PAGE = SCRIPT.parents[1] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\w+) \| (\d+) \| (\d+) \|$", re.M)
CEILINGS = {name: (int(f), int(d)) for name, f, d in ROW.findall(PAGE.read_text("utf-8"))}
VARIES = 2  # doors that threads and finalizers open in some runs


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
    assert files <= most_files + VARIES, f"{name}: {files} files, more than {most_files}: {advice}"
    assert doors <= most_doors + VARIES, f"{name}: {doors} doors, more than {most_doors}: {advice}"
    assert doors > most_doors // 2, f"lower the ceilings of {name}: {files}, {doors}"


def test_every_walk_has_a_ceiling(counts):
    assert set(counts) == set(CEILINGS)
