"""How good predictions are, by the kind of task: classification or regression."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

from adapterhub.errors import DataError


def classification_metrics(
    labels: Sequence[str] | Sequence[int], predictions: Sequence[str] | Sequence[int]
) -> dict[str, float]:
    """Accuracy, F1 averaged over the classes with equal weight, and Matthews correlation.

    The classes are those in `labels` or `predictions`. Matthews correlation is 0 where the labels
    or the predictions are all of one class.

    Raises DataError where the two differ in length or are empty.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    _check_lengths(labels, predictions)
    varied = len(set(labels)) > 1 and len(set(predictions)) > 1
    return {
        "accuracy": float(accuracy_score(labels, predictions)),
        "macro_f1": float(f1_score(labels, predictions, average="macro", zero_division=0.0)),
        "matthews": float(matthews_corrcoef(labels, predictions)) if varied else 0.0,
    }


def regression_metrics(labels: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Pearson and Spearman correlation, and the mean squared error.

    A correlation is 0 where the labels or the predictions are constant.

    Raises DataError where the two differ in length, are empty, or hold NaN or infinity.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_squared_error

    _check_lengths(labels, predictions)
    _check_finite("labels", labels)
    _check_finite("predictions", predictions)
    return {
        "pearson": _correlation(pearsonr, labels, predictions),
        "spearman": _correlation(spearmanr, labels, predictions),
        "mse": float(mean_squared_error(labels, predictions)),
    }


def _correlation(
    measure: Callable[..., tuple[float, float]], first: Sequence[float], second: Sequence[float]
) -> float:
    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Nearly constant values: handled just below.
        value = float(measure(first, second)[0])
    return value if math.isfinite(value) else 0.0


def _check_lengths(labels: Sequence[object], predictions: Sequence[object]) -> None:
    if len(labels) != len(predictions) or not len(labels):
        raise DataError(
            f"{len(labels)} labels and {len(predictions)} predictions cannot be compared",
            expected="as many predictions as labels, and at least one",
        )


def _check_finite(what: str, values: Sequence[float]) -> None:
    bad = [f"{what}[{i}] is {float(v)}" for i, v in enumerate(values) if not math.isfinite(v)]
    if bad:
        raise DataError(f"{len(bad)} of {len(values)} {what} are not numbers", offenders=bad[:5])
