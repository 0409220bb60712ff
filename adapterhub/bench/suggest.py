"""Suggest the trained adapter to start from for some data, by probing each adapter's features.

The features of a text are the mean state of the last layer. A linear probe on the features with an
adapter is compared with one on the features of the bare backbone, on the same rows and folds,
corrected for the number of adapters. This takes one forward pass over a sample for each adapter,
and no training.

    ridge regression on standardized features, its penalty by leave-one-out within the training
    folds; for classes, on one target of -1 and 1 each (scikit-learn's RidgeClassifierCV)

The probe is closed-form, so it needs neither a learning rate nor a seed (Alain & Bengio 2017,
https://arxiv.org/abs/1610.01644, for probes). Rows of one group, such as a text, are in one fold.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from adapterhub.adapters.activation import text_positions
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import detach
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.route import activate, adapters, disabled, route
from adapterhub.bench.baselines import BagOfWords
from adapterhub.bench.paired import PairedComparison, compare_with
from adapterhub.bench.statistics import Estimate, RepeatedRuns, estimate_all, repeated_runs
from adapterhub.errors import AdapterhubError, ConfigError, DataError, warn_user
from adapterhub.files.native import Saved
from adapterhub.pages.row_scores import PredictionFile, RowScore, row_score
from adapterhub.tasks import Encoded, Task
from adapterhub.tasks.common.batches import model_inputs
from adapterhub.training.word_baseline import HEADS, predict_by_words

BARE = "bare backbone"
AT_ONCE = 8  # adapters attached at a time
ROWS = 64  # rows in one forward pass
FOLDS = 5
REPEATS = 3  # divisions into folds: shows how much a score depends on the division
_PENALTIES = np.logspace(-1, 6, 15)
Features = NDArray[np.float32]


@dataclass(frozen=True)
class Candidate:
    """An adapter to consider as a start: its reference, and its verified files."""

    reference: str
    source: Saved | Path


@dataclass(frozen=True)
class Suggestion:
    """The results of the probes.

    Attributes:
        score: the name of the score.
        bare: the estimate of the bare backbone.
        estimates: the estimates of the adapters, the best one first.
        comparisons: each adapter compared with the bare backbone, by its reference.
        unusable: why an adapter could not be probed, by its reference.
        words: the estimate of a bag of words, which needs no backbone; None without words.
    """

    score: str
    bare: Estimate
    estimates: tuple[Estimate, ...]
    comparisons: Mapping[str, PairedComparison]
    unusable: Mapping[str, str]
    words: Estimate | None = None

    @property
    def best(self) -> str | None:
        """The adapter to start from: the best one, if it is better than the bare backbone."""
        for estimate in self.estimates:
            if self.comparisons[estimate.method].verdict == "better":
                return estimate.method
        return None

    @property
    def smallest(self) -> float | None:
        """The smallest difference that these rows can detect, as a score."""
        pairs = [self.comparisons[each.method] for each in self.estimates]
        sizes = [pair.smallest for pair in pairs if pair.smallest is not None]
        return sorted(sizes)[len(sizes) // 2] if sizes else None


def check_probed(task: Task) -> None:
    """Check that the labels of a task apply to whole texts.

    Raises:
        ConfigError: they do not.
    """
    if task.head not in HEADS or task.outcomes not in ("classes", "numbers"):
        raise ConfigError(
            f"the features of whole texts cannot be probed for {task.name}",
            expected="a class or a number of each text: classification or regression",
        )


def suggest(
    model: PreTrainedModel,
    encoded: Encoded,
    candidates: Sequence[Candidate],
) -> Suggestion:
    """Probe the features of labelled rows with each adapter, and with the bare backbone.

    Raises:
        ConfigError: the kind of task is not supported.
        DataError: there are too few rows.
    """
    check_probed(encoded.task)
    runs = [_runs(BARE, features_of(model, encoded, [None])[None], encoded)]
    unusable: dict[str, str] = {}
    for start in range(0, len(candidates), AT_ONCE):
        few = candidates[start : start + AT_ONCE]
        names = {f"candidate-{start + i}": each for i, each in enumerate(few)}
        usable = [name for name, each in names.items() if _load(model, name, each, unusable)]
        features = features_of(model, encoded, usable) if usable else {}
        runs += [_runs(names[name].reference, features[name], encoded) for name in usable]
        for name in usable:
            detach(model, name)
    bare, *others = estimate_all(runs)
    pairs = {pair.method: pair for pair in compare_with(runs[0], runs[1:])}
    ranked = sorted(others, key=lambda each: -(each.value or 0.0))
    words = None
    if by_words := _runs_by_words(encoded):  # separate: the comparisons are corrected for adapters
        (words,) = estimate_all([by_words])
        pairs |= {pair.method: pair for pair in compare_with(runs[0], [by_words])}
    return Suggestion(runs[0].score.name, bare, tuple(ranked), pairs, unusable, words)


def behind_virtual_tokens(
    model: PreTrainedModel, encoded: Encoded, candidates: Sequence[Candidate]
) -> tuple[Encoded, dict[str, str]]:
    """Return the rows, cut to leave space for the virtual tokens of every candidate.

    Also return, by reference, why a candidate leaves no space at all.
    """
    left, crowded = [encoded.setting.positions], dict[str, str]()
    for candidate in candidates:
        if adapter := _load(model, "candidate", candidate, {}):
            try:
                left.append(text_positions(model, [adapter]))
            except AdapterhubError as error:
                crowded[candidate.reference] = error.problem
            detach(model, "candidate")
    room, longest = min(left), max(encoded.lengths)
    if longest <= room:
        return encoded, crowded
    warn_user(
        f"texts are cut to {room:,} tokens, in front of which the virtual tokens of every adapter "
        f"have room; the longest had {longest:,}"
    )
    shorter = replace(encoded.setting, max_length=room, positions=room)
    return encoded.task.encode(encoded.examples, shorter, labelled=True), crowded


def _load(
    model: PreTrainedModel, name: str, candidate: Candidate, unusable: dict[str, str]
) -> Adapter | None:
    """Attach a candidate to the model; None if it does not fit, with the reason in `unusable`."""
    try:
        adapter = load_folder(
            model,
            candidate.source,
            name=name,
            head=False,
        )
    except AdapterhubError as error:
        unusable[candidate.reference] = error.problem
        return None
    return adapter


def _runs(name: str, features: Features, encoded: Encoded) -> RepeatedRuns:
    """Probe some features; the repeats differ in the division into folds."""
    kind, labels, groups = _labels(encoded)
    files = linear_probe(features, labels, groups, kind)
    return repeated_runs(name, files, _score(kind))


def _runs_by_words(encoded: Encoded) -> RepeatedRuns | None:
    """Fit a bag of words to the same rows in the same folds; None if fitting is impossible."""
    kind, labels, groups = _labels(encoded)
    rows = encoded.examples

    def fit(train: NDArray[Any], held: NDArray[Any]) -> list[Any]:
        columns = predict_by_words(kind, [rows[i] for i in train], [rows[i] for i in held])
        if columns is None:
            raise DataError("no word")
        return columns["prediction"]

    try:
        files = _probe(fit, labels, groups, kind)
    except DataError:
        return None
    return repeated_runs(BagOfWords.name, files, _score(kind))


def _labels(encoded: Encoded) -> tuple[str, list[Any], Sequence[Hashable]]:
    """Return the kind of the labels, the labels, and the groups of rows."""
    kind, examples = str(encoded.task.outcomes), encoded.examples
    labels = [float(e.label) if kind == "numbers" else str(e.label) for e in examples]
    return kind, labels, encoded.task.groups_of(examples)


def _score(kind: str) -> RowScore:
    return row_score(kind, "accuracy" if kind == "classes" else "")


def features_of(
    model: PreTrainedModel, encoded: Encoded, names: Sequence[str | None]
) -> dict[str | None, Features]:
    """Return the features of all rows with each adapter, (rows, width).

    The name of the bare backbone is None.
    """
    attached = adapters(model)
    alone = [name for name in names if name is None or attached[name].replaces]
    shared = [name for name in names if name not in alone]
    features = _shared(model, encoded, shared) if shared else {}
    return features | {name: _alone(model, encoded, name) for name in alone}


def _shared(
    model: PreTrainedModel, encoded: Encoded, names: Sequence[str | None]
) -> dict[str | None, Features]:
    """Compute several adapters in one pass, by a route: each text occurs once for each adapter."""
    parts: list[Features] = []
    count, rows = len(names), max(ROWS // len(names), 1)
    for batch in _batches(model, encoded, rows):
        repeated = {key: value.repeat_interleave(count, 0) for key, value in batch.items()}
        size = len(batch["input_ids"])
        with route(model, [*names] * size):
            states = _mean_state(model, repeated)
        parts.append(states.reshape(size, count, -1))
    every = np.concatenate(parts)
    return {name: every[:, number] for number, name in enumerate(names)}


def _alone(model: PreTrainedModel, encoded: Encoded, name: str | None) -> Features:
    way: AbstractContextManager[Any] = nullcontext()
    if name is not None:
        activate(model, name)
    elif adapters(model):
        way = disabled(model)
    with way:
        return np.concatenate([_mean_state(model, b) for b in _batches(model, encoded, ROWS)])


def _batches(model: PreTrainedModel, encoded: Encoded, rows: int) -> list[dict[str, torch.Tensor]]:
    batches = []
    for start in range(0, len(encoded.rows), rows):
        batch = encoded.batch(range(start, min(start + rows, len(encoded.rows))))
        kept = {key: value for key, value in model_inputs(batch).items() if key != "labels"}
        batches.append({key: value.to(model.device) for key, value in kept.items()})
    return batches


@torch.inference_mode()
def _mean_state(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Features:
    """Return the mean over the tokens of each row, (rows, width)."""
    outputs = model(**batch, output_hidden_states=True)
    layers = getattr(outputs, "hidden_states", None) or outputs.encoder_hidden_states
    mask = batch["attention_mask"][..., None].to(layers[-1].dtype)
    states = layers[-1][:, -mask.shape[1] :]  # virtual tokens come first
    mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
    features: Features = mean.float().cpu().numpy()
    return features


def linear_probe(
    features: Features, labels: Sequence[Any], groups: Sequence[Hashable], kind: str
) -> list[PredictionFile]:
    """Return predictions for each row by probes fitted without it, per repeat.

    Features are (rows, width); the kind is classes or numbers. Rows of one group are in one fold.

    Raises:
        DataError: there are too few rows, in total or of a class.
    """
    from sklearn.linear_model import RidgeClassifierCV, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    targets = np.array(labels, dtype=float if kind == "numbers" else None)
    model = RidgeClassifierCV if kind == "classes" else RidgeCV

    def fit(train: NDArray[Any], held: NDArray[Any]) -> Sequence[Any]:
        fitted = make_pipeline(StandardScaler(), model(alphas=_PENALTIES))
        fitted.fit(features[train], targets[train])
        predicted: Sequence[Any] = fitted.predict(features[held])
        return predicted

    return _probe(fit, labels, groups, kind)


def _probe(
    fit: Callable[[NDArray[Any], NDArray[Any]], Sequence[Any]],
    labels: Sequence[Any],
    groups: Sequence[Hashable],
    kind: str,
) -> list[PredictionFile]:
    """For each fold and repeat, fit to the rows of all other folds and predict its rows."""
    _check_enough(labels, groups, kind)
    files = []
    for repeat in range(REPEATS):
        predicted = np.empty(len(labels), dtype=object)
        for train, held in _folds(np.array(labels), groups, kind, repeat):
            predicted[held] = fit(train, held)
        rows = [
            {"label": label, "prediction": _plain(guess)}
            for label, guess in zip(labels, predicted, strict=True)
        ]
        files.append(PredictionFile(kind, "", repeat, "", "", (), rows))
    return files


def _check_enough(labels: Sequence[Any], groups: Sequence[Hashable], kind: str) -> None:
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
