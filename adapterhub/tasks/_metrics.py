"""How good predictions are, by the kind of what is predicted."""

from __future__ import annotations

import collections
import math
import re
import string
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


def entity_metrics(
    tags: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Micro-averaged F1, precision and recall of whole entities, and the accuracy of tags.

    An entity counts if its kind and both its ends are right, as in conlleval and seqeval's default
    mode. Both are one list of BIO tags a sentence.

    Raises DataError where the two differ in their number of sentences or tags, or are empty.
    """
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    _check_lengths(tags, predictions)
    for labels, found in zip(tags, predictions, strict=True):
        _check_lengths(labels, found)
    known, found_tags = [list(row) for row in tags], [list(row) for row in predictions]
    return {
        "f1": float(f1_score(known, found_tags, zero_division=0)),
        "precision": float(precision_score(known, found_tags, zero_division=0)),
        "recall": float(recall_score(known, found_tags, zero_division=0)),
        "accuracy": float(accuracy_score(known, found_tags)),
    }


def answer_metrics(
    answers: Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
    """F1 over words and exact match, each against the answer that fits best, averaged over the
    questions; where some questions have no answer (an empty list), both on those that have one,
    and the share of the others that got none.

    Case, punctuation, articles and further blanks do not count: the rules of SQuAD's evaluation
    script, Rajpurkar et al. 2016, section 6.1, https://arxiv.org/abs/1606.05250.
    """
    _check_lengths(answers, predictions)
    pairs = [(known or [""], found) for known, found in zip(answers, predictions, strict=True)]
    f1 = [max(_word_f1(text, found) for text in known) for known, found in pairs]
    exact = [
        float(any(normal_answer(text) == normal_answer(found) for text in known))
        for known, found in pairs
    ]
    metrics = {"f1": _mean(f1), "exact_match": _mean(exact)}
    parts = {"has_answer": [bool(known) for known in answers]}
    parts["no_answer"] = [not has for has in parts["has_answer"]]
    if not all(map(any, parts.values())):
        return metrics
    for part, members in parts.items():
        metrics[f"{part}_f1"] = _mean([v for v, here in zip(f1, members, strict=True) if here])
    return metrics


def normal_answer(text: str) -> str:
    """An answer in lower case, without punctuation and articles, single blanks between words."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(answer: str, prediction: str) -> float:
    known, found = normal_answer(answer).split(), normal_answer(prediction).split()
    shared = sum((collections.Counter(known) & collections.Counter(found)).values())
    if not known or not found or not shared:
        return float(known == found)
    return 2 * shared / (len(known) + len(found))


def generation_metrics(
    kind: str, references: Sequence[str], predictions: Sequence[str]
) -> dict[str, float]:
    """How near generated texts are to their references. `kind` is one of

    bleu   bleu and chrf of the corpus, 0 to 100, by sacreBLEU's defaults (Post 2018,
           https://arxiv.org/abs/1804.08771)
    rouge  rouge1, rouge2, rougeL, rougeLsum: mean F1, 0 to 1, with stemming (Lin 2004,
           https://aclanthology.org/W04-1013)
    exact  exact_match: the share of texts that are the same, but for blanks at the ends
    """
    _check_lengths(references, predictions)
    return _GENERATION[kind](references, predictions)


def _bleu(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    import sacrebleu

    known, found = [list(references)], list(predictions)
    return {
        "bleu": float(sacrebleu.corpus_bleu(found, known).score),
        "chrf": float(sacrebleu.corpus_chrf(found, known).score),
    }


def _rouge(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(k, p) for k, p in zip(references, predictions, strict=True)]
    return {name: _mean([float(score[name].fmeasure) for score in scores]) for name in names}


def _exact(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    same = [k.strip() == p.strip() for k, p in zip(references, predictions, strict=True)]
    return {"exact_match": _mean([float(each) for each in same])}


_GENERATION = {"bleu": _bleu, "rouge": _rouge, "exact": _exact}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
