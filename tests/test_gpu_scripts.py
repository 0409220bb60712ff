"""The scripts for a GPU run on a CPU, on a small model, and check what they compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit import processes

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.apart


def record_of(script: str, folder: Path, *words: str) -> dict[str, Any]:
    """Run a script on its small model, and return its record."""
    out = folder / "small.json"
    ended = processes.run(
        f"benchmarks/gpu/{script}.py", "--small", "--out", out, *words, folder=ROOT
    )
    assert ended.returncode == 0, ended.printed
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("backbone", ["nf4", "bf16"])
def test_all_variants_agree_before_they_are_timed(backbone: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    words = ["--bf16"] if backbone == "bf16" else []
    found = record_of("quantized", tmp_path, "--methods", "prefix", *words)
    losses = {name: each["loss"] for name, each in found["agreement"].items()}
    assert all(each["agrees"] for each in found["agreement"].values())
    kbit = {"peft-kbit"} if backbone == "nf4" else set()
    assert losses.keys() == {"adapterhub", "adapterhub-train", "peft", *kbit}
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-3)
    assert found["variants"].keys() == {*losses, "prefix", "routed", "trainer"}
    assert all(variant["tokens_per_second"] > 0 for variant in found["variants"].values())


def test_many_adapters_agree_before_they_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    found = record_of("many_adapters", tmp_path)["adapters"]
    assert found.keys() == {"1", "8", "24"}
    for cell in found.values():
        assert cell["difference"] < 0.05
        assert all(cell[name]["decode"] > 0 for name in ("plain", "adapterhub", "peft"))
        assert cell["lifecycle"]["load"] > 0


def test_adapters_are_correct_on_this_device(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    results = record_of("correctness", tmp_path)["results"]
    assert [each for each in results if not each["ok"]] == []
    checks = {each["cell"].rpartition(", ")[2] for each in results}
    assert checks >= {"fp32", "bf16 sdpa", "routed", "compiled", "static", "reloaded", "detached"}
    assert checks >= {"nf4", "fp4", "int8", "fp8"}
