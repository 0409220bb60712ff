"""Comparing runs: their main numbers, and whether a difference is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapterhub.errors import ConfigError
from adapterhub.pages.run_files import RunFiles, submapping
from adapterhub.pages.statistics import Difference, difference


@dataclass(frozen=True)
class RunSummary:
    """The numbers of one run; None where its files do not have them."""

    name: str
    method: str
    backbone: str
    main_metric: str
    metrics: dict[str, float]
    trained: int | None
    size: int | None
    seconds: float | None
    memory: int | None
    rows: int | None
    evaluation_rows: int | None


def summary(run: RunFiles, name: str) -> RunSummary:
    """Collect the numbers of a run."""
    data = submapping(run.record, "data")
    methods = run.manifest.methods if run.manifest else ()
    return RunSummary(
        name=name,
        method="+".join(next(iter(method), "") for method in methods),
        backbone=run.manifest.backbone.fingerprint if run.manifest else "",
        main_metric=run.main_metric,
        metrics=run.metrics,
        trained=run.trained or None,
        size=run.size or None,
        seconds=run.timings[-1]["seconds"] if run.timings else None,
        memory=max((line["peak_memory"] for line in run.timings), default=None),
        rows=_whole(data.get("train")),
        evaluation_rows=_whole(data.get("eval")),
    )


def check_comparable(runs: Sequence[RunFiles], names: Sequence[str]) -> None:
    """Refuse runs whose evaluation data are known to differ.

    Raises:
        ConfigError: two runs were evaluated on different data, or have different tasks.
    """
    known = [(n, run.predictions) for n, run in zip(names, runs, strict=True) if run.predictions]
    if len({(file.data, file.kind) for _, file in known}) > 1:
        raise ConfigError(
            "these runs were evaluated on different data, so their metrics do not compare",
            expected="runs with the same evaluation data (data.eval) and kind of task",
            hint="adapterhub eval RUN --data FILE for each, or compare --list to list them anyway",
            offenders=[
                f"{name}: {file.task}, {len(file.rows):,} rows, sha256 {file.data[:12]}"
                for name, file in known
            ],
        )


def pairwise(runs: Sequence[RunFiles]) -> list[tuple[int, Difference]]:
    """Compare each run after the first with the first, where both have predictions."""
    first = runs[0].predictions
    return [
        (i, difference(first, run.predictions))
        for i, run in enumerate(runs)
        if i and first and run.predictions
    ]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
