"""Which trained adapter is the best start for some data: each one's features are probed.

A linear probe on the features with an adapter is compared with one on those of the bare backbone,
on the same rows and folds, corrected for the number of adapters. That takes a forward pass of a
sample for each adapter, and no training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from adapterhub.adapters.attach import detach
from adapterhub.adapters.load import load_folder
from adapterhub.bench.features import features_of
from adapterhub.bench.linear_probe import Features, linear_probe
from adapterhub.bench.paired import PairedComparison, compare_with
from adapterhub.bench.statistics import Estimate, RepeatedRuns, estimate_all, repeated_runs
from adapterhub.data.split import content_of
from adapterhub.errors import AdapterhubError, ConfigError
from adapterhub.files.foundation import Foundation
from adapterhub.pages.row_scores import row_score
from adapterhub.tasks import Encoded, Task

BARE = "bare backbone"
AT_ONCE = 8  # adapters that are attached at once
_HEADS = ("classification", "regression")


@dataclass(frozen=True)
class Candidate:
    """An adapter that may be a start: how to name it, its verified files, and those below it."""

    reference: str
    folder: Path
    digest: str | None = None
    on: tuple[Foundation, ...] = ()


@dataclass(frozen=True)
class Suggestion:
    """What the probes say.

    Attributes:
        score: the name of the score.
        bare: the estimate of the bare backbone.
        estimates: those of the adapters, the best one first.
        comparisons: of each adapter with the bare backbone, by its reference.
        unusable: why an adapter could not be probed, by its reference.
    """

    score: str
    bare: Estimate
    estimates: tuple[Estimate, ...]
    comparisons: Mapping[str, PairedComparison]
    unusable: Mapping[str, str]

    @property
    def best(self) -> str | None:
        """The adapter to start from: the best one, if it is better than the bare backbone."""
        for found in self.estimates:
            if self.comparisons[found.method].verdict == "better":
                return found.method
        return None

    @property
    def smallest(self) -> float | None:
        """The smallest difference that these rows can show, as a score."""
        sizes = [pair.smallest for pair in self.comparisons.values() if pair.smallest is not None]
        return sorted(sizes)[len(sizes) // 2] if sizes else None


def check_probed(task: Task) -> None:
    """Refuse tasks whose labels are not of whole texts.

    Raises:
        ConfigError: it is one.
    """
    if task.head not in _HEADS or task.outcomes not in ("classes", "numbers"):
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
        ConfigError: the task is of another kind.
        DataError: too few rows.
    """
    check_probed(encoded.task)
    runs = [_runs(BARE, features_of(model, encoded, [None])[None], encoded)]
    unusable: dict[str, str] = {}
    for start in range(0, len(candidates), AT_ONCE):
        few = candidates[start : start + AT_ONCE]
        names = {f"candidate-{start + i}": each for i, each in enumerate(few)}
        usable = [name for name, each in names.items() if _load(model, name, each, unusable)]
        found = features_of(model, encoded, usable) if usable else {}
        runs += [_runs(names[name].reference, found[name], encoded) for name in usable]
        for name in usable:
            detach(model, name)
    bare, *others = estimate_all(runs)
    pairs = {pair.method: pair for pair in compare_with(runs[0], runs[1:])}
    ranked = sorted(others, key=lambda each: -(each.value or 0.0))
    return Suggestion(runs[0].score.name, bare, tuple(ranked), pairs, unusable)


def _load(
    model: PreTrainedModel, name: str, candidate: Candidate, unusable: dict[str, str]
) -> bool:
    try:
        load_folder(
            model,
            candidate.folder,
            name=name,
            head=False,
            sha256=candidate.digest,
            on=candidate.on,
        )
    except AdapterhubError as error:
        unusable[candidate.reference] = error.problem
        return False
    return True


def _runs(name: str, features: Features, encoded: Encoded) -> RepeatedRuns:
    """Probe some features; the repeats differ in the division into folds."""
    kind = str(encoded.task.outcomes)
    examples = encoded.examples
    labels = [float(e.label) if kind == "numbers" else str(e.label) for e in examples]
    files = linear_probe(features, labels, [content_of(each) for each in examples], kind)
    return repeated_runs(name, files, row_score(kind, "accuracy" if kind == "classes" else ""))
