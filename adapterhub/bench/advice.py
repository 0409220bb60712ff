"""Which method to take: the cheapest of those that cannot be told apart from the best."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from adapterhub.bench.method_costs import MethodCost, cheapest, cost_texts
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
class Recommendation:
    """A method to take, why, and what is not known.

    Attributes:
        method: the method to take; None if none can be recommended.
        best: the method with the best mean score of those that were tested, recorded ones too.
        tied: the methods that cannot be told apart from the best, with it, in the study's order.
        reasons: sentences that say why, with numbers.
        unknown: sentences that say what the study does not show.
        unproven: the untrained baselines that the method was not shown to be better than.
        candidate: the method that would be taken, if the runs were not too short to tell.
    """

    method: str | None
    best: str | None
    tied: tuple[str, ...]
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    unproven: tuple[str, ...] = ()
    candidate: str | None = None

    @property
    def text(self) -> str:
        """All sentences."""
        return " ".join((*self.reasons, *self.unknown))


@dataclass(frozen=True)
class ShortRuns:
    """Runs that the budget of a study made too short for a recommendation.

    Attributes:
        steps: of a whole run.
        usual: the steps that `adapterhub train` takes.
        seconds: the time of the study with the usual steps, about.
    """

    steps: int
    usual: int
    seconds: float


def recommend(
    study: Sequence[RepeatedRuns],
    costs: Mapping[str, MethodCost],
    recorded: Collection[str] = (),
    margin: float | None = None,
    short: ShortRuns | None = None,
) -> Recommendation:
    """Recommend, of the methods that cannot be told apart from the best, the cheapest.

    One that is worse than another method, though tied with the best, is not a candidate. The
    cheapest has the fewest trained parameters, then the shortest training, then the smallest
    memory. One whose interval against the best one, of this pair alone, excludes 0 is not a
    candidate either: with many methods, the correction ties methods that differ. Nor is one whose
    mean lies outside of the interval that the best one has by its own seeds alone: that is tied
    since somebody's seeds are far apart, which is no reason to take it. With a margin,
    the candidates are instead those that are shown not to be worse than the best one by more than
    it: their interval against it, of the pair alone, excludes such a loss. A method with failed
    seeds is recommended only if all tied methods have some. Methods with one seed, or without a
    score, are not candidates: their sentences say that. Nor are recorded methods: the
    recommendation is the same without them, and a sentence says which of them are better or worse
    than it, corrected for their number. After runs that are too short, nothing is recommended, and
    a sentence says which time would tell.

    Args:
        study: the runs of each method.
        costs: the cost of each method, by its name.
        recorded: the methods that another program trained.
        margin: the largest acceptable loss against the best, in the points that tables show.
        short: how much too short the runs are, if they are.

    Raises:
        ConfigError: the methods were scored differently, or on different rows.
    """
    estimates = {found.method: found for found in estimate_all(study)}
    own = [runs for runs in study if runs.method not in recorded]
    found = _recommend(own, costs, estimates, margin)
    if short is not None and found.method is not None:
        found = _undecided(found, short)
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


def _undecided(found: Recommendation, short: ShortRuns) -> Recommendation:
    """Return what is known after runs that are too short."""
    reason = (
        f"Cannot tell yet: the budget allowed runs of {short.steps:,} steps, where adapterhub "
        f"train takes {short.usual:,}. A study with a budget of about {time_words(short.seconds)} "
        "would tell."
    )
    return replace(found, method=None, reasons=(reason,), unproven=(), candidate=found.method)


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
    margin: float | None,
) -> Recommendation:
    """Recommend one of the methods; the estimates are those of the table."""
    unknown = [_left_out(found) for found in _untested(study)]
    tested = _tested(study)
    best, tied, pairs = _best_and_tied(study)
    if best is None:
        return Recommendation(None, None, (), (_NOTHING,), tuple(unknown))
    candidates = (
        _not_behind(tested, tied, best, pairs, estimates)
        if margin is None
        else _within(margin, tested, best, pairs)
    )
    whole = [runs for runs in candidates.able if not runs.failed] or candidates.able
    method = cheapest(whole, costs)
    reasons = [_take(estimates[method], costs.get(method, MethodCost()))]
    reasons += _why_this(method, best, candidates, pairs, costs)
    unproven = _unproven(method, tested, costs)
    reasons += [*candidates.left_out, *map(_not_better, unproven)]
    unknown = [*_failed_ties(tied, method), *unknown, *_resolution(pairs)]
    names = tuple(runs.method for runs in tied)
    beyond = tuple(pair.baseline for pair in unproven)
    return Recommendation(method, best, names, tuple(reasons), tuple(unknown), beyond)


@dataclass(frozen=True)
class _Candidates:
    """The methods of which the cheapest is taken.

    Attributes:
        able: their runs, the best one's among them.
        near: the methods that are listed as near the best one.
        left_out: sentences on those that are near the best one, but are no candidates.
        margin: the accepted loss, if there is one.
    """

    able: list[RepeatedRuns]
    near: list[str]
    left_out: list[str]
    margin: float | None = None


def _not_behind(
    tested: Sequence[RepeatedRuns],
    tied: Sequence[RepeatedRuns],
    best: str,
    pairs: Mapping[str, PairedComparison],
    estimates: Mapping[str, Estimate],
) -> _Candidates:
    """Return those tied with the best that no other beats, neither behind it nor beyond its range.

    Args:
        tested: the runs of each method.
        tied: those of the methods that are tied with the best.
        best: the method with the best mean.
        pairs: the comparison of each other one with it.
        estimates: the score of each method, with its interval.
    """
    beaten = _beaten(tested)
    others = [runs.method for runs in tied if runs.method not in (best, *beaten)]
    behind = [pairs[name] for name in others if _is_behind(pairs[name])]
    names = {pair.method for pair in behind}
    (alone,) = estimate_all([runs for runs in tied if runs.method == best])
    spread = [n for n in others if n not in names and _is_beyond(estimates[n], alone)]
    able = [runs for runs in tied if runs.method not in {*beaten, *names, *spread}]
    near = [runs.method for runs in tied if runs.method not in {*names, *spread}]
    left_out = _only_corrected(behind, best)
    left_out += _only_spread([estimates[name] for name in spread], alone)
    left_out += [_but_worse(beaten[name], best) for name in near if name in beaten]
    return _Candidates(able, near, left_out)


def _within(
    margin: float,
    tested: Sequence[RepeatedRuns],
    best: str,
    pairs: Mapping[str, PairedComparison],
) -> _Candidates:
    """Return those that are shown not to be worse than the best by more than a margin."""
    far = [p for p in pairs.values() if p.verdict != "worse" and _largest_loss(p) > margin]
    able = [r for r in tested if r.method == best or _largest_loss(pairs[r.method]) <= margin]
    named = ", ".join(f"{pair.method} ({difference_text(pair)})" for pair in far)
    text = f"Not shown to be within {margin:g} of {best}: {named}."
    return _Candidates(able, [runs.method for runs in able], [text] if far else [], margin)


def _largest_loss(pair: PairedComparison) -> float:
    """Return how much worse than the best a method may be, by its interval, in shown points."""
    assert pair.low is not None
    assert pair.high is not None
    return pair.points * (pair.high if pair.lower_is_better else -pair.low)


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


def _is_beyond(found: Estimate, best: Estimate) -> bool:
    """Return whether a mean lies outside of the interval of the best method's score."""
    assert found.value is not None
    assert best.low is not None
    assert best.high is not None
    return not best.low <= found.value <= best.high


def _only_spread(found: Sequence[Estimate], best: Estimate) -> list[str]:
    """Name the methods that are tied with the best one, though their mean is beyond its range."""
    if not found:
        return []
    low, high = (points_text(end or 0.0, best.points) for end in (best.low, best.high))
    named = ", ".join(f"{each.method} ({_mean_and_sd(each)})" for each in found)
    return [
        f"Tied with {best.method}, though with a mean outside of the interval of its own seeds "
        f"({low} to {high}), and so not taken: {named}."
    ]


def _mean_and_sd(found: Estimate) -> str:
    mean, sd = (points_text(number or 0.0, found.points) for number in (found.value, found.sd))
    return f"{mean} ± {sd}"


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


def _take(found: Estimate, cost: MethodCost) -> str:
    """Name the method, with its score and its cost."""
    parts = [f"{found.score} {points_text(found.value or 0.0, found.points)}"]
    if found.low is not None and found.high is not None:
        ends = [points_text(end, found.points) for end in (found.low, found.high)]
        parts[0] += f" (95 % interval {ends[0]} to {ends[1]})"
    return f"Take {found.method}: {', '.join([*parts, *cost_texts(cost)])}."


def _why_this(
    method: str,
    best: str,
    candidates: _Candidates,
    pairs: Mapping[str, PairedComparison],
    costs: Mapping[str, MethodCost],
) -> list[str]:
    """Say how the method compares with the best, with those near it, and with the others."""
    reasons = []
    near = candidates.near
    others = [name for name in near if name not in (method, best)]
    worse = [pair for pair in pairs.values() if pair.verdict == "worse"]
    if method != best:
        text = f"{best} has the best mean, but {method} {_near(candidates.margin)}"
        reasons.append(f"{text} ({numbers_text(pairs[method])}){_fewer(method, best, costs)}.")
    elif others:
        cheapest = " and trains the fewest parameters" if _is_cheapest(method, near, costs) else ""
        which = "cannot be told apart" if candidates.margin is None else "are near enough"
        reasons.append(f"It has the best mean of those that {which}{cheapest}.")
    elif worse and len(worse) == len(pairs):
        reasons.append("It is better than every other method that was tested.")
    if others:
        also = "Nor can be told apart from" if candidates.margin is None else "As near to"
        reasons.append(f"{also} {best}: {', '.join(others)}.")
    if worse:
        texts = [f"{pair.method} ({difference_text(pair)})" for pair in worse]
        reasons.append(f"Worse than {best}: {', '.join(texts)}.")
    is_best = method == best or pairs[method].verdict == "tied"
    if len(near) > 1 and is_best and costs.get(method, MethodCost()).trained == 0:
        reasons.append(f"No trained method was shown to be better than {method}.")
    return reasons


def _unproven(
    method: str, tested: Sequence[RepeatedRuns], costs: Mapping[str, MethodCost]
) -> list[PairedComparison]:
    """Compare a trained method with what is not trained, where it was not shown to be better."""
    untrained = {name for name, cost in costs.items() if cost.trained == 0}
    if method in untrained:
        return []
    pairs = [each if each.method == method else each.mirrored for each in compare_all_pairs(tested)]
    mine = [each for each in pairs if each.method == method and each.baseline in untrained]
    return [each for each in mine if each.verdict != "better"]


def _not_better(pair: PairedComparison) -> str:
    return f"It was not shown to be better than {pair.baseline} ({numbers_text(pair)})."


def _near(margin: float | None) -> str:
    if margin is None:
        return "cannot be told apart from it"
    return f"is worse by at most {margin:g}, the accepted loss"


def _is_cheapest(method: str, near: Sequence[str], costs: Mapping[str, MethodCost]) -> bool:
    """Return whether the trained parameters of all are known, and none has fewer."""
    trained = {name: costs.get(name, MethodCost()).trained for name in near}
    counts = [count for count in trained.values() if count is not None]
    return len(counts) == len(near) and trained[method] == min(counts)


def _fewer(method: str, best: str, costs: Mapping[str, MethodCost]) -> str:
    """Compare the trained parameters of two methods."""
    mine, its = (costs.get(name, MethodCost()).trained for name in (method, best))
    if not mine or its is None or float(f"{its:.1e}") <= float(f"{mine:.1e}"):
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
