"""Which adapter to start from: a planted helper is found, and noise is not preferred."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import adapterhub as ah
from adapterhub.bench import suggest as suggesting
from adapterhub.bench.suggest import BARE, Candidate, Suggestion, check_probed, suggest
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError
from adapterhub.tasks import parse_task
from tests.kit import tiny_models
from tests.kit.selection import cases_of

ROWS, WIDTH, NOISE = 300, 24, 20


def planted(monkeypatch: pytest.MonkeyPatch, seed: int, helper: float | None) -> Suggestion:
    """Suggest with planted features: 20 adapters of noise, and perhaps one that helps."""
    random = np.random.default_rng(seed)
    labels = ["pos" if n % 3 else "neg" for n in range(ROWS)]
    sign = np.array([1.0 if label == "pos" else -1.0 for label in labels])[:, None]
    hidden = random.normal(size=(ROWS, WIDTH)) + 0.25 * sign

    def features(name: str | None) -> np.ndarray:
        if name is None:
            return hidden
        if helper is not None and name == f"candidate-{NOISE}":
            return hidden + helper * sign * (np.arange(WIDTH) == 0)
        mixed = hidden @ random.normal(size=(WIDTH, WIDTH)) * 0.3 + hidden
        return mixed + random.normal(size=hidden.shape) * 0.2

    def found(model: Any, encoded: Any, names: Sequence[str | None]) -> dict[Any, Any]:
        return {name: features(name) for name in names}

    monkeypatch.setattr(suggesting, "features_of", found)
    monkeypatch.setattr(suggesting, "load_folder", lambda *rest, **options: object())
    monkeypatch.setattr(suggesting, "detach", lambda model, name: None)
    examples = [Example(f"text {n}", label=label) for n, label in enumerate(labels)]
    encoded = SimpleNamespace(task=parse_task("classification"), examples=examples)
    names = [f"noise-{n}" for n in range(NOISE)] + ["helper"] * (helper is not None)
    candidates = [Candidate(name, Path(name)) for name in names]
    return suggest(None, encoded, candidates)  # type: ignore[arg-type]


def test_a_planted_helper_is_found_among_twenty_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted(monkeypatch, 0, helper=1.5)
    assert found.best == "helper"
    assert found.estimates[0].method == "helper"
    assert found.comparisons["helper"].verdict == "better"
    assert len(found.estimates) == NOISE + 1
    assert found.smallest is not None


def test_planted_noise_is_not_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in cases_of(range(4)):
        assert planted(monkeypatch, seed, helper=None).best is None, seed


def test_adapters_that_do_not_fit_are_left_out_and_the_model_is_as_before(tmp_path: Path) -> None:
    labels = ["pos", "neg"] * 20
    examples = [Example(f"text {n}", label=label) for n, label in enumerate(labels)]
    every = tiny_models.batch(rows=40)

    class Encoded:
        task = parse_task("classification")
        rows = tuple(range(40))

        def batch(self, indices: Any) -> Any:
            return {name: tensor[list(indices)] for name, tensor in every.items()}

    encoded = Encoded()
    encoded.examples = examples  # type: ignore[attr-defined]
    for name, seed in (("fits", 0), ("other", 1)):
        model = tiny_models.model("bert", seed=seed)
        ah.attach(model, "lora(rank=2)", name=name).save(tmp_path / name)
    model = tiny_models.model("bert").eval()
    before = model(**tiny_models.batch()).logits
    candidates = [Candidate(name, tmp_path / name) for name in ("fits", "other")]
    found = suggest(model, encoded, candidates)  # type: ignore[arg-type]
    assert [each.method for each in found.estimates] == ["fits"]
    assert "different backbone" in found.unusable["other"]
    assert found.bare.method == BARE
    assert found.comparisons["fits"].verdict == "tied"  # B is zero: the same features
    assert found.best is None
    assert ah.adapters(model) == {}
    assert (model(**tiny_models.batch()).logits == before).all()


@pytest.mark.parametrize("spec", ["tagging", "seq2seq", "causal-lm", "multi-label"])
def test_other_tasks_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="cannot be probed"):
        check_probed(parse_task(spec))
