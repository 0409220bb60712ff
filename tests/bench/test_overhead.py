"""What an adapter costs at inference."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models

import adapterhub as ah
from adapterhub.bench.overhead import measure_overhead


@pytest.mark.parametrize(
    ("method", "routes", "merges"),
    [("lora", True, True), ("pfeiffer", True, False), ("full", False, True)],
)
def test_what_can_be_measured_is(method: str, routes: bool, merges: bool, tmp_path: Path) -> None:
    model = tiny_models.model("bert", "classification")
    adapter = ah.attach(model, method, name="mine")
    adapter.save(tmp_path / "mine")
    found = measure_overhead(adapter, tiny_models.batch(), tmp_path / "mine")
    assert found["merges"] == merges
    assert found["attached"] > 0
    assert ("routed" in found) == routes
    assert found["load_seconds"] is None or found["load_seconds"] > 0
    assert list(ah.adapters(model)) == ["mine"]
