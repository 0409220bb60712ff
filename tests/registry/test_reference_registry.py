"""The reference registry: each adapter is valid, small, and keeps its score on its sample.

The samples are a few sentences per adapter, written for this project. They detect changed
outputs of an adapter or a backbone; the quality of an adapter is in the metrics of its manifest.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.inference.open import open_adapter
from adapterhub.inference.record import read_training_record
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import Query
from tests.kit.selection import long_table

ROOT = Path(__file__).parents[2] / "registry"
SCORES = json.loads((ROOT / "samples" / "scores.json").read_text(encoding="utf-8"))


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return LocalRegistry(ROOT)


def test_it_is_valid_small_and_complete(registry):
    entries = registry.search(Query())
    assert {entry.name for entry in entries} == SCORES.keys()
    assert len(entries) >= 10
    assert registry.verify() == []
    assert sum(p.stat().st_size for p in ROOT.rglob("*") if p.is_file()) < 8e6
    for entry in entries:
        assert entry.license == "apache-2.0"
        assert str(entry.description).startswith("Use it to ")
        # The majority class has 0; 0.2 is three standard errors with 277 rows.
        assert entry.metrics.get("matthews", entry.metrics.get("pearson", 0)) > 0.2


def score(folder, sample):
    """The metrics of an adapter on a sample."""
    known = read_training_record(folder)
    pair = "pair" if known.data.pair else None
    options = replace(known.data, text="text", pair=pair, label="label", header=True)
    examples = known.task.read(str(sample), options, "eval")
    return open_adapter(folder).evaluate(examples)


@long_table("name", sorted(SCORES), parts=8, nightly=2)
def test_each_adapter_keeps_its_score(registry, name):
    folder = registry.get(registry.resolve(name))
    metrics = score(folder, ROOT / "samples" / SCORES[name]["sample"])
    metric = SCORES[name]["metric"]
    # Rounding of another torch version may change the prediction of one example.
    assert metrics[metric] == pytest.approx(SCORES[name]["score"], abs=0.1)
