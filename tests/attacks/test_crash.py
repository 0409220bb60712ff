"""SIGKILL during a save, or a full disk, leaves the old files or the new ones, never a mix."""

import os
from pathlib import Path

import pytest
from crash import SCENARIOS, result_of

from tests.kit import tiny_models
from tests.kit.selection import ALL

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="crash.py forks at each point"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
# The number of lines, of several hundred, before which a writer is killed.
FEWEST = 8
MOST = 999 if tiny_models.FULL_MATRIX else 20 if ALL else FEWEST
KILLED = {
    "first save": {"none", "new"},
    "overwrite": {"old", "new"},
    "overwrite without an exchange": {"old", "new"},
}


def test_a_kill_or_a_full_disk_never_leaves_a_mix(tmp_path: Path, capfd) -> None:
    """crash.py makes the checks; this test verifies that it met every state."""
    names = list(SCENARIOS)[:3] if tiny_models.FULL_MATRIX else list(SCENARIOS)
    results = {name: result_of(name, tmp_path / "x" / "a", MOST) for name in names}
    for name, states in KILLED.items():
        assert results[name]["points"] >= min(MOST, results[name]["lines"]) >= FEWEST
        assert set(results[name]["outcomes"]) >= states, name
    if not tiny_models.FULL_MATRIX:
        assert results["full disk in training"]["points"] >= MOST
        states = {"stopped []", "stopped [3, 3]", "finished [6, 6]"}
        assert set(results["full disk in training"]["outcomes"]) == states
        assert "Traceback" not in capfd.readouterr().err
