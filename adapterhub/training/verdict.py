"""What a finished run says in words: which evaluation was the best, and why the run ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapterhub.errors import one_line
from adapterhub.training.options import RunOptions


def verdict(
    history: Sequence[Mapping[str, float]],
    best_step: int | None,
    options: RunOptions,
    metric: str,
    *,
    stopped_early: bool,
) -> list[str]:
    """Say which evaluation was the best, whether the run was stopped early, and what may help.

    Args:
        history: the metrics of each evaluation, with "step" and "epoch".
        best_step: the step of the best evaluation, None if there is none.
        options: the training options of the run.
        metric: the metric that selected the best.
        stopped_early: whether the run ended before its last step.
    """
    if best_step is None or not history:
        return []
    best = next(record for record in history if record["step"] == best_step)
    last = history[-1]
    lines = [f"{_place(best, options, last['step'])} ({metric} {best[metric]:.4f})"]
    if stopped_early:
        count = len([record for record in history if record["step"] > best_step])
        lines.append(f"stopped early: no improvement in {count} evaluation{'s' * (count > 1)}")
    elif best is last:
        lines.append(f"the last {_more(options)}")
    return lines


def one_class(label: str | None) -> list[str]:
    """Say what may help if the best evaluation gave every row the same label."""
    if label is None:
        return []
    return [
        f"every evaluation row is predicted as {one_line(label, 20)!r}; try",
        "another train.learning_rate, more epochs, class_weights=balanced",
    ]


def _place(record: Mapping[str, float], options: RunOptions, last: float) -> str:
    """Name an evaluation by its epoch, or by its step if it is not at the end of one."""
    epoch, step = record["epoch"], record["step"]
    if epoch != round(epoch):
        return f"step {step:,.0f} of {options.max_steps or last:,.0f}, epoch {epoch:.2f}"
    if options.max_steps:
        return f"epoch {epoch:.0f}, step {step:,.0f} of {options.max_steps:,}"
    return f"epoch {epoch:.0f} of {options.epochs}"


def _more(options: RunOptions) -> str:
    """Suggest twice the length of the run."""
    if options.max_steps:
        return f"step was the best: more may help (train.max_steps={2 * options.max_steps})"
    return f"epoch was the best: more may help (train.epochs={2 * options.epochs})"
