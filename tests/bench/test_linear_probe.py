"""Linear probes by cross-validation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from adapterhub.bench import suggest as probing
from adapterhub.bench.suggest import FOLDS, REPEATS, linear_probe
from adapterhub.errors import DataError


def data(rows: int, signal: float, seed: int = 0, width: int = 16) -> tuple[Any, list[str]]:
    random = np.random.default_rng(seed)
    labels = ["pos" if n % 2 else "neg" for n in range(rows)]
    features = random.normal(size=(rows, width)).astype(np.float32)
    features[:, 0] += signal * np.array([1 if label == "pos" else -1 for label in labels])
    return features, labels


def accuracy(files: Any) -> float:
    rows = [row for file in files for row in file.rows]
    return float(np.mean([row["label"] == row["prediction"] for row in rows]))


def test_signal_is_found_and_noise_is_not() -> None:
    features, labels = data(300, 3.0)
    files = linear_probe(features, labels, range(300), "classes")
    assert len(files) == REPEATS
    assert all([row["label"] for row in file.rows] == labels for file in files)
    assert accuracy(files) > 0.97
    features, labels = data(300, 0.0)
    assert 0.4 < accuracy(linear_probe(features, labels, range(300), "classes")) < 0.6


def test_numbers_are_predicted() -> None:
    features, _ = data(200, 0.0)
    labels = [float(value) for value in 2 * features[:, 3] + 1]
    for file in linear_probe(features, labels, range(200), "numbers"):
        predicted = [row["prediction"] for row in file.rows]
        assert np.corrcoef(predicted, labels)[0, 1] > 0.99
        assert all(isinstance(value, float) for value in predicted)


def test_equal_texts_are_in_one_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are noise, and each row occurs twice: a leak would let the probe look them up."""
    random = np.random.default_rng(0)
    features = np.repeat(random.normal(size=(60, 200)).astype(np.float32), 2, axis=0)
    labels = list(np.repeat([f"c{n % 2}" for n in random.permutation(60)], 2))
    groups: list[Hashable] = [n // 2 for n in range(120)]
    assert accuracy(linear_probe(features, labels, groups, "classes")) < 0.7
    folds = list(probing._folds(np.array(labels), groups, "classes", 0))
    assert len(folds) == FOLDS
    for train, held in folds:
        assert not {groups[i] for i in train} & {groups[i] for i in held}


def test_the_same_division_for_all_features() -> None:
    _, labels = data(100, 0.0)
    first, second = (
        list(probing._folds(np.array(labels), range(100), "classes", 1)) for _ in range(2)
    )
    for (train, held), (other_train, other_held) in zip(first, second, strict=True):
        assert (train == other_train).all()
        assert (held == other_held).all()


@pytest.mark.parametrize(
    ("labels", "kind"),
    [(["a", "b"] * 4, "classes"), (["a"] * 50, "classes"), (["a"] * 50 + ["b"] * 4, "classes"),
     ([1.0] * 9, "numbers")],
)  # fmt: skip
def test_too_few_rows_are_refused(labels: list[Any], kind: str) -> None:
    features = np.zeros((len(labels), 3), dtype=np.float32)
    with pytest.raises(DataError, match="too few"):
        linear_probe(features, labels, range(len(labels)), kind)
