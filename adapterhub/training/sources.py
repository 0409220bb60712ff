"""The rows of several sources in one run: their shares of an epoch, and the scores of each.

A source gets the share  w_i * rate(n_i) / sum_j w_j * rate(n_j)  of the rows that an epoch draws,
with the weight w_i and the number n_i of its rows; the mixing of the recipe has the rate (its size,
1, or its size to the power of 1/t). An epoch has as many rows as all sources together. Each source
is drawn in passes: none of its rows is drawn again before all of them were. Equal weights and
`mixing: size` therefore give the same batches as one file with all rows.

What is drawn depends only on the sizes, the shares, the seed and the epoch, so that a resumed run
draws the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, count, islice, pairwise
from typing import TYPE_CHECKING

from adapterhub.pages.row_scores import PredictionFile, outcomes_of, row_scores
from adapterhub.recipe.recipe import Mixing, mixture_shares
from adapterhub.tasks import Encoded, Prediction
from adapterhub.tasks.common.base import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapterhub.tasks import Setting, Task

_DRAWS = 0x50_55_4C  # separates these random numbers from other draws with the same seed


@dataclass(frozen=True)
class SourceRows:
    """One of several sources: its name and place, its weight, and its examples by purpose.

    Attributes:
        name: the prefix of its metrics.
        location: the path or dataset id.
        weight: the factor of its share.
        train: the number of training examples; 0 for a stream, whose rows are not counted.
        evaluation: the number of evaluation examples.
        test: the number of test examples.
    """

    name: str
    location: str
    weight: float = 1.0
    train: int = 0
    evaluation: int = 0
    test: int = 0


@dataclass(frozen=True)
class SourcedRows(Encoded):
    """Rows of several sources, one source after the other; further rows belong to none.

    Attributes:
        names: the names of the sources.
        examples_of: the number of examples of each source.
        rows_of: the number of rows of each source.
    """

    names: tuple[str, ...]
    examples_of: tuple[int, ...]
    rows_of: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of rows of each source."""
        return dict(zip(self.names, self.rows_of, strict=True))

    def by_source(self) -> Iterator[tuple[str, int, Encoded]]:
        """Yield the name, the index of the first example and the rows of each source with rows."""
        examples, rows = (
            pairwise(accumulate(each, initial=0)) for each in (self.examples_of, self.rows_of)
        )
        for name, (first, end), (start, stop) in zip(self.names, examples, rows, strict=True):
            own = self.owners[start:stop] if self.owners else ()
            owners = tuple(owner - first for owner in own)
            if start < stop:
                kept = self.examples[first:end], self.rows[start:stop], owners
                yield name, first, Encoded(self.task, self.setting, *kept)

    def source_scores(
        self,
        model: PreTrainedModel,
        batch_size: int,
        recorded: Sequence[Prediction],
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the metrics of each source, "NAME/metric", after an evaluation of all rows.

        `recorded` are its predictions, `metrics` its metrics. Metrics without a
        prediction for each example are computed again.
        """
        scores: dict[str, float] = {}
        complete = len(recorded) == len(self.examples)
        for name, first, part in self.by_source():
            own: dict[str, float] = {}
            if complete:
                predictions = recorded[first : first + len(part.examples)]
                if self.task.evaluates_predictions:
                    own |= self.task.metrics(part.examples, predictions)
                labels = self.setting.labels
                file = outcomes_of(self.task, part.examples, predictions, labels, 0)
                if file is not None:
                    own = {**_scores_of(file, metrics), **own}
            if not own.keys() >= metrics.keys():
                again = self.task.token_metrics if complete else self.task.evaluate
                own = {**again(model, part, batch_size), **own}
            scores |= {f"{name}/{m}": own[m] for m in metrics if m in own and math.isfinite(own[m])}
        return scores


def _scores_of(file: PredictionFile, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are scores of summed rows."""
    return {
        name: float(score.summarize(score.columns(file.rows).sum(0)))
        for name, score in row_scores(file.kind).items()
        if name in metrics
    }


def sourced(encoded: Encoded, names: Sequence[str], examples: Sequence[int]) -> Encoded:
    """Return encoded rows with the sources of their first examples; unchanged without sources."""
    if not names or isinstance(encoded, SourcedRows):
        return encoded
    ends = [*accumulate(examples)]
    rows = [0] * len(names)
    source = 0
    for owner in encoded.owners:
        while source < len(ends) and owner >= ends[source]:
            source += 1
        if source == len(ends):
            break
        rows[source] += 1
    return _sourced(encoded, names, examples, rows)


def truncate_each(
    whole: Encoded, task: Task, setting: Setting, names: Sequence[str], examples: Sequence[int]
) -> Encoded:
    """Return the rows of `truncate`; rows that are packed have texts of a single source."""
    if not (names and task.packs):
        return truncate(whole, task, setting)
    ends = [*accumulate(examples, initial=0)]
    if ends[-1] < len(whole.examples):
        ends.append(len(whole.examples))
    parts = [
        truncate(replace(whole, examples=whole.examples[a:b]), task, setting)
        for a, b in pairwise(ends)
        if a < b
    ]
    rows = iter([len(part.rows) for part in parts])
    joined = replace(
        parts[0], examples=whole.examples, rows=[row for part in parts for row in part.rows]
    )
    return _sourced(joined, names, examples, [next(rows) if count else 0 for count in examples])


def _sourced(
    encoded: Encoded, names: Sequence[str], examples: Sequence[int], rows: Sequence[int]
) -> SourcedRows:
    own = {each.name: getattr(encoded, each.name) for each in fields(Encoded)}
    return SourcedRows(**own, names=tuple(names), examples_of=tuple(examples), rows_of=tuple(rows))


def source_shares(
    mixing: Mixing, sizes: Mapping[str, int], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return the share of each source in the drawn rows; a source without rows has none."""
    known = {name: size for name, size in sizes.items() if size}
    shares = mixture_shares(mixing, known, [weights[name] for name in known])
    return {name: shares.get(name, 0.0) for name in sizes}


def apportion(shares: Sequence[float], total: int, drawn: Sequence[int], size: int) -> list[int]:
    """Return the numbers of the next `size` items, so that all that are drawn keep the shares.

    `drawn` are the numbers of the items before, `total` in all. The sums differ from
    share * (total + size) by less than 1, for shares that add up to 1.
    """
    missing = [share * (total + size) - before for share, before in zip(shares, drawn, strict=True)]
    numbers = [max(math.floor(each), 0) for each in missing]
    order = sorted(range(len(shares)), key=lambda i: (numbers[i] - missing[i], i))
    for index in order[: max(size - sum(numbers), 0)]:
        numbers[index] += 1
    for index in reversed(order):
        numbers[index] -= min(max(sum(numbers) - size, 0), numbers[index])
    return numbers


def apportioned(shares: Sequence[float], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each draw of `size` items the numbers by share that were drawn before and are now.

    The numbers drawn in all keep the shares.
    """
    drawn = [0] * len(shares)
    for number in count():
        numbers = apportion(shares, number * size, drawn, size)
        yield drawn, numbers
        drawn = [before + now for before, now in zip(drawn, numbers, strict=True)]


def drawn_rows(sizes: Sequence[int], shares: Sequence[float], epoch: int, seed: int) -> list[int]:
    """Return the sorted indices of the rows of an epoch, as many as there are rows."""
    import numpy as np

    earlier, numbers = next(islice(apportioned(shares, sum(sizes)), epoch, None))
    drawn: list[int] = []
    starts = accumulate(sizes, initial=0)
    for source, (size, before, missing, start) in enumerate(
        zip(sizes, earlier, numbers, starts, strict=False)
    ):
        turn, taken = divmod(before, size) if size else (0, 0)
        while missing:
            order = np.random.default_rng([seed, source, turn, _DRAWS]).permutation(size)
            own = order[taken : taken + missing].tolist()
            drawn += [start + index for index in own]
            missing, turn, taken = missing - len(own), turn + 1, 0
    return sorted(drawn)
