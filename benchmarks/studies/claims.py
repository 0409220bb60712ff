"""Textbook claims as checks of a study's records, with intervals, also where it disagrees.

    python benchmarks/studies/claims.py FOLDER... [--margin 2] [--markdown FILE]

FOLDER is the output of `adapterhub bench`, or the JSON file of benchmarks/studies/forgetting.py.
Each claim is one function: what it compares and which studies can say something of it. How a check
is tested is in benchmarks/studies/checks.py.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log10
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, Claim, claim, difference_of, gain_check, over_groups, rank_correlation
from good_rates import rates_of
from peer_methods import PEERS

from adapterhub.bench.paired import PairedComparison, compare_each, compare_with
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.results import MethodResult, TaskResult, method_runs, study_results
from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.bench.study import RECORDS, STUDY, Study, read_study, start_of
from adapterhub.files.atomic import replace_file
from adapterhub.methods import Method
from adapterhub.methods.common.base import parse_methods
from adapterhub.pages.row_scores import row_score
from adapterhub.recipe.recipe import run_options, steps_per_epoch

MARGIN = 2.0  # points that count as comparable
TINY = 0.0015  # of the backbone's parameters: about 0.1 %
SCARCE = 500  # training rows, at most
LAYERS = {"sentence-transformers/all-MiniLM-L6-v2": 6}  # which decide the stages of unfreezing
NEAR = 1.25  # two numbers of parameters are about equal up to this factor
WIDTH = 100


@dataclass(frozen=True)
class TaskStudy:
    """What a study found on one task with some number of rows, and the study."""

    study: Study
    result: TaskResult

    @property
    def where(self) -> str:
        """The task and its rows, for tables."""
        return f"{self.result.task}, {self.result.rows:,} rows"

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The methods that are no compositions, by their name in the study."""
        labels = {k: v for k, v in self.study.labels().items() if start_of(v) is None}
        parsed = {k: parse_methods(spec) for k, spec in labels.items()}  # type: ignore[arg-type]
        return {label: each[0] for label, each in parsed.items() if len(each) == 1}

    @cached_property
    def runs(self) -> dict[str, RepeatedRuns]:
        """The predictions of each method."""
        score, recorded = self.result.score, self.study.bench.recorded
        return {
            each.method: method_runs(each, score, each.method in recorded)
            for each in self.result.methods
        }

    @cached_property
    def pairs(self) -> dict[tuple[str, str], PairedComparison]:
        """Every method against every other one, (baseline, method)."""
        return compare_each(list(self.runs.values()))

    def labels(self, name: str, **options: object) -> list[str]:
        """Return the names of the methods of a kind, with these options, that have a result."""
        present = {each.method for each in self.result.methods}
        return [
            label
            for label, method in self.methods.items()
            if method.name == name
            and label in present
            and all(getattr(method, option) == value for option, value in options.items())
        ]

    def trained(self, label: str) -> int:
        """Return the parameters that a method trains, without the head; 0 if it has no run."""
        costs = self.result.find(label).costs
        return costs.trained if costs else 0

    def share(self, label: str) -> float:
        """Return the trained share of the backbone's parameters."""
        costs = self.result.find(label).costs
        return costs.trained / costs.backbone if costs and costs.backbone else float("nan")

    def passes(self, label: str) -> float:
        """Return how often the final runs of a method see each training row."""
        finals = self.result.find(label).finals
        steps = finals[0].cell.steps if finals else 0
        recipe = self.study.tasks()[self.result.task]
        options = run_options(recipe.train, (self.methods[label],), self.result.rows)
        batch, accumulation = options.batch_size, options.gradient_accumulation
        return steps / steps_per_epoch(self.result.rows, batch, accumulation)


Tasks = Sequence[TaskStudy]


def small_prefix_is_comparable(tasks: Tasks, margin: float = MARGIN) -> Claim:
    """Prefix tuning at 0.1 % of the parameters is comparable to full fine-tuning."""
    checks = [
        gain_check(task.where, f"{prefix} - full", task.pairs["full", prefix], -margin)
        for task, prefix in _with_small_prefix(tasks)
    ]
    text = (
        "Prefix tuning with 0.1 % of the backbone's parameters is comparable to full fine-tuning: "
        f"at most {margin:g} points worse."
    )
    return claim("small prefix", text, checks)


def small_prefix_suits_little_data(tasks: Tasks) -> Claim:
    """Above all with little data: the difference is better with the fewest rows."""
    checks = []
    for few, many, prefix in _fewest_and_most(list(_with_small_prefix(tasks))):
        check = Check(few.result.task, f"{few.result.rows:,} against {many.result.rows:,} rows")
        pairs = [task.pairs["full", prefix] for task in (few, many)]
        checks.append(difference_of(check, *pairs))
    text = "Above all with little data: prefix - full is larger with the fewest rows."
    return claim("small prefix, little data", text, checks)


def _with_small_prefix(tasks: Tasks) -> Iterator[tuple[TaskStudy, str]]:
    for task in tasks:
        for prefix in task.labels("prefix"):
            if task.labels("full") and 0 < task.share(prefix) <= TINY:
                yield task, prefix


def _fewest_and_most(
    found: Sequence[tuple[TaskStudy, str]],
) -> Iterator[tuple[TaskStudy, TaskStudy, str]]:
    for key in dict.fromkeys((id(t.study), t.result.task, prefix) for t, prefix in found):
        same = [t for t, prefix in found if (id(t.study), t.result.task, prefix) == key]
        few, many = (end(same, key=lambda t: t.result.rows) for end in (min, max))
        if few.result.rows < many.result.rows:
            yield few, many, key[2]


def gradual_unfreezing_wins(tasks: Tasks) -> Claim:
    """Gradual unfreezing beats freezing and tuning all at once when data is scarce."""
    checks = []
    for task in tasks:
        if task.result.rows > SCARCE:
            continue
        for label in task.labels("unfreeze"):
            for name in ("freeze", "full"):
                checks += [_unfreezing(task, label, other) for other in task.labels(name)]
    text = (
        "Gradual unfreezing beats freezing the lower layers and tuning all of them at once, when "
        f"data is scarce: at most {SCARCE} rows."
    )
    return claim("gradual unfreezing", text, checks)


def _unfreezing(task: TaskStudy, label: str, other: str) -> Check:
    method, layers = task.methods[label], LAYERS.get(str(task.study.recipe.backbone))
    what = f"{label} - {other}"
    if method.every == "equal":  # type: ignore[attr-defined]
        return gain_check(task.where, what, task.pairs[other, label])
    if layers is None:
        return Check(task.where, what, why_open="the number of its stages is not known")
    stages = ceil(layers / method.size) + 1  # type: ignore[attr-defined]
    passes = task.passes(label)
    if passes <= (stages - 1) * method.every:  # type: ignore[attr-defined]
        why = f"its {stages} stages do not begin in {passes:.1f} epochs"
        return Check(task.where, what, why_open=why)
    return gain_check(task.where, what, task.pairs[other, label])


def lora_is_easier_to_train(tasks: Tasks) -> Claim:
    """LoRA is easier to train than prefixes: more rates are good, and seeds differ less."""
    widths, spreads = [], []
    for task in tasks:
        for prefix in task.labels("prefix"):
            for lora in task.labels("lora"):
                both = task.result.find(lora), task.result.find(prefix)
                widths += _wider(task, *both)
                spreads += _steadier(task, *both)
    groups = f"{len(widths)} groups"
    checks = [
        over_groups(Check(groups, "decades of good rates", "decades"), widths),
        over_groups(Check(f"{len(spreads)} groups", "log10 of sd, prefix / lora", ""), spreads),
    ]
    notes = (
        "A group is a task with a number of training rows; groups of one task share test rows.",
        "Good rates: the first trials, one seed each, within a point of the best rate; the grid "
        "ends a range.",
    )
    text = "LoRA is easier to train than prefixes: more rates are good, and seeds differ less."
    return claim("easier to train", text, checks if widths or spreads else [], notes)


def _wider(task: TaskStudy, lora: MethodResult, prefix: MethodResult) -> list[float]:
    """Return how many more decades of rates are good with LoRA."""
    first, second = (rates_of(each, task.result.score) for each in (lora, prefix))
    return [first.decades - second.decades] if first and second else []


def _steadier(task: TaskStudy, lora: MethodResult, prefix: MethodResult) -> list[float]:
    """Return the log ratio of the standard deviations over seeds."""
    sds = [each.estimate.sd for each in (prefix, lora)]
    return [log10(sds[0] / sds[1])] if all(sds) else []  # type: ignore[operator]


def few_parameters_overfit_less(tasks: Tasks) -> Claim:
    """Few trained parameters overfit less: the fit gap grows with the trained parameters."""
    checks = []
    for task in tasks:
        own = [r for r in task.result.methods if r.method not in task.study.bench.recorded]
        known = [r for r in own if r.costs and r.gap is not None]
        if not known:
            continue
        check = Check(task.where, f"rank correlation, {len(known)} methods", "")
        passes = max(task.passes(r.method) for r in known if r.method in task.methods)
        if passes < 2:
            why = f"rows are seen {passes:.1f} times: nothing to overfit"
            checks.append(Check(task.where, check.what, "", why_open=why))
            continue
        sizes = [r.costs.all_trained for r in known]  # type: ignore[union-attr]
        checks.append(rank_correlation(check, sizes, [r.gap or 0.0 for r in known]))
    text = (
        "Few trained parameters overfit less: over the methods, training score minus test score "
        "grows with the number of trained parameters (Spearman)."
    )
    return claim("overfitting", text, checks)


def mam_beats_its_parts(tasks: Tasks) -> Claim:
    """He et al.: MAM beats prefix tuning and parallel adapters alone, at equal parameters."""
    checks = []
    for task in tasks:
        parts = [*task.labels("prefix"), *_bottlenecks(task, "scaled-parallel", "ffn")]
        for mam in task.labels("mam"):
            checks += _equal_sized(task, [(mam, part, f"mam - {_kind(part)}") for part in parts])
    text = "MAM beats prefix tuning and scaled parallel adapters alone, at equal parameters."
    return claim("he2022: mam", text, checks)


def ffn_beats_attention(tasks: Tasks) -> Claim:
    """He et al.: adapters at feed-forward sublayers beat those at attention."""
    checks = []
    for task in tasks:
        found = [
            (ffn, attention, f"{name}: ffn - attention")
            for name in ("pfeiffer", "parallel", "scaled-parallel")
            for ffn in _bottlenecks(task, name, "ffn")
            for attention in _bottlenecks(task, name, "attn")
        ]
        checks += _equal_sized(task, found)
    text = "Adapters at feed-forward sublayers beat those at attention, at equal parameters."
    return claim("he2022: ffn", text, checks)


def parallel_beats_sequential(tasks: Tasks) -> Claim:
    """He et al.: parallel adapters beat sequential ones."""
    return _by_kind(
        tasks, "he2022: parallel", ("parallel", "pfeiffer"), "parallel - sequential",
        "Parallel adapters beat sequential ones, at equal parameters.",
    )  # fmt: skip


def scaling_helps(tasks: Tasks) -> Claim:
    """He et al.: scaled parallel adapters beat those without a factor."""
    return _by_kind(
        tasks, "he2022: scaled", ("scaled-parallel", "parallel"), "scaled - not",
        "Scaled parallel adapters beat those without a factor.",
    )  # fmt: skip


def _by_kind(tasks: Tasks, name: str, kinds: tuple[str, str], what: str, text: str) -> Claim:
    checks = []
    for task in tasks:
        found = [
            (first, second, f"{what}, {'attention' if place == 'attn' else place}")
            for place in ("ffn", "attn")
            for first in _bottlenecks(task, kinds[0], place)
            for second in _bottlenecks(task, kinds[1], place)
        ]
        checks += _equal_sized(task, found)
    return claim(name, text, checks)


def _bottlenecks(task: TaskStudy, name: str, site: str) -> list[str]:
    return task.labels(name, sites=(site,))


def _kind(label: str) -> str:
    return label.partition("(")[0]


def _equal_sized(task: TaskStudy, pairs: Sequence[tuple[str, str, str]]) -> list[Check]:
    """Return a check for each pair (method, other one, words) of about equal size."""
    return [
        gain_check(task.where, what, task.pairs[other, method])
        for method, other, what in pairs
        if task.trained(method) and _is_near(task.trained(method), task.trained(other))
    ]


def _is_near(first: int, second: int) -> bool:
    return max(first, second) <= NEAR * min(first, second)


def as_good_as_peers(tasks: Tasks, margin: float = MARGIN) -> Claim:
    """A method scores here what it scores in another library."""
    checks = [
        gain_check(task.where, f"ours - {peer.label}", task.pairs[peer.label, ours], -margin)
        for task in tasks
        for peer in PEERS
        for ours in task.labels(peer.ours)
        if peer.label in task.runs
    ]
    text = (
        "A method trained by adapterhub is as good as the same method trained by peft, adapters or "
        f"transformers' Trainer: at most {margin:g} points worse."
    )
    notes = (
        "Trained by the other library itself, on the same rows, seeds, trials and steps; "
        "benchmarks/studies/peer_methods.py says what differs.",
    )
    return claim("peers", text, checks, notes)


def tuning_one_after_another_forgets(records: Sequence[Mapping[str, Any]]) -> Claim:
    """Fine-tuning one task after another forgets the first one."""
    checks = []
    for record in records:
        where = f"{record['first']}, then {record['second']}"
        for name, runs in record["approaches"].items():
            if PER_TASK in name:
                continue
            before, after = (_right(side, [r[side] for r in runs]) for side in ("before", "after"))
            (pair,) = compare_with(after, [before])
            checks.append(gain_check(where, f"{name}: before - after", pair))
    return claim("forgetting", "Fine-tuning one task after another forgets the first one.", checks)


def an_adapter_per_task_forgets_nothing(records: Sequence[Mapping[str, Any]]) -> Claim:
    """With an adapter per task on a frozen backbone, every prediction stays as it was."""
    checks = []
    for record in records:
        where = f"{record['first']}, then {record['second']}"
        for name, runs in record["approaches"].items():
            if PER_TASK in name:
                sides = [(a, b) for r in runs for a, b in zip(r["before"], r["after"], strict=True)]
                changed = sum(a != b for a, b in sides)
                why = f"{changed} of {len(sides):,} answers changed between right and wrong"
                checks.append(Check(where, name, why_open=why, exact=not changed))
    text = "An adapter per task on a frozen backbone forgets nothing."
    return claim("forgetting, adapters", text, checks)


PER_TASK = "one per task"  # in the name of an approach of forgetting.py


def _right(name: str, rows: Sequence[str]) -> RepeatedRuns:
    """Return runs whose rows are given as 1 for right, and 0."""
    columns = [np.array([[float(digit), 1.0] for digit in each]) for each in rows]
    return RepeatedRuns(name, row_score("classes"), tuple(columns))


CLAIMS: tuple[Callable[[Tasks], Claim], ...] = (
    small_prefix_is_comparable,
    small_prefix_suits_little_data,
    gradual_unfreezing_wins,
    lora_is_easier_to_train,
    few_parameters_overfit_less,
    mam_beats_its_parts,
    ffn_beats_attention,
    parallel_beats_sequential,
    scaling_helps,
)


def read_tasks(folders: Sequence[Path]) -> list[TaskStudy]:
    """Read the studies in some folders: one for each task and number of rows."""
    found = []
    for folder in folders:
        study = read_study(folder / STUDY)
        results = study_results(study, RecordFolder(folder / RECORDS).all(), {})
        found += [TaskStudy(study, result) for result in results]
    return found


def check_claims(paths: Sequence[Path], margin: float = MARGIN) -> list[Claim]:
    """Check every claim.

    Args:
        paths: folders of studies, and files of `forgetting.py`.
        margin: the points that count as comparable.
    """
    tasks = read_tasks([path for path in paths if path.is_dir()])
    found = [each(tasks) for each in CLAIMS[1:]]
    records = [json.loads(path.read_text("utf-8")) for path in paths if path.is_file()]
    forgetting = (tuning_one_after_another_forgets, an_adapter_per_task_forgets_nothing)
    return [
        small_prefix_is_comparable(tasks, margin),
        *found,
        as_good_as_peers(tasks, margin),
        *(each(records) for each in forgetting),
    ]


def as_text(claims: Sequence[Claim]) -> str:
    """Return the claims for a terminal, at most 100 columns wide."""
    lines: list[str] = []
    for each in claims:
        lines += textwrap.wrap(each.text, WIDTH)
        lines += [f"  {each.verdict.upper() if each.checks else 'NOT CHECKED'}: {each.counts}"]
        lines += [_line(check) for check in each.checks]
        for note in each.notes if each.checks else ():
            lines += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines.append("")
    return "\n".join(lines)


def _line(check: Check) -> str:
    left = f"  {check.where:<17} {check.what:<32} "
    words = f"{check.numbers:<32}"
    text = f"{left}{words} {check.verdict}"
    return (
        text if len(text) <= WIDTH else f"{left.rstrip()}\n{'':20}{words.rstrip()} {check.verdict}"
    )


def as_markdown(claims: Sequence[Claim]) -> str:
    """Return the claims as Markdown."""
    lines: list[str] = []
    for each in claims:
        word = each.verdict if each.checks else "not checked"
        lines += [f"## {each.text}", "", f"**{word.capitalize()}**: {each.counts}.", ""]
        if each.checks:
            lines += ["| where | what | value, 95 % interval, corrected p | verdict |"]
            lines += ["|---|---|---:|---|"]
            lines += [f"| {c.where} | {c.what} | {c.numbers} | {c.verdict} |" for c in each.checks]
            lines += ["", *(f"- {note}" for note in each.notes), ""]
    return "\n".join(lines)


def main() -> None:
    """Print the claims, and write them as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--margin", type=float, default=MARGIN, help="points that are comparable")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = check_claims(options.folders, options.margin)
    print(as_text(found))
    if options.markdown:
        replace_file(options.markdown, as_markdown(found).encode())


if __name__ == "__main__":
    main()
