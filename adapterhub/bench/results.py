"""The results of a study: one for each method, task and number of rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from adapterhub.bench.advice import Cost, Recommendation, ShortRuns, recommend
from adapterhub.bench.baselines import BagOfWords, Constant
from adapterhub.bench.cells import Group, expected_runs
from adapterhub.bench.paired import PairedComparison, compare_with
from adapterhub.bench.records import CellRecord, Costs, PredictedRows
from adapterhub.bench.statistics import Estimate, RepeatedRuns, estimate_all, repeated_runs
from adapterhub.bench.study import Study, ranks_of, start_of
from adapterhub.config.yaml import seconds_of
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import parse_methods
from adapterhub.pages.row_scores import PredictionFile, RowScore, row_score
from adapterhub.recipe.recipe import usual_steps


@dataclass(frozen=True)
class MethodResult:
    """The result of one method.

    Attributes:
        method: its name in the study, or the name of a constant prediction.
        estimate: its score on the test rows.
        comparison: with the baseline; None for the baseline itself.
        rate: the learning rate chosen for it.
        at_edge: whether this is the lowest or highest rate that was tried.
        costs: medians over its final runs; None for an untrained method.
        gap: the score on training rows minus the score on test rows; positive means better on
            training rows.
        trials: the runs that chose the rate.
        finals: the runs with the chosen rate.
    """

    method: str
    estimate: Estimate
    comparison: PairedComparison | None = None
    rate: float | None = None
    at_edge: bool = False
    costs: Costs | None = None
    gap: float | None = None
    trials: tuple[CellRecord, ...] = ()
    finals: tuple[CellRecord, ...] = ()

    @property
    def failures(self) -> list[CellRecord]:
        """The runs that failed or diverged."""
        return [record for record in (*self.trials, *self.finals) if record.status != "done"]


@dataclass(frozen=True)
class TaskResult:
    """The results of one task, with some number of training rows.

    Attributes:
        task: the name of the task in the study.
        rows: the number of training rows.
        score: the score of the test rows.
        baseline: the method that the others are compared with.
        methods: the methods in the order of the study, then constant predictions.
        advice: the recommendation.
    """

    task: str
    rows: int
    score: RowScore
    baseline: str
    methods: tuple[MethodResult, ...]
    advice: Recommendation

    @property
    def test_rows(self) -> int:
        """The number of test rows."""
        return max((result.estimate.rows for result in self.methods), default=0)

    @property
    def metric(self) -> str:
        """The main metric of the task, used by the runs for selection; the score may differ."""
        metrics = [r.metric for result in self.methods for r in (*result.finals, *result.trials)]
        return metrics[0].removeprefix("eval_") if metrics else self.score.name

    def find(self, method: str) -> MethodResult:
        """Return the result of a method.

        Raises:
            ConfigError: the study has no method of this name.
        """
        for result in self.methods:
            if result.method == method:
                return result
        raise ConfigError(f"{method!r} is not in the study")


def study_results(
    study: Study,
    records: Iterable[CellRecord],
    constants: Mapping[str, Constant],
    words: Mapping[str, BagOfWords] | None = None,
) -> tuple[TaskResult, ...]:
    """Collect the results of a study, by task and by rows; skip those without a score.

    `constants` contains the constant prediction of each task that has one, `words` its bag of
    words.
    """
    names = study.compared()
    known = [record for record in records if record.cell.method in names]
    results = []
    for task in study.tasks():
        mine = _of_one_origin([record for record in known if record.cell.task == task])
        for rows in sorted({record.cell.rows for record in mine}):
            group = [record for record in mine if record.cell.rows == rows]
            result = _task_result(
                study, (task, rows), group, constants.get(task), (words or {}).get(task)
            )
            results += [result] if result else []
    return tuple(results)


def _of_one_origin(records: list[CellRecord]) -> list[CellRecord]:
    """Keep the records of one backbone and the same data: the most frequent combination."""
    origins = [(str(r.origin.get("data")), r.origin.get("backbone")) for r in records]
    if not origins:
        return []
    chosen = Counter(origins).most_common(1)[0][0]
    return [record for record, origin in zip(records, origins, strict=True) if origin == chosen]


def _task_result(
    study: Study,
    place: tuple[str, int],
    records: Sequence[CellRecord],
    constant: Constant | None,
    words: BagOfWords | None,
) -> TaskResult | None:
    score = _score_of(records)
    if score is None:
        return None
    labels = [m for m in study.compared() if _is_shown(m, study.bench.recorded, records)]
    results = {label: _method_result(label, records, score) for label in labels}
    recorded = study.bench.recorded
    runs = [method_runs(each, score, label in recorded) for label, each in results.items()]
    rows = next(r.rows for r in records if r.rows)
    data = next((each.data for each in runs if each.columns), "")  # they have the same rows
    untrained: dict[str, PredictedRows | None] = {}
    if words is not None and words.kind == rows.kind:
        untrained[words.name] = words.predict(rows, place[1])
    if constant is not None and constant.kind == rows.kind:
        untrained[constant.name] = constant.predict(rows)
    for name, predicted in untrained.items():
        if predicted is not None:
            file = _prediction_file(predicted, data)
            results[name] = MethodResult(name, _no_estimate(name, score))
            alone = repeated_runs(name, [file], score, deterministic=True)
            runs.append(replace(alone, is_constant=constant is not None and name == constant.name))
    compared = _compared(results, runs, study.baseline)
    costs = {name: _cost(result) for name, result in compared.items()}
    methods = tuple(compared.values())
    short, ranks = _short_runs(study, place, methods), ranks_of(study.labels())
    advice = recommend(runs, costs, recorded, short, ranks)
    return TaskResult(*place, score, study.baseline, methods, advice)


def _short_runs(
    study: Study, place: tuple[str, int], methods: Sequence[MethodResult]
) -> ShortRuns | None:
    """Return by how much a budget shortened runs to less than half the usual steps."""
    bench, (task, rows) = study.bench, place
    budget = seconds_of(bench.budget) if bench.budget else None
    steps = max((each.cell.steps for method in methods for each in method.finals), default=0)
    if budget is None or not steps:
        return None
    train = study.tasks()[task].train
    specs = [spec for spec in study.labels().values() if start_of(spec) is None]
    usual = max((usual_steps(train, parse_methods(spec), rows) for spec in specs), default=0)  # type: ignore[arg-type]
    if 2 * steps >= usual:
        return None
    counts = bench.rates, bench.seeds, bench.tuning_seeds
    groups = [Group(task, "", rows, each, 1.0) for each in (steps, usual)]
    these, others = (sum(expected_runs(group, *counts)) for group in groups)
    return ShortRuns(steps, usual, budget * others / these)


def _is_shown(method: str, recorded: Sequence[str], records: Sequence[CellRecord]) -> bool:
    """Return whether a method has runs here; recorded methods with trials only are hidden."""
    mine = [record for record in records if record.cell.method == method]
    if method not in recorded or any(record.cell.stage == "final" for record in mine):
        return bool(mine)
    return bool(mine) and all(record.status != "done" for record in mine)


def _score_of(records: Sequence[CellRecord]) -> RowScore | None:
    """Return the main metric if the rows have it, else their first score."""
    for record in records:
        if record.rows:
            kind, outcomes = record.rows.kind, record.rows.outcomes()
            for metric in (record.metric.removeprefix("eval_"), ""):
                try:
                    score = row_score(kind, metric)
                    score.columns(outcomes)
                except (ConfigError, KeyError):  # BLEU needs texts, which are not kept
                    continue
                return score
    return None


def _method_result(label: str, records: Sequence[CellRecord], score: RowScore) -> MethodResult:
    """Collect the records of a method, without its estimate."""
    own = [record for record in records if record.cell.method == label]
    trials = sorted((r for r in own if r.cell.stage == "search"), key=_choice)
    finals = _finals(own)
    rate = finals[0].cell.rate if finals else None
    gaps = [gap for record in finals if (gap := _gap(record, score)) is not None]
    tried = sorted(record.cell.rate for record in trials)
    return MethodResult(
        label,
        _no_estimate(label, score),
        rate=rate,
        at_edge=rate is not None and len(tried) > 1 and rate in (tried[0], tried[-1]),
        costs=median_costs([r.costs for r in finals if r.status == "done"]),
        gap=fmean(gaps) if gaps else None,
        trials=tuple(trials),
        finals=tuple(finals),
    )


def _finals(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Return the final runs by seed; if there were several choices, those of the chosen rate."""
    finals = [record for record in records if record.cell.stage == "final"]
    if not finals:
        return []
    choices = Counter(map(_choice, finals))
    chosen = max(choices, key=lambda each: (each[0], _tuned(records, each), choices[each]))
    kept = [record for record in finals if _choice(record) == chosen]
    return sorted(kept, key=lambda record: record.cell.seed)


def _choice(record: CellRecord) -> tuple[int, float]:
    return record.cell.steps, record.cell.rate


def _tuned(records: Sequence[CellRecord], choice: tuple[int, float]) -> tuple[int, float]:
    """Return the number of trials for a choice of steps and rate, and their mean score."""
    trials = [r.selects for r in records if r.cell.stage == "search" and _choice(r) == choice]
    return len(trials), fmean(trials) if trials else -math.inf


def method_runs(result: MethodResult, score: RowScore, is_recorded: bool = False) -> RepeatedRuns:
    """Collect the predictions of a method's seeds; without a final run, its trials failed.

    Raises:
        ConfigError: the test rows of the seeds differ.
    """
    done = [record for record in result.finals if record.status == "done" and record.rows]
    files = [_prediction_file(r.rows, _test_digest(r)) for r in done if r.rows]
    failed = len(result.finals) - len(done)
    failed = failed if result.finals else int(bool(result.failures))
    runs = repeated_runs(result.method, files, score, failed=failed)
    return replace(runs, is_recorded=is_recorded)


def _prediction_file(rows: PredictedRows, data: str) -> PredictionFile:
    return PredictionFile(rows.kind, "", 0, data, "", (), rows.outcomes())


def _test_digest(record: CellRecord) -> str:
    data = record.origin.get("data")
    return str(data.get("test")) if isinstance(data, Mapping) else ""


def _no_estimate(method: str, score: RowScore) -> Estimate:
    return Estimate(method, score.name, score.points, 0, ())


def _compared(
    results: Mapping[str, MethodResult], runs: Sequence[RepeatedRuns], baseline: str
) -> dict[str, MethodResult]:
    """Add the estimates, and the comparisons with the baseline."""
    estimates = {estimate.method: estimate for estimate in estimate_all(runs)}
    first = next((each for each in runs if each.method == baseline), None)
    others = [each for each in runs if each is not first]
    pairs = {p.method: p for p in compare_with(first, others)} if first else {}
    return {
        name: replace(result, estimate=estimates[name], comparison=pairs.get(name))
        for name, result in results.items()
    }


def _cost(result: MethodResult) -> Cost:
    if result.costs is None:
        return Cost() if result.trials or result.finals else Cost(0, 0.0)
    costs = result.costs
    return Cost(costs.all_trained, costs.train_seconds, is_adapter=costs.trained > 0)


def median_costs(costs: Sequence[Costs]) -> Costs | None:
    """Return the median of each cost; None without a run."""
    if not costs:
        return None
    columns = {name: [getattr(each, name) for each in costs] for name in Costs.__dataclass_fields__}
    return Costs(**{name: type(values[0])(median(values)) for name, values in columns.items()})


def _gap(record: CellRecord, score: RowScore) -> float | None:
    """Return how much better a run scores on its training rows than on the test rows."""
    names = (score.name, f"eval_{score.name}")
    fitted, tested = (
        next((each[name] for name in names if name in each), None)
        for each in (record.trained, record.tested)
    )
    if fitted is None or tested is None:
        return None
    return (tested - fitted) if score.lower_is_better else (fitted - tested)
