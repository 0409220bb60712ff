"""Which method to take: the cheapest of those that cannot be told apart from the best."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from adapterhub.bench.paired import (
    PairedComparison,
    compare_all_pairs,
    compare_with,
    compare_with_best,
)
from adapterhub.bench.statistics import FEWEST_ROWS, Estimate, RepeatedRuns, estimate_all
from adapterhub.bench.wording import (
    difference_text,
    estimate_sentence,
    numbers_text,
    points_text,
    time_words,
)


@dataclass(frozen=True)
class MethodCost:
    """What a method costs; None where it was not measured.

    Attributes:
        trained: the number of trained parameters; 0 for a method that is not trained.
        seconds: the time of one training.
        memory: the bytes of a training: its peak, or what it adds to the loaded backbone.
        beside: whether it is that, beside the backbone.
    """

    trained: int | None = None
    seconds: float | None = None
    memory: int | None = None
    beside: bool = False


@dataclass(frozen=True)
class Recommendation:
    """A method to take, why, and what is not known.

    Attributes:
        method: the method to take; None if none can be recommended.
        best: the method with the best mean score of those that were tested, recorded ones too.
        tied: the methods that cannot be told apart from the best, with it, in the study's order.
        reasons: sentences that say why, with numbers.
        unknown: sentences that say what the study does not show.
    """

    method: str | None
    best: str | None
    tied: tuple[str, ...]
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def text(self) -> str:
        """All sentences."""
        return " ".join((*self.reasons, *self.unknown))


def recommend(
    study: Sequence[RepeatedRuns],
    costs: Mapping[str, MethodCost],
    recorded: Collection[str] = (),
) -> Recommendation:
    """Recommend, of the methods that cannot be told apart from the best, the cheapest.

    One that is worse than another method, though tied with the best, is not a candidate. The
    cheapest has the fewest trained parameters, then the shortest training, then the smallest
    memory. One whose interval against the best one, of this pair alone, excludes 0 is not a
    candidate either: with many methods, the correction ties methods that differ. A method with
    failed seeds is recommended only if all tied methods have some. Methods with one seed, or
    without a score, are not candidates: their sentences say that. Nor are recorded methods: the
    recommendation is the same without them, and a sentence says which of them are better or worse
    than it, corrected for their number.

    Args:
        study: the runs of each method.
        costs: the cost of each method, by its name.
        recorded: the methods that another program trained.

    Raises:
        ConfigError: the methods were scored differently, or on different rows.
    """
    estimates = {found.method: found for found in estimate_all(study)}
    own = [runs for runs in study if runs.method not in recorded]
    found = _recommend(own, costs, estimates)
    if len(own) == len(study):
        return found
    best, tied, _ = _best_and_tied(study)
    others = [runs for runs in study if runs.method in recorded]
    chosen = [runs for runs in own if runs.method == found.method]
    return replace(
        found,
        best=best,
        tied=tuple(runs.method for runs in tied),
        reasons=(*found.reasons, *(_beside(chosen[0], others) if chosen else ())),
        unknown=(*found.unknown, *(_left_out(each) for each in _untested(others))),
    )


def _untested(study: Sequence[RepeatedRuns]) -> list[Estimate]:
    return [found for found in estimate_all(study) if not found.covers_seeds]


def _tested(study: Sequence[RepeatedRuns]) -> list[RepeatedRuns]:
    left_out = {found.method for found in _untested(study)}
    return [runs for runs in study if runs.method not in left_out]


def _best_and_tied(
    study: Sequence[RepeatedRuns],
) -> tuple[str | None, list[RepeatedRuns], dict[str, PairedComparison]]:
    """Return the best tested method, those tied with it, and the comparisons with it."""
    tested = _tested(study)
    if not tested:
        return None, [], {}
    pairs = {pair.method: pair for pair in compare_with_best(tested)}
    (best,) = {runs.method for runs in tested} - {*pairs}
    tied = [r for r in tested if r.method == best or pairs[r.method].verdict == "tied"]
    return best, tied, pairs


def _beside(chosen: RepeatedRuns, others: Sequence[RepeatedRuns]) -> list[str]:
    """Say how the methods that another program trained compare with the recommended one."""
    pairs = compare_with(chosen, _tested(others))
    words = {
        "better": f"better than {chosen.method}",
        "tied": f"cannot be told apart from {chosen.method}",
        "worse": f"worse than {chosen.method}",
    }
    sentences = []
    for verdict, text in words.items():
        named = [f"{p.method} ({difference_text(p)})" for p in pairs if p.verdict == verdict]
        sentences += [f"Recorded by another program, and {text}: {', '.join(named)}."] * bool(named)
    return sentences


def _recommend(
    study: Sequence[RepeatedRuns],
    costs: Mapping[str, MethodCost],
    estimates: Mapping[str, Estimate],
) -> Recommendation:
    """Recommend one of the methods; the estimates are those of the table."""
    unknown = [_left_out(found) for found in _untested(study)]
    tested = _tested(study)
    best, tied, pairs = _best_and_tied(study)
    if best is None:
        return Recommendation(None, None, (), (_NOTHING,), tuple(unknown))
    beaten = _beaten(tested)
    others = [runs.method for runs in tied if runs.method not in (best, *beaten)]
    behind = [pairs[name] for name in others if _is_behind(pairs[name])]
    out = {*beaten, *(pair.method for pair in behind)}
    able = [runs for runs in tied if runs.method not in out]  # the best is among them
    whole = [runs for runs in able if not runs.failed] or able
    method = min(whole, key=lambda runs: _cost_key(runs.method, costs)).method
    reasons = [_take(estimates[method], costs.get(method, MethodCost()))]
    near = [runs.method for runs in tied if runs.method not in {p.method for p in behind}]
    reasons += _why_this(method, best, near, pairs, costs)
    reasons += _only_corrected(behind, best)
    reasons += [_but_worse(beaten[name], best) for name in near if name in beaten]
    unknown = [*_failed_ties(tied, method), *unknown, *_resolution(pairs)]
    names = tuple(runs.method for runs in tied)
    return Recommendation(method, best, names, tuple(reasons), tuple(unknown))


def _beaten(tested: Sequence[RepeatedRuns]) -> dict[str, PairedComparison]:
    """Map each method that is worse than some other to the comparison of the two.

    A best method with a wide interval can be tied with one that a steadier method beats.
    """
    worse = [
        pair if pair.verdict == "worse" else pair.mirrored
        for pair in compare_all_pairs(tested)
        if pair.verdict in ("better", "worse")
    ]
    return {pair.method: pair for pair in worse}


def _is_behind(pair: PairedComparison) -> bool:
    """Return whether a method would be worse than the best if the two were all of the study.

    The more methods there are, the more of them are tied after the correction. That keeps false
    verdicts rare; to leave a method out of a recommendation needs less.
    """
    assert pair.low is not None
    assert pair.high is not None
    return pair.low > 0 if pair.lower_is_better else pair.high < 0


def _only_corrected(behind: Sequence[PairedComparison], best: str) -> list[str]:
    """Name the methods that are tied with the best one by the correction alone."""
    if not behind:
        return []
    named = ", ".join(f"{pair.method} ({difference_text(pair)})" for pair in behind)
    return [
        f"Behind {best}, though not significantly after correction for "
        f"{behind[0].comparisons:,} comparisons: {named}."
    ]


def _but_worse(pair: PairedComparison, best: str) -> str:
    numbers = numbers_text(pair)
    return f"{pair.method} is tied with {best}, but worse than {pair.baseline} ({numbers})."


_NOTHING = "No method can be recommended: none has an interval over test rows and seeds."


def _cost_key(method: str, costs: Mapping[str, MethodCost]) -> tuple[float, float, float, str]:
    cost = costs.get(method, MethodCost())
    numbers = (cost.trained, cost.seconds, cost.memory)
    trained, seconds, memory = (math.inf if n is None else float(n) for n in numbers)
    return trained, seconds, memory, method


def _take(found: Estimate, cost: MethodCost) -> str:
    """Name the method, with its score and its cost."""
    parts = [f"{found.score} {points_text(found.value or 0.0, found.points)}"]
    if found.low is not None and found.high is not None:
        ends = [points_text(end, found.points) for end in (found.low, found.high)]
        parts[0] += f" (95 % interval {ends[0]} to {ends[1]})"
    return f"Take {found.method}: {', '.join([*parts, *cost_texts(cost)])}."


def cost_texts(cost: MethodCost) -> list[str]:
    """Write the known costs: trained parameters, time and memory."""
    texts = []
    if cost.trained is not None:
        texts.append(f"{cost.trained:,} trained parameters" if cost.trained else "not trained")
    if cost.seconds is not None:
        texts.append(f"{time_words(cost.seconds)} of training")
    if cost.memory is not None:
        where = " beside the backbone" if cost.beside else ""
        texts.append(f"{cost.memory / 1e9:.2g} GB of memory{where}")
    return texts


def _why_this(
    method: str,
    best: str,
    tied: Sequence[str],
    pairs: Mapping[str, PairedComparison],
    costs: Mapping[str, MethodCost],
) -> list[str]:
    """Say how the method compares with the best, with those tied, and with the others."""
    reasons = []
    others = [name for name in tied if name not in (method, best)]
    worse = [pair for pair in pairs.values() if pair.verdict == "worse"]
    if method != best:
        text = f"{best} has the best mean, but {method} cannot be told apart from it"
        reasons.append(f"{text} ({numbers_text(pairs[method])}){_fewer(method, best, costs)}.")
    elif others:
        cheapest = " and trains the fewest parameters" if _is_cheapest(method, tied, costs) else ""
        reasons.append(f"It has the best mean of those that cannot be told apart{cheapest}.")
    elif worse:
        reasons.append("It is better than every other method that was tested.")
    if others:
        reasons.append(f"Nor can be told apart from {best}: {', '.join(others)}.")
    if worse:
        texts = [f"{pair.method} ({difference_text(pair)})" for pair in worse]
        reasons.append(f"Worse than {best}: {', '.join(texts)}.")
    if len(tied) > 1 and costs.get(method, MethodCost()).trained == 0:
        reasons.append(f"No trained method was shown to be better than {method}.")
    return reasons


def _is_cheapest(method: str, tied: Sequence[str], costs: Mapping[str, MethodCost]) -> bool:
    """Return whether the trained parameters of all are known, and none has fewer."""
    trained = {name: costs.get(name, MethodCost()).trained for name in tied}
    counts = [count for count in trained.values() if count is not None]
    return len(counts) == len(tied) and trained[method] == min(counts)


def _fewer(method: str, best: str, costs: Mapping[str, MethodCost]) -> str:
    """Compare the trained parameters of two methods."""
    mine, its = (costs.get(name, MethodCost()).trained for name in (method, best))
    if not mine or its is None or its <= mine:
        return ""
    return f" and trains {mine:,} parameters instead of {its:,}"


def _failed_ties(tied: Sequence[RepeatedRuns], method: str) -> list[str]:
    """Name the tied methods with failed seeds, which is why they are not recommended."""
    sentences = []
    for runs in tied:
        if runs.failed:
            count = f"{runs.failed} of {runs.failed + runs.seeds} seeds of {runs.method} failed"
            kept = ", as some of every tied method did" if runs.method == method else ""
            sentences.append(f"{count}{kept}; its score is that of the others.")
    return sentences


def _left_out(found: Estimate) -> str:
    """Describe a method that could not be tested."""
    few = f" With fewer than {FEWEST_ROWS} test rows, nothing can be tested."
    reason = few if found.value is not None and found.rows < FEWEST_ROWS else ""
    return f"Not tested: {estimate_sentence(found)}{reason}"


def _resolution(pairs: Mapping[str, PairedComparison]) -> list[str]:
    """Say how small a difference the study leaves open."""
    if all(pair.verdict == "worse" for pair in pairs.values()):
        return []
    size = median(pair.smallest or 0.0 for pair in pairs.values())
    points, score = next((pair.points, pair.score) for pair in pairs.values())
    text = f"{size * points:.1f} points" if points > 1 else f"{size:.2g} {score}"
    return [f"With these rows and seeds, a difference of less than about {text} cannot be seen."]
