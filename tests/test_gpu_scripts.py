"""The scripts for a GPU run on a CPU, on a small model, and check what they compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_all_variants_agree_before_they_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    record = tmp_path / "small.json"
    script = [sys.executable, "benchmarks/gpu/quantized.py", "--small"]
    subprocess.run(
        [*script, "--out", str(record), "--methods", "prefix"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = json.loads(record.read_text(encoding="utf-8"))
    losses = found["agreement"]["loss"]
    assert losses.keys() == {"adapterhub", "adapterhub-train", "peft", "peft-kbit"}
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-3)
    assert found["variants"].keys() == {*losses, "prefix", "routed", "trainer"}
    assert all(variant["tokens_per_second"] > 0 for variant in found["variants"].values())
