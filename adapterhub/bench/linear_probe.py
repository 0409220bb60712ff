"""A linear probe: how well a linear model tells labels from features, by cross-validation.

    ridge regression on standardized features, its penalty by leave-one-out within the training
    folds; for classes, on one target of -1 and 1 each (scikit-learn's RidgeClassifierCV)

It is closed-form, so it has no learning rate and no seed of its own (Alain & Bengio 2017,
https://arxiv.org/abs/1610.01644, for probes). Rows of equal content are in one fold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterhub.errors import DataError
from adapterhub.pages.predictions import PredictionFile

FOLDS = 5
REPEATS = 2  # divisions into folds: how much a score depends on the division
_PENALTIES = np.logspace(-1, 6, 15)
Features = NDArray[np.float32]


def linear_probe(
    features: Features, labels: Sequence[Any], groups: Sequence[Hashable], kind: str
) -> list[PredictionFile]:
    """Return the predictions of each row by probes that were fitted without it, per repeat.

    Features are (rows, width); the kind is classes or numbers. Rows of one group are in one fold.

    Raises:
        DataError: too few rows, of all or of a class.
    """
    _check(labels, groups, kind)
    return [
        PredictionFile(kind, "", repeat, "", "", (), rows)
        for repeat in range(REPEATS)
        for rows in [_predicted(features, labels, groups, kind, repeat)]
    ]


def _check(labels: Sequence[Any], groups: Sequence[Hashable], kind: str) -> None:
    few = len(set(groups)) < 2 * FOLDS
    if kind == "classes":
        counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
        rare = [f"{label}: {count}" for label, count in counts.items() if count < FOLDS]
        few = few or len(counts) - len(rare) < 2
    if few:
        raise DataError(
            f"{len(labels):,} rows are too few for {FOLDS} folds",
            expected=f"{2 * FOLDS} different texts at least, and {FOLDS} of each of two classes",
        )


def _predicted(
    features: Features,
    labels: Sequence[Any],
    groups: Sequence[Hashable],
    kind: str,
    repeat: int,
) -> list[dict[str, Any]]:
    from sklearn.linear_model import RidgeClassifierCV, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    given = np.array(labels, dtype=object if kind == "classes" else float)
    targets = given.astype(str) if kind == "classes" else given
    found = np.empty(len(labels), dtype=object)
    model = RidgeClassifierCV if kind == "classes" else RidgeCV
    for train, held in _folds(targets, groups, kind, repeat):
        fitted = make_pipeline(StandardScaler(), model(alphas=_PENALTIES))
        fitted.fit(features[train], targets[train])
        found[held] = fitted.predict(features[held])
    return [
        {"label": _plain(label), "prediction": _plain(guess)}
        for label, guess in zip(targets, found, strict=True)
    ]


def _folds(
    targets: NDArray[Any], groups: Sequence[Hashable], kind: str, repeat: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    of_row = np.array([numbers[group] for group in groups])
    splitter = StratifiedGroupKFold if kind == "classes" else GroupKFold
    folds = splitter(FOLDS, shuffle=True, random_state=repeat)
    yield from folds.split(np.zeros(len(targets)), targets, of_row)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float | np.floating) else str(value)
