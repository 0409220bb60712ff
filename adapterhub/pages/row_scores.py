"""Scores that are functions of sums over rows: one row of numbers per example, summed, summarized.

Every score has the form f(sum of columns), such as right / all. So a score without one row, or of a
resample of the rows, needs only other sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterhub.errors import unknown
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.tasks._metrics import RANKING_METRICS, query_metrics, ranked_gains

Numbers = NDArray[np.float64]
Outcome = Mapping[str, Any]
LARGEST = 1e60  # of a number: the fourth power of it, times the rows, is finite


@dataclass(frozen=True)
class RowScore:
    """A score that is computed from summed columns.

    Attributes:
        name: the metric's name.
        columns: the numbers of all examples, (rows, columns).
        summarize: the score of sums, (..., columns) to (...).
        low: the smallest possible score.
        high: the largest possible score.
        pseudo_rows: rows that a few real ones may lack, right and wrong, for the interval; each
            counts by half. None: the rows that are there say enough.
    """

    name: str
    columns: Callable[[Sequence[Outcome]], Numbers]
    summarize: Callable[[Numbers], Numbers]
    low: float = 0.0
    high: float = 1.0
    pseudo_rows: Callable[[Numbers], Numbers] | None = None

    @property
    def is_by_class(self) -> bool:
        """Whether the columns are those of each class, which `with_classes` completes."""
        return self.pseudo_rows is _class_pseudo_rows

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller score is better, as for losses."""
        return self.name in LOWER_IS_BETTER

    @property
    def points(self) -> float:
        """The points in a score of 1: 100 for shares and correlations, else 1."""
        return 100.0 if self.high == 1.0 else 1.0


def row_scores(kind: str) -> dict[str, RowScore]:
    """Return the scores of a kind of predictions, by name, the main one first."""
    return {score.name: score for score in _SCORES[kind]}


def row_score(kind: str, metric: str = "") -> RowScore:
    """Return a score of a kind of predictions, by its name, or the first one of the kind.

    Raises:
        ConfigError: the score is not computed from rows of this kind.
    """
    scores = row_scores(kind)
    if metric and metric not in scores:
        raise unknown("score", metric, scores)
    return scores[metric] if metric else _SCORES[kind][0]


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    """Divide; 0 where the divisor is 0."""
    quotient: Numbers = np.zeros_like(above, dtype=float)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


def _mean(sums: Numbers) -> Numbers:
    return _ratio(sums[..., 0], sums[..., 1])


def _f1(sums: Numbers) -> Numbers:
    return _ratio(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _recall(sums: Numbers) -> Numbers:
    return _ratio(sums[..., 0], sums[..., 2])


def _perplexity(sums: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        perplexity: Numbers = np.exp(_mean(sums))
    return perplexity


def _pearson(sums: Numbers) -> Numbers:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    variances = np.maximum(n * xx - x * x, 0.0) * np.maximum(n * yy - y * y, 0.0)
    return _ratio(n * xy - x * y, np.sqrt(variances))


def _matthews(sums: Numbers) -> Numbers:
    """Compute the correlation of two partitions (R_K of Gorodkin 2004)."""
    right, count, true, given = _class_sums(sums)
    covariance = right.sum(-1) * count - (true * given).sum(-1)
    variances = (count**2 - (true**2).sum(-1)) * (count**2 - (given**2).sum(-1))
    return _ratio(covariance, np.sqrt(np.maximum(variances, 0.0)))


def _macro_f1(sums: Numbers) -> Numbers:
    """Average F1 over the classes that are true or predicted for a row."""
    right, _, true, given = _class_sums(sums)
    each = _ratio(2 * right, true + given)
    return _ratio(each.sum(-1), (true + given > 0).sum(-1))


def _class_sums(sums: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return, by class, the right rows, all rows (in total), the true rows and the predicted."""
    right, true, given = np.split(sums, 3, axis=-1)
    return right, true.sum(-1), true, given


def _bleu(sums: Numbers) -> Numbers:
    """Compute corpus BLEU with sacreBLEU's defaults (Post 2018)."""
    from sacrebleu import BLEU

    def score(sums: Numbers) -> float:
        *counts, given, true = (int(number) for number in sums)
        found = BLEU.compute_bleu(counts[:4], counts[4:], given, true, smooth_method="exp")
        return float(found.score)

    return np.apply_along_axis(score, -1, sums)


def _each(row: Callable[[Outcome], list[Any]]) -> Callable[[Sequence[Outcome]], Numbers]:
    """Make columns of a function of one row."""
    return lambda rows: np.array([row(outcome) for outcome in rows], dtype=float)


def _right(row: Outcome) -> list[Any]:
    return [row["right"] if "right" in row else row["label"] == row["prediction"], 1.0]


def _span_columns(row: Outcome) -> list[Any]:
    true, given = ({tuple(span) for span in row[name]} for name in ("label", "prediction"))
    return [len(true & given), len(given), len(true)]


def _set_columns(row: Outcome) -> list[Any]:
    true, given = set(row["label"]), set(row["prediction"])
    return [len(true & given), len(given), len(true)]


def _same_set(row: Outcome) -> list[Any]:
    return [set(row["label"]) == set(row["prediction"]), 1.0]


def _class_columns(rows: Sequence[Outcome]) -> Numbers:
    """Mark, by class, whether a row is right, true and predicted."""
    classes = sorted({row[name] for row in rows for name in ("label", "prediction")})
    true, given = (
        np.array([[row[name] == c for c in classes] for row in rows], dtype=float)
        for name in ("label", "prediction")
    )
    return np.concatenate([true * given, true, given], axis=1)


def _class_pseudo_rows(sums: Numbers) -> Numbers:
    """Return a right and a wrong row of each class; wrong ones are given the others' shares."""
    _, true, given = np.split(sums, 3)
    count, same = len(true), np.eye(len(true))
    shares = (1 - same) * (true + given + 1)
    wrong = shares / np.maximum(shares.sum(1, keepdims=True), 1)
    right = np.concatenate([same, same, same], axis=1)
    found: Numbers = np.concatenate(
        [right, np.concatenate([np.zeros((count, count)), same, wrong], axis=1)]
    )
    return found


def _set_pseudo_rows(sums: Numbers) -> Numbers:
    """Return a right row, one with something wrong in addition, and one that misses something."""
    rows: Numbers = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    return rows


def with_classes(columns: Numbers, count: int) -> Numbers:
    """Return the columns of a score by class with those of classes that no row has."""
    parts = np.split(columns, 3, axis=1)
    more = max(count - parts[0].shape[1], 0)
    return np.concatenate([np.pad(part, ((0, 0), (0, more))) for part in parts], axis=1)


def _numbers(rows: Sequence[Outcome], *names: str) -> Numbers:
    """Return these fields, (rows, fields), at most `LARGEST`, which also stands for NaN."""
    fields = np.array([[row[name] for name in names] for row in rows], dtype=float)
    limited: Numbers = np.nan_to_num(fields, nan=LARGEST).clip(-LARGEST, LARGEST)
    return limited


def grouped_columns(score: RowScore, rows: Sequence[Outcome]) -> Numbers:
    """Return the columns of a score, summed over the rows of each group that the rows name.

    Groups, such as queries or contexts, are what was drawn at random, so that errors and
    comparisons are of them: a score is a function of the same sums.
    """
    columns = score.columns(rows)
    if not rows or "group" not in rows[0]:
        return columns
    numbers = np.unique([row["group"] for row in rows], return_inverse=True)[1]
    summed = np.zeros((numbers.max() + 1, columns.shape[1]))
    np.add.at(summed, numbers, columns)
    return summed


def _ranking_columns(place: int, rows: Sequence[Outcome]) -> Numbers:
    """Return a ranking metric of each query with a relevant passage, at its first row, and 1."""
    queries: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        queries.setdefault(row["query"], []).append(number)
    columns = np.zeros((len(rows), 2))
    for numbers in queries.values():
        own = [rows[i] for i in numbers]
        if "ranking" in own[0]:
            columns[numbers[0]] = own[0]["ranking"][RANKING_METRICS[place]], 1.0
        elif max(gains := [float(row["label"]) for row in own]) > 0:
            ranked = ranked_gains([row["output"] for row in own], gains)
            columns[numbers[0]] = query_metrics(ranked, gains)[place], 1.0
    return columns


def _square_columns(rows: Sequence[Outcome]) -> Numbers:
    label, prediction = _numbers(rows, "label", "prediction").T
    return np.stack([(label - prediction) ** 2, np.ones(len(rows))], axis=1)


def _loss_columns(rows: Sequence[Outcome]) -> Numbers:
    loss, tokens = _numbers(rows, "loss", "tokens").T
    return np.stack([loss * tokens, tokens], axis=1)


def _number_columns(rows: Sequence[Outcome]) -> Numbers:
    """Return the moments of both numbers, around their means: large numbers lose no digits."""
    pairs = _numbers(rows, "label", "prediction")
    x, y = (pairs - pairs.mean(0)).T
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)


def _bleu_columns(rows: Sequence[Outcome]) -> Numbers:
    from sacrebleu import BLEU

    bleu = BLEU(effective_order=True)
    found = [bleu.sentence_score(row["prediction"], [row["label"]]) for row in rows]
    return np.array([[*f.counts, *f.totals, f.sys_len, f.ref_len] for f in found], dtype=float)


def _rouge_columns(name: str, rows: Sequence[Outcome]) -> Numbers:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([name], use_stemmer=True)
    scores = [scorer.score(row["label"], row["prediction"])[name].fmeasure for row in rows]
    return np.stack([np.array(scores, dtype=float), np.ones(len(scores))], axis=1)


def _word_error_columns(rows: Sequence[Outcome]) -> Numbers:
    """Return the wrong words of each row, and the words of its text."""
    return np.array([[row["wrong_words"], row["words"]] for row in rows], dtype=float)


_ACCURACY = RowScore("accuracy", _each(_right), _mean)
_TEXT_SCORE = _each(lambda row: [row["score"], 1.0])
_RANKING = tuple(
    RowScore(name, partial(_ranking_columns, place), _mean)
    for place, name in enumerate(RANKING_METRICS)
)
_SCORES: dict[str, tuple[RowScore, ...]] = {
    "classes": (
        _ACCURACY,
        RowScore("matthews", _class_columns, _matthews, low=-1.0, pseudo_rows=_class_pseudo_rows),
        RowScore("macro_f1", _class_columns, _macro_f1, pseudo_rows=_class_pseudo_rows),
    ),
    "choices": (_ACCURACY, *_RANKING),
    "sets": (
        RowScore("micro_f1", _each(_set_columns), _f1, pseudo_rows=_set_pseudo_rows),
        RowScore("exact_match", _each(_same_set), _mean),
    ),
    "numbers": (
        RowScore("pearson", _number_columns, _pearson, low=-1.0),
        RowScore("mse", _square_columns, _mean, high=np.inf),
        *_RANKING,
    ),
    "spans": (
        RowScore("f1", _each(_span_columns), _f1, pseudo_rows=_set_pseudo_rows),
        RowScore("precision", _each(_span_columns), _mean, pseudo_rows=_set_pseudo_rows),
        RowScore("recall", _each(_span_columns), _recall, pseudo_rows=_set_pseudo_rows),
    ),
    "texts": (
        RowScore("mean score", _TEXT_SCORE, _mean),
        RowScore("f1", _TEXT_SCORE, _mean),
        RowScore("exact_match", _TEXT_SCORE, _mean),
        RowScore("bleu", _bleu_columns, _bleu, high=100.0),
        RowScore("wer", _word_error_columns, _mean, high=np.inf),
        *(
            RowScore(name, partial(_rouge_columns, name), _mean)
            for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")
        ),
    ),
    "losses": (
        RowScore("loss", _loss_columns, _mean, high=np.inf),
        RowScore("perplexity", _loss_columns, _perplexity, low=1.0, high=np.inf),
    ),
    "pictures": (RowScore("loss", _each(lambda row: [row["loss"], 1]), _mean, high=np.inf),),
}
