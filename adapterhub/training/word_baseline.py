"""Bag-of-words baseline: a linear model on words, fitted to the rows of a run without a backbone.

Words and word pairs are weighted by TF-IDF (with 1 + log tf). Classes are predicted by logistic
regression, numbers by ridge regression. For pairs of texts, each text has separate features.
Reports of runs, `adapterhub bench` and `adapterhub suggest` compare adapters with it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from adapterhub.data.examples import Example, data_hash
from adapterhub.pages.page import WordsComparison
from adapterhub.pages.row_scores import PredictionFile, row_score, row_scores
from adapterhub.training.run_data import RunData

MOST_FITTED = 20_000  # rows: more would add cost, but little to a baseline
HEADS = ("classification", "regression")  # tasks with one class or one number for each text
_MOST_WORK = 1 << 23  # characters of a run, times its classes: some seconds
_STEPS = 300
_KEPT = 8  # predictions of fitted bags of words
_FITTED: dict[tuple[str, str, str], dict[str, list[Any]] | None] = {}
_WORD = r"\w+|[^\w\s]"


def reads_words(kind: str, examples: Iterable[Any]) -> bool:
    """Return whether a bag of words can predict labels of this kind for these texts."""
    return kind in ("classes", "numbers") and all(
        isinstance(example, Example) and example.label is not None for example in examples
    )


def predict_by_words(
    kind: str, train: Sequence[Example], test: Sequence[Example]
) -> dict[str, list[Any]] | None:
    """Fit a bag of words to training rows; return its predictions for others, by column.

    The runs of a sweep and of a study have the same rows, so the latest predictions are kept.
    Return None if fitting is impossible: no words, or a single class.
    """
    key = (kind, data_hash(train), data_hash(test))
    if key not in _FITTED:
        _FITTED[key] = _fitted(kind, train, test)
        for oldest in list(_FITTED)[:-_KEPT]:
            del _FITTED[oldest]
    return _FITTED[key]


def _fitted(
    kind: str, train: Sequence[Example], test: Sequence[Example]
) -> dict[str, list[Any]] | None:
    from scipy.sparse import hstack
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge

    labels = [example.label for example in train]
    if not test or len(set(labels)) < 2:
        return None
    features = []
    for part in ("text", "pair"):
        words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=_WORD)
        texts, others = ([getattr(e, part) or "" for e in each] for each in (train, test))
        with contextlib.suppress(ValueError):  # the texts have no words
            features.append((words.fit_transform(texts), words.transform(others)))
    if not features:
        return None
    fitted, predicted = (hstack(each, format="csr") for each in zip(*features, strict=True))
    if kind == "numbers":
        numbers = Ridge().fit(fitted, [float(label or 0.0) for label in labels]).predict(predicted)
        return {"prediction": [float(each) for each in numbers]}
    model = LogisticRegression(C=10, max_iter=_STEPS)
    with warnings.catch_warnings():  # more steps change little
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(fitted, [str(label) for label in labels])
    likely = model.predict_proba(predicted)
    return {
        "prediction": [str(each) for each in model.classes_[likely.argmax(1)]],
        "score": [float(each) for each in likely.max(1)],
    }


def compare_with_words(
    data: RunData, rows: Sequence[Any], predictions: PredictionFile | None
) -> WordsComparison | None:
    """Compare a run's predictions for some rows with a bag of words fitted to its data.

    The score is the main metric of the task, or the first one that is a function of sums over rows.

    Returns:
        The comparison, or why it was skipped; None for other tasks than classification and
        regression of texts, and without the predictions of these rows.
    """
    if predictions is None or data.parts or data.streams or predictions.data != data_hash(rows):
        return None
    if data.task.head not in HEADS or not reads_words(predictions.kind, (*data.train, *rows)):
        return None
    classes = len({each.label for each in data.train}) if predictions.kind == "classes" else 1
    size = sum(len(each.text) + len(each.pair or "") for each in (*data.train, *rows))
    if len(data.train) > MOST_FITTED or size * classes > _MOST_WORK:
        about = f"{len(data.train):,} training rows, {size:,} characters, {classes:,} classes"
        return WordsComparison(skipped=f"{about} are too many")
    columns = predict_by_words(predictions.kind, data.train, rows)
    if columns is None:
        return WordsComparison(skipped="the training rows have one class, or no word")
    score = (
        predictions.metric
        if predictions.metric in row_scores(predictions.kind)
        else row_score(predictions.kind).name
    )
    outcomes = [
        row | {name: values[n] for name, values in columns.items()}
        for n, row in enumerate(predictions.rows)
    ]
    return WordsComparison.between(replace(predictions, rows=outcomes), predictions, score)
