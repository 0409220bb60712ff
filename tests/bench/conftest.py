"""A small study that several tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import sentences, write_tsv

from adapterhub.bench.study import Study, read_study


@pytest.fixture
def study(backbone: Path, tmp_path: Path) -> Study:
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(150))]
    source = write_tsv(tmp_path / "train.tsv", rows)
    flags = {"backbone": str(backbone), "output": str(tmp_path / "study"),
             "data": {"train": str(source)}}  # fmt: skip
    bench = {"methods": ("head", "lora(rank=2)", "lora(sites=[nowhere])"), "rates": 2, "seeds": 2,
             "steps": 6, "baseline": "head"}  # fmt: skip
    return read_study(None, ["dtype=fp32"], flags, bench)
