"""Metrics, by the kind of prediction."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adapterhub.errors import DataError

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Numbers = NDArray[float64]


def classification_metrics(
    labels: Sequence[str] | Sequence[int], predictions: Sequence[str] | Sequence[int]
) -> dict[str, float]:
    """Compute accuracy, macro F1 (unweighted mean over classes) and Matthews correlation.

    The classes are those in `labels` or `predictions`. Matthews correlation is 0 if all labels or
    all predictions are the same class.

    Raises:
        DataError: the two differ in length or are empty.
    """
    _check_lengths(labels, predictions)
    right = Counter(a for a, b in zip(labels, predictions, strict=True) if a == b)
    return {
        "accuracy": right.total() / len(labels),
        "macro_f1": _mean(_f1_scores(right, Counter(labels), Counter(predictions))),
        "matthews": _matthews(right.total(), Counter(labels), Counter(predictions)),
    }


def _f1_scores(right: Counter[Any], true: Counter[Any], predicted: Counter[Any]) -> list[float]:
    """Return the F1 of each class that is true or predicted somewhere, from its counts."""
    return [_f1(right[name], true[name], predicted[name]) for name in true | predicted]


def _f1(right: int, true: int, predicted: int) -> float:
    return 2 * right / (true + predicted) if right else 0.0


def _matthews(right: int, true: Counter[Any], predicted: Counter[Any]) -> float:
    """Compute the correlation of Gorodkin 2004, R_K: exact integers, so that none overflows."""
    count = true.total()
    product = sum(true[name] * predicted[name] for name in true)
    varied = [count**2 - sum(n**2 for n in counts.values()) for counts in (true, predicted)]
    covariance = right * count - product
    return covariance / math.sqrt(math.prod(varied)) if all(varied) else 0.0


def regression_metrics(labels: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Compute Pearson and Spearman correlation and the mean squared error.

    A correlation is 0 if the labels or the predictions are constant.

    Raises:
        DataError: the two differ in length, are empty, or contain NaN or infinity.
    """
    import numpy as np

    _check_lengths(labels, predictions)
    _check_finite("labels", labels)
    _check_finite("predictions", predictions)
    true, predicted = np.array(labels, float), np.array(predictions, float)
    with np.errstate(over="ignore"):
        error = float(np.mean((true - predicted) ** 2))
    return {
        "pearson": _correlation(true, predicted),
        "spearman": _correlation(_ranks(true), _ranks(predicted)),
        "mse": error,
    }


def _correlation(first: Numbers, second: Numbers) -> float:
    one, other = _unit(first), _unit(second)
    return min(max(float(one @ other), -1.0), 1.0)


def _unit(values: Numbers) -> Numbers:
    """Return the distances from the mean, scaled to length 1; zeros if all values are equal."""
    import numpy as np

    # Scaled before they are added or squared, so that huge and tiny numbers are numbers.
    distances = values / (np.abs(values).max() or 1.0)
    if values.min() == values.max():
        return np.zeros_like(values)
    distances = distances - distances.mean()
    distances /= np.abs(distances).max() or 1.0
    scaled: Numbers = distances / (float(np.linalg.norm(distances)) or 1.0)
    return scaled


def _ranks(values: Numbers) -> Numbers:
    """Return the rank of each value; equal ones share the mean of theirs."""
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def multi_label_metrics(
    labels: Sequence[str],
    expected: Sequence[Sequence[str]],
    predictions: Sequence[Sequence[str]],
) -> dict[str, float]:
    """Compute micro F1, macro F1 over all labels, and the share of texts that match exactly.

    The F1 of a label that no text has and none gets is 0.

    Args:
        labels: all labels.
        expected: the labels of each text.
        predictions: the predicted labels of each text.

    Raises:
        DataError: the two differ in length or are empty.
    """
    _check_lengths(expected, predictions)
    pairs = [(set(e), set(p)) for e, p in zip(expected, predictions, strict=True)]
    right, true, predicted = (
        Counter(label for pair in pairs for label in kind(*pair))
        for kind in (set.intersection, lambda e, p: e, lambda e, p: p)
    )
    scores = [_f1(right[label], true[label], predicted[label]) for label in labels]
    return {
        "micro_f1": _f1(*(sum(c[label] for label in labels) for c in (right, true, predicted))),
        "macro_f1": _mean(scores),
        "exact_match": _mean([float(e == p) for e, p in pairs]),
    }


def entity_metrics(
    tags: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Compute micro-averaged F1, precision and recall of entities, and the accuracy of tags.

    An entity is correct if its kind and both boundaries are, as in conlleval and seqeval's default
    mode. Both arguments hold one list of BIO tags per sentence.

    Raises:
        DataError: the two differ in the number of sentences or tags, or are empty.
    """
    _check_lengths(tags, predictions)
    for sentence, predicted in zip(tags, predictions, strict=True):
        _check_lengths(sentence, predicted)
    true, found = ([set(entity_spans(row)) for row in rows] for rows in (tags, predictions))
    right = sum(len(a & b) for a, b in zip(true, found, strict=True))
    truly, given = sum(map(len, true)), sum(map(len, found))
    pairs = [p for rows in zip(tags, predictions, strict=True) for p in zip(*rows, strict=True)]
    return {
        "f1": _f1(right, truly, given),
        "precision": right / given if given else 0.0,
        "recall": right / truly if truly else 0.0,
        "accuracy": _mean([float(a == b) for a, b in pairs]),
    }


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """List the entities that BIO tags form: kind, first tag, end.

    An I-x that follows no entity of kind x begins one, as in seqeval's default mode.
    """
    spans: list[tuple[str, int, int]] = []
    for place, (before, tag) in enumerate(zip(("O", *tags), tags, strict=False)):
        if tag.startswith("I-") and before[2:] == tag[2:]:
            kind, first, _ = spans.pop()
            spans.append((kind, first, place + 1))
        elif tag != "O":
            spans.append((tag[2:], place, place + 1))
    return spans


def answer_metrics(
    answers: Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
    """Compute word F1 and exact match against the best matching answer, averaged over questions.

    A question with an empty list has no answer; its right prediction is "". If there are questions
    of both kinds, `has_answer_f1` and `no_answer_f1` are the averages over each.

    Case, punctuation, articles and repeated spaces are ignored, as in SQuAD's evaluation script:
    Rajpurkar et al. 2016, section 6.1, https://arxiv.org/abs/1606.05250.

    Raises:
        DataError: the two differ in length or are empty.
    """
    _check_lengths(answers, predictions)
    pairs = [
        (texts or [""], predicted) for texts, predicted in zip(answers, predictions, strict=True)
    ]
    f1 = [max(_word_f1(text, predicted) for text in texts) for texts, predicted in pairs]
    exact = [
        float(normal_answer(predicted) in map(normal_answer, texts)) for texts, predicted in pairs
    ]
    metrics = {"f1": _mean(f1), "exact_match": _mean(exact)}
    answered = [score for score, texts in zip(f1, answers, strict=True) if texts]
    unanswered = [score for score, texts in zip(f1, answers, strict=True) if not texts]
    if answered and unanswered:
        metrics |= {"has_answer_f1": _mean(answered), "no_answer_f1": _mean(unanswered)}
    return metrics


def normal_answer(text: str) -> str:
    """Normalize an answer: lower case, no punctuation or articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(answer: str, prediction: str) -> float:
    expected, predicted = normal_answer(answer).split(), normal_answer(prediction).split()
    shared = sum((Counter(expected) & Counter(predicted)).values())
    if not expected or not predicted or not shared:
        return float(expected == predicted)
    return 2 * shared / (len(expected) + len(predicted))


def generation_metrics(
    kind: str, references: Sequence[str], predictions: Sequence[str]
) -> dict[str, float]:
    """Compare generated texts with their references.

    The kinds are

        bleu   bleu and chrf of the corpus, 0 to 100, with sacreBLEU's defaults (Post 2018,
               https://arxiv.org/abs/1804.08771)
        rouge  rouge1, rouge2, rougeL, rougeLsum: mean F1, 0 to 1, with stemming (Lin 2004,
               https://aclanthology.org/W04-1013)
        exact  exact_match: the share of equal texts, ignoring spaces at the ends

    Args:
        kind: bleu, rouge or exact.
        references: the expected texts.
        predictions: the generated texts.

    Raises:
        DataError: the two differ in length or are empty.
    """
    _check_lengths(references, predictions)
    return _GENERATION[kind](references, predictions)


def _bleu(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    import sacrebleu

    corpus = list(predictions), [list(references)]
    return {
        "bleu": float(sacrebleu.corpus_bleu(*corpus).score),
        "chrf": float(sacrebleu.corpus_chrf(*corpus).score),
    }


def _rouge(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    names = GENERATION_METRICS["rouge"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
    return {name: _mean([float(score[name].fmeasure) for score in scores]) for name in names}


def _exact(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    pairs = zip(references, predictions, strict=True)
    return {"exact_match": _mean([float(r.strip() == p.strip()) for r, p in pairs])}


_GENERATION = {"bleu": _bleu, "rouge": _rouge, "exact": _exact}
GENERATION_METRICS = {
    "bleu": ("bleu", "chrf"),
    "rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum"),
    "exact": ("exact_match",),
}
"""The names of the metrics of each kind of `generation_metrics`."""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
