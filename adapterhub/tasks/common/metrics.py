"""Metrics, by the kind of prediction."""

from __future__ import annotations

import collections
import math
import re
import string
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub.errors import ConfigError, DataError

RANKED = 10  # ranked passages
TIE_DIGITS = 6  # decimals of scores; later ones differ by rounding
RANKING_METRICS = ("recall@1", "recall@10", "mrr@10", "ndcg@10")
_APOSTROPHES = "'\u2019"


def classification_metrics(
    labels: Sequence[str] | Sequence[int], predictions: Sequence[str] | Sequence[int]
) -> dict[str, float]:
    """Compute accuracy, macro F1 (unweighted mean over classes) and Matthews correlation.

    The classes are those in `labels` or `predictions`. Matthews correlation is 0 if all labels or
    all predictions are the same class.

    Raises:
        DataError: the two differ in length or are empty.
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
    """Compute Pearson and Spearman correlation and the mean squared error.

    A correlation is 0 if the labels or the predictions are constant.

    Raises:
        DataError: the two differ in length, are empty, or contain NaN or infinity.
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


def multi_label_metrics(
    labels: Sequence[str],
    expected: Sequence[Sequence[str]],
    predictions: Sequence[Sequence[str]],
) -> dict[str, float]:
    """Compute micro F1, macro F1 over all labels, and the share of texts that match exactly.

    The F1 of a label that is neither present nor predicted in any text is 0.

    `labels` lists all labels; the other arguments hold the labels of each text.

    Raises:
        DataError: the two differ in length or are empty.
    """
    from sklearn.metrics import f1_score

    _check_lengths(expected, predictions)
    both = [
        [[int(label in row) for label in labels] for row in rows]
        for rows in (expected, predictions)
    ]
    pairs = zip(expected, predictions, strict=True)
    return {
        "micro_f1": float(f1_score(*both, average="micro", zero_division=0.0)),
        "macro_f1": float(f1_score(*both, average="macro", zero_division=0.0)),
        "exact_match": _mean([float(set(e) == set(p)) for e, p in pairs]),
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
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    _check_lengths(tags, predictions)
    for sentence, predicted in zip(tags, predictions, strict=True):
        _check_lengths(sentence, predicted)
    both = [list(row) for row in tags], [list(row) for row in predictions]
    return {
        "f1": float(f1_score(*both, zero_division=0)),
        "precision": float(precision_score(*both, zero_division=0)),
        "recall": float(recall_score(*both, zero_division=0)),
        "accuracy": float(accuracy_score(*both)),
    }


def tag_metrics(
    tags: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Compute the accuracy of the tags of words, and the mean F1 of each tag.

    Both arguments hold one list of tags per sentence. An empty tag marks a word that was not read;
    it is wrong, and is not averaged as a tag.

    Raises:
        DataError: the two differ in the number of sentences or tags, or are empty.
    """
    from sklearn.metrics import accuracy_score, f1_score

    _check_lengths(tags, predictions)
    for sentence, predicted in zip(tags, predictions, strict=True):
        _check_lengths(sentence, predicted)
    both = [[tag for row in rows for tag in row] for rows in (tags, predictions)]
    names = sorted({*both[0], *both[1]} - {""})
    f1 = f1_score(*both, labels=names, average="macro", zero_division=0.0)
    return {"accuracy": float(accuracy_score(*both)), "macro_f1": float(f1)}


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
    shared = sum((collections.Counter(expected) & collections.Counter(predicted)).values())
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


def transcription_metrics(
    references: Sequence[str], predictions: Sequence[str], *, exact: bool = False
) -> dict[str, float]:
    """Compute word and character error rates of a corpus.

    wer = (substituted + deleted + inserted words) / words of the references; cer: of characters

    `exact` compares case and punctuation as well.

    Raises:
        DataError: the two differ in length or are empty.
        ConfigError: the library that counts errors is not installed.
    """
    _check_lengths(references, predictions)
    pairs = [*zip(references, predictions, strict=True)]
    return {
        "wer": _error_rate(
            word_errors(reference, written, exact=exact) for reference, written in pairs
        ),
        "cer": _error_rate(
            _character_errors(reference, written, exact) for reference, written in pairs
        ),
    }


def word_errors(reference: str, written: str, *, exact: bool = False) -> tuple[int, int]:
    """Count the wrong words (substituted, deleted, inserted) and the words of the reference.

    Raises:
        ConfigError: the library that counts errors is not installed.
    """
    return _errors(_jiwer().process_words(*_compared(reference, written, exact)))


def _character_errors(reference: str, written: str, exact: bool) -> tuple[int, int]:
    return _errors(_jiwer().process_characters(*_compared(reference, written, exact)))


def _jiwer() -> Any:
    try:
        import jiwer
    except ImportError:
        raise ConfigError(
            "error rates need the library jiwer, which is not installed",
            hint='pip install "adapterhub[audio]"',
        ) from None
    return jiwer


def _compared(reference: str, written: str, exact: bool) -> tuple[str, str]:
    return (reference, written) if exact else (spoken(reference), spoken(written))


def spoken(text: str) -> str:
    """Return the words of a text in lower case, without punctuation except inner apostrophes."""
    letters = [c if unicodedata.category(c)[0] in "LMN" or c in _APOSTROPHES else " " for c in text]
    return " ".join(filter(None, (w.strip(_APOSTROPHES) for w in "".join(letters).lower().split())))


def _errors(counts: Any) -> tuple[int, int]:
    wrong = counts.substitutions + counts.deletions + counts.insertions
    return int(wrong), int(counts.hits + counts.substitutions + counts.deletions)


def _error_rate(counts: Iterable[tuple[int, int]]) -> float:
    wrong, total = map(sum, zip(*counts, strict=True))
    return wrong / max(total, 1)


_GENERATION = {"bleu": _bleu, "rouge": _rouge, "exact": _exact}
GENERATION_METRICS = {
    "bleu": ("bleu", "chrf"),
    "rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum"),
    "exact": ("exact_match",),
}
"""The names of the metrics of each kind of `generation_metrics`."""


@dataclass(frozen=True)
class Tied:
    """Passages with equal scores: their number, and the gains of the relevant ones."""

    size: int
    gains: tuple[float, ...] = ()


def ranked_gains(scores: Sequence[float], gains: Sequence[float]) -> list[Tied]:
    """Return the passages of a query by descending score, with ties grouped.

    Scores that differ only by rounding, by less than a millionth, are ties.
    """
    by_score: dict[float, list[float]] = {}
    for score, gain in zip(scores, gains, strict=True):
        by_score.setdefault(round(score, TIE_DIGITS), []).append(gain)
    return [
        Tied(len(by_score[score]), tuple(gain for gain in by_score[score] if gain > 0))
        for score in sorted(by_score, reverse=True)
    ]


def ranking_metrics(
    ranked: Sequence[Sequence[float | Tied]], relevant: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Compute recall@1, recall@10, MRR@10 and nDCG@10, averaged over queries.

    Recall is the share of a query's relevant passages that are found. nDCG is Järvelin & Kekäläinen
    2002, https://doi.org/10.1145/582415.582418, with the relevance as the gain. Tied passages count
    as the mean over all their orders (McSherry & Najork 2008,
    https://doi.org/10.1007/978-3-540-78646-7_38): a model that scores all passages alike scores at
    chance, whatever the order of the file.

    For each query, `ranked` has the relevance of the passages found, in rank order, and `relevant`
    the relevance of all its relevant passages.

    Raises:
        DataError: there are no queries, or one has no relevant passage.
    """
    if not ranked or not all(any(gain > 0 for gain in gains) for gains in relevant):
        raise DataError("no query, or one without a relevant passage", expected="one for each")
    rows = [query_metrics(*each) for each in zip(ranked, relevant, strict=True)]
    means = (math.fsum(column) / len(rows) for column in zip(*rows, strict=True))
    return dict(zip(RANKING_METRICS, means, strict=True))


def query_metrics(
    ranked: Sequence[float | Tied], gains: Sequence[float]
) -> tuple[float, float, float, float]:
    """Compute `RANKING_METRICS` of one query with a relevant passage."""
    blocks = [each if isinstance(each, Tied) else _alone(each) for each in ranked]
    hits = _by_rank(blocks, len)
    many = sum(gain > 0 for gain in gains)
    ideal = _discounted(sorted(gains, reverse=True))
    ndcg = _discounted(_by_rank(blocks, math.fsum)) / ideal
    return math.fsum(hits[:1]) / many, math.fsum(hits) / many, _first(blocks), ndcg


def _alone(gain: float) -> Tied:
    return Tied(1, (gain,) if gain > 0 else ())


def _by_rank(blocks: Sequence[Tied], total: Callable[[tuple[float, ...]], float]) -> list[float]:
    """Return the expected gain at each of the first ranks: the mean of the tied block there."""
    expected: list[float] = []
    for block in blocks:
        room = min(block.size, RANKED - len(expected))
        expected += [total(block.gains) / block.size] * room
    return expected


def _first(blocks: Sequence[Tied]) -> float:
    """Return the expected reciprocal rank of the first relevant passage, or 0 beyond the cutoff."""
    before = 0
    for block in blocks:
        many = len(block.gains)
        if many:
            orders = math.comb(block.size, many)
            last = min(block.size - many + 1, RANKED - before)
            return math.fsum(
                math.comb(block.size - place, many - 1) / orders / (before + place)
                for place in range(1, last + 1)
            )
        before += block.size
    return 0.0


def _discounted(gains: Sequence[float]) -> float:
    return math.fsum(
        gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:RANKED], start=1)
    )


def tied_share(scores: Sequence[float], right: int) -> float:
    """Return the chance that the right choice has the highest score; ties share it."""
    equal = [round(score, TIE_DIGITS) for score in scores]
    best = max(equal)
    return 1 / equal.count(best) if equal[right] == best else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _correlation(
    measure: Callable[..., tuple[float, float]], first: Sequence[float], second: Sequence[float]
) -> float:
    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant values: handled below
        value = float(measure(first, second)[0])
    return value if math.isfinite(value) else 0.0


def _check_lengths(labels: Sequence[object], predictions: Sequence[object]) -> None:
    if len(labels) != len(predictions) or not len(labels):
        raise DataError(
            f"{len(labels)} labels and {len(predictions)} predictions cannot be compared",
            expected="as many predictions as labels, and at least one",
        )


def _check_finite(noun: str, values: Sequence[float]) -> None:
    bad = [f"{noun}[{i}] is {float(v)}" for i, v in enumerate(values) if not math.isfinite(v)]
    if bad:
        raise DataError(f"{len(bad)} of {len(values)} {noun} are not numbers", offenders=bad[:5])
