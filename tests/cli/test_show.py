"""`adapterhub show`."""

from __future__ import annotations

import json

import sample_adapters


def test_show_prints_the_versions_and_the_card(typed, tmp_path):
    sample_adapters.write(tmp_path / "run" / "adapter", 0, accuracy=0.75, card="# Polite\n")
    typed("publish run --name polite --tag best")
    shown = typed("show polite@best")
    assert "polite@v1" in shown
    assert "# Polite" in shown
    assert "<!--" not in shown
    assert json.loads(typed("show polite --json"))["metrics"] == {"accuracy": 0.75}
    assert "polite@v1" not in typed("show ./run"), "a folder has no versions"
