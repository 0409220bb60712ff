"""The methods of peft and adapters in the table of a study, trained by their own libraries.

    cd FOLDER_OF_THE_DATA
    python benchmarks/studies/peers.py STUDY.yaml --output DIR [--tasks sst2,rte]
        [--peft lora,dora,...] [--adapters seq_bn,mam,... --python ENV/bin/python]
    adapterhub report DIR

DIR is the folder of the study, as for `adapterhub bench STUDY.yaml --output DIR`, before or after
it. The peers have the same rows to train on, to select by and to test, the same seeds, trials,
steps and batches, warm-up and schedule, and rates around the default of our method; and the sizes
of our methods (peer_methods.py; --sizes prints both). They are trained by peer_worker.py, which
says what is a library's own: autocast, dropout, one learning rate for method and head, and the
head itself, which decides much: ours reads the mean of all tokens, as all-MiniLM-L6-v2 was
trained; that of BERT in transformers reads a pooler that it was not trained with. All predictions
are scored by the metrics of our tasks. Runs go into DIR/records, are not repeated, and may be
stopped; several processes divide them.

peft and transformers are those of this environment; `--python` is the interpreter of one with
adapters and accelerate.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peer_methods import PeerMethod, named

from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.find import find_backbone
from adapterhub.backbones.load import load_processor, meta_model
from adapterhub.backbones.pooling import max_positions
from adapterhub.bench.cells import Cell, Group, cell_key
from adapterhub.bench.conduct import run_study
from adapterhub.bench.execute import EVALUATIONS, FIT_ROWS, TaskContext
from adapterhub.bench.plan import PlannedStudy, plan_study
from adapterhub.bench.records import (
    CellRecord,
    Costs,
    PredictedRows,
    RecordFolder,
    predicted_rows,
)
from adapterhub.bench.study import RECORDS, STUDY, WORK, Study, keep_study, read_study
from adapterhub.config.options import to_dict
from adapterhub.data.examples import Example, sample
from adapterhub.errors import ConfigError
from adapterhub.pages.page import lower_is_better
from adapterhub.pages.row_scores import outcomes_of
from adapterhub.recipe.recipe import TrainOptions, run_options, warmup_steps
from adapterhub.tasks import Prediction, dump_task
from adapterhub.tasks.classification import Number, OfTexts, best_of
from adapterhub.tasks.common.batches import Setting
from adapterhub.training.loading import SharedLoader, fit_rows

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
# Options of a recipe that the Trainer gets under its own name, if the recipe sets them.
PASSED = {
    "weight_decay": "weight_decay",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
}
# Those that change no result, or that every run of a study gets.
SHARED = ("max_steps", "batch_size", "gradient_accumulation", "learning_rate", "schedule", "warmup",
          "eval_every", "best_metric", "max_length", "eval_batch_size", "length_grouped", "report",
          "save_every", "log_every", "tensorboard", "tracker", "frozen_cache", "frozen_cache_gb",
          "epochs", "compile")  # fmt: skip
CLOSE = 1e-4  # a score of one checkpoint, computed twice


class Worker:
    """A process that trains with one library; it is started when it is first needed."""

    def __init__(self, library: str, python: str, log: Path) -> None:
        self.library, self.python, self.log = library, python, log

    @cached_property
    def process(self) -> subprocess.Popen[str]:
        """The process."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        worker = str(Path(__file__).with_name("peer_worker.py"))
        with self.log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                [self.python, worker, self.library],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
            )

    @cached_property
    def hello(self) -> dict[str, Any]:
        """What the process says of itself: versions, settings, device."""
        return self._read()

    def ask(self, job: dict[str, Any], scored: Any = None) -> dict[str, Any]:
        """Return the result of a job.

        Args:
            job: the job.
            scored: returns the score of the logits of an evaluation.
        """
        _ = self.hello
        self._write(job)
        while "result" not in (message := self._read()):
            self._write({"score": scored(message["logits"])})
        return dict(message["result"])

    def close(self) -> None:
        """End the process, if it was started."""
        if "process" in vars(self):
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return dict(json.loads(line))
        said = self.log.read_text(encoding="utf-8").splitlines()[-3:]
        raise SystemExit(
            "\n".join([f"{self.python} cannot train with {self.library}: see {self.log}", *said])
        )


@dataclass(frozen=True)
class PeerContext(TaskContext):
    """What the runs of one task share: `specs` has the configurations by the peers' names."""

    workers: dict[str, Worker] = field(default_factory=dict)
    backbone_size: int = 0

    def key(self, cell: Cell) -> str:
        """Return the digest of a cell: of the library, its version, and all that a job has."""
        hello = self.workers[cell.method].hello
        peer = [hello["library"], hello["version"], hello["settings"], self.specs[cell.method]]
        task = dump_task(self.data.run.task), self.metric, self.options(cell)
        shared = [task, self.recipe.train.max_length, self.data.digests, self.backbone]
        return cell_key(cell, ["peer", *peer, *shared])

    def options(self, cell: Cell) -> dict[str, Any]:
        """Return what the Trainer gets beside rate, steps, seed and batch size."""
        run = run_options(self.recipe.train, (), cell.rows)
        if run.schedule not in SCHEDULES:
            raise ConfigError(
                f"peers have no schedule {run.schedule!r}", expected=", ".join(SCHEDULES)
            )
        default, train = TrainOptions(), self.recipe.train
        differing = {
            name: value for name, value in vars(train).items() if value != getattr(default, name)
        }
        if other := [name for name in differing if name not in (*PASSED, *SHARED)]:
            raise ConfigError("peers have no such option", offenders=[f"train.{n}" for n in other])
        return {
            "lr_scheduler_type": SCHEDULES[run.schedule],
            "warmup_steps": warmup_steps(run.schedule, cell.steps, train.warmup),
            "gradient_accumulation_steps": run.gradient_accumulation,
            **{PASSED[name]: value for name, value in differing.items() if name in PASSED},
        }

    @cached_property
    def length(self) -> int:
        """The maximum length of an input, as our runs choose it."""
        run, recipe = self.data.run, self.recipe
        tokenizer = load_processor(recipe.backbone, run.task.head, recipe.revision)
        most = max_positions(meta_model(recipe.backbone, revision=recipe.revision))
        setting = Setting(tokenizer, most, tuple(run.labels))
        return fit_rows(run, setting, recipe.train.max_length).max_length

    def job(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Return the job of a cell."""
        data = self.data.of(cell.rows, cell.seed)
        parts = {"train": (data.train, True), "select": (data.evaluation, True)}
        if cell.stage == "final":
            parts |= {"tested": (self.data.test, False), "trained": (fitted(data.train), False)}
        work.mkdir(parents=True, exist_ok=True)
        return {
            "do": "train",
            "folder": str(find_backbone(self.recipe.backbone, self.recipe.revision)[0].absolute()),
            "config": self.specs[cell.method],
            "classes": len(data.labels),
            "length": self.length,
            "seed": cell.seed,
            "rate": cell.rate,
            "steps": cell.steps,
            "batch_size": run_options(self.recipe.train, (), cell.rows).batch_size,
            "evaluate_every": -(-cell.steps // EVALUATIONS),
            "lower_is_better": lower_is_better(self.metric),
            "options": self.options(cell),
            "rows": {name: self.rows(part, labelled) for name, (part, labelled) in parts.items()},
            "work": str(work.absolute()),
        }

    def rows(self, examples: Sequence[Example], labelled: bool) -> dict[str, Any]:
        """Return examples as columns of texts, and labels as the model reads them."""
        task = self.data.run.task
        assert isinstance(task, OfTexts)
        found: dict[str, Any] = {"texts": list(zip(*map(task.shown, examples), strict=True))}
        if labelled:
            found["labels"] = [task.target(each, self.data.run.labels) for each in examples]
        return found

    def score(self, examples: Sequence[Example], logits: Sequence[Sequence[float]]) -> Scored:
        """Score logits as our runs score theirs."""
        task, labels = self.data.run.task, self.data.run.labels
        predictions: list[Prediction]
        if labels:
            shares = torch.tensor(logits).softmax(-1).tolist()
            predictions = [best_of(dict(zip(labels, row, strict=True))) for row in shares]
        else:
            predictions = [Number(value) for (value,) in logits]
        return Scored(task.metrics(examples, predictions), predictions)


@dataclass(frozen=True)
class Scored:
    """The metrics of some rows, and the predictions that they are of."""

    metrics: dict[str, float]
    predictions: list[Prediction]


def fitted(examples: list[Any]) -> list[Any]:
    """Return the training rows on which final runs are evaluated as well."""
    return sample(examples, FIT_ROWS, 0)


@dataclass(frozen=True)
class PeerEngine:
    """Runs cells one after the other, each in the worker of its library."""

    contexts: dict[str, PeerContext]
    work: Path

    def run(self, cells: Iterable[Cell]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it has ended."""
        for cell in cells:
            yield run_peer(cell, self.contexts[cell.task], self.work)


def run_peer(cell: Cell, context: PeerContext, work: Path) -> CellRecord:
    """Train one run in its worker, and return its record."""
    worker = context.workers[cell.method]
    select, scores = context.data.run.evaluation, []

    def scored(logits: list[list[float]]) -> float:
        scores.append(context.score(select, logits).metrics[context.metric])
        return scores[-1]

    found = worker.ask(context.job(cell, work), scored)
    origin = origin_of(context, cell, found.get("attention", ""))
    record = CellRecord(context.key(cell), cell, found["status"], found.get("error", ""),
                        context.metric, origin=origin)  # fmt: skip
    if found["status"] != "done":
        return record
    selected = context.score(select, found["logits"]["select"]).metrics
    best = (min if lower_is_better(context.metric) else max)(scores)
    if not math.isclose(selected[context.metric], best, abs_tol=CLOSE):
        text = f"the best checkpoint scored {best:.4f}, and {selected[context.metric]:.4f} loaded"
        return replace(record, status="failed", error=text)
    return replace(
        record,
        selected=selected,
        costs=Costs(backbone=context.backbone_size, **found["costs"]),
        **tested(cell, context, found["logits"]),
    )


def tested(cell: Cell, context: PeerContext, logits: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a final run: its metrics on test and training rows, and predictions."""
    if cell.stage != "final":
        return {}
    data = context.data
    trained = context.score(fitted(data.of(cell.rows, cell.seed).train), logits["trained"])
    found = context.score(data.test, logits["tested"])
    return {
        "tested": found.metrics,
        "trained": trained.metrics,
        "rows": rows_of(context, found.predictions),
    }


def rows_of(context: PeerContext, predictions: list[Prediction]) -> PredictedRows | None:
    """Return the predictions on the test rows without their texts."""
    run = context.data.run
    file = outcomes_of(run.task, context.data.test, predictions, run.labels, 0)
    return predicted_rows(file.kind, file.rows) if file else None


def origin_of(context: PeerContext, cell: Cell, attention: str) -> dict[str, Any]:
    """Say where a record comes from; data and backbone as in the records of our runs."""
    hello = context.workers[cell.method].hello
    recipe = {k: v for k, v in to_dict(context.recipe).items() if k not in ("output", "data")}
    peer = {"dtype": hello["settings"]["dtype"], "attention": attention, "quantize": None}
    return {
        "recipe": {**recipe, **peer, "method": context.specs[cell.method]},
        "trainer": {**hello["settings"], **context.options(cell)},
        "data": context.data.digests,
        "backbone": context.backbone,
        "device": hello["device"],
        "versions": hello["versions"],
    }


def plan_peers(
    planned: PlannedStudy, peers: Sequence[PeerMethod], workers: dict[str, Worker]
) -> PlannedStudy:
    """Plan the runs of peers: in place of our methods, with all else of the study.

    Args:
        planned: the study.
        peers: the methods.
        workers: by library, what trains them.
    """
    contexts: dict[str, TaskContext] = {}
    for name, context in planned.contexts.items():
        check_task(context)
        anatomy = backbone_of(context)
        contexts[name] = PeerContext(
            context.recipe,
            context.data,
            {peer.label: peer.configuration(anatomy) for peer in peers},
            context.backbone,
            workers={peer.label: workers[peer.library] for peer in peers},
            backbone_size=sum(parameter.numel() for parameter in anatomy.parameters().values()),
        )
    places = dict.fromkeys((g.task, g.rows, g.steps) for g in planned.groups)
    groups = tuple(
        Group(task, peer.label, rows, steps, peer.method.learning_rate)
        for task, rows, steps in places
        for peer in peers
    )
    return PlannedStudy(planned.study, contexts, groups, planned.notes)


def backbone_of(context: TaskContext) -> Anatomy:
    """Return the anatomy of a task's backbone."""
    recipe, run = context.recipe, context.data.run
    return anatomy_of(meta_model(recipe.backbone, task=run.task.head, revision=recipe.revision))


def check_task(context: TaskContext) -> None:
    """Refuse what peers do not train: other tasks, quantized backbones, new tokens."""
    recipe, task = context.recipe, context.data.run.task
    offenders = [] if isinstance(task, OfTexts) else [f"task: {task.name}"]
    offenders += ["task: class_weights"] if getattr(task, "class_weights", None) else []
    offenders += [name for name in ("quantize", "new_tokens") if getattr(recipe, name)]
    if offenders:
        raise ConfigError("peers train classification and regression alone", offenders=offenders)


def print_sizes(planned: PlannedStudy, peers: Sequence[PeerMethod]) -> None:
    """Print the trained parameters of each peer's method and of ours."""
    context = next(iter(planned.contexts.values()))
    assert isinstance(context, PeerContext)
    anatomy = backbone_of(context)
    folder = str(find_backbone(context.recipe.backbone, context.recipe.revision)[0])
    print(f"{'peer':24}{'trained':>12}{'head':>10}   {'ours':18}{'trained':>12}  difference")
    for peer in peers:
        job = {"do": "count", "folder": folder, "config": context.specs[peer.label], "classes": 2}
        found = context.workers[peer.label].ask(job)
        ours = peer.method.count(anatomy)
        theirs = f"{peer.label:24}{found['trained']:12,}{found['head']:10,}"
        print(f"{theirs}   {peer.ours:18}{ours:12,}  {peer.differs}".rstrip(), flush=True)


def of_tasks(study: Study, names: Sequence[str] | None) -> Study:
    """Return a study of some of its tasks."""
    if names is None:
        return study
    if missing := [name for name in names if name not in study.bench.tasks]:
        raise SystemExit(f"--tasks {','.join(missing)}: one of {', '.join(study.bench.tasks)}")
    tasks = {name: study.bench.tasks[name] for name in names}
    return replace(study, bench=replace(study.bench, tasks=tasks))


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser.add_argument("study", nargs="?", help="the study; default: that in DIR")
    parser.add_argument("--output", metavar="DIR", required=True)
    parser.add_argument("--tasks", type=names, metavar="NAME,NAME", help="default: all")
    for library in ("peft", "trainer", "adapters"):
        parser.add_argument(f"--{library}", type=names, metavar="NAME,NAME", help="'': none")
    parser.add_argument("--python", help="of the environment with adapters")
    parser.add_argument("--sizes", action="store_true", help="print numbers of parameters, and end")
    found = parser.parse_args()
    if found.adapters and not found.python:
        parser.error("--adapters needs --python, of the environment that has it")
    return found


def main() -> None:
    """Train what is missing of the peers' runs."""
    given = options()
    output = Path(given.output)
    study = read_study(given.study or output / STUDY, flags={"output": str(output)})
    peers = [*named("peft", given.peft), *named("transformers", given.trainer)]
    peers += named("adapters", given.adapters) if given.python else []
    work = output / WORK
    workers = {
        library: Worker(library, python, work / f"{library}.log")
        for library, python in (("peft", sys.executable), ("transformers", sys.executable),
                                ("adapters", given.python or ""))
    }  # fmt: skip
    planned = plan_study(of_tasks(study, given.tasks), SharedLoader(), work)
    try:
        plan = plan_peers(planned, peers, workers)
        if given.sizes:
            print_sizes(plan, peers)
            return
        keep(planned.study, study, peers, output)
        conduct(plan, output)
    finally:
        for worker in workers.values():
            worker.close()


def keep(planned: Study, study: Study, peers: Sequence[PeerMethod], output: Path) -> None:
    """Name the peers in the study of the folder, which has all its tasks."""
    recorded = tuple(peer.label for peer in peers)
    bench = replace(planned.bench, tasks=study.bench.tasks, recorded=recorded)
    keep_study(replace(planned, bench=bench), output)


def conduct(plan: PlannedStudy, output: Path) -> None:
    """Run what has no record yet."""
    contexts = {n: c for n, c in plan.contexts.items() if isinstance(c, PeerContext)}

    def done(record: CellRecord, left: int) -> None:
        score = (record.tested or record.selected).get(record.metric, math.nan)
        found = f"{record.metric} {score:.4f}" if record.status == "done" else record.error
        seconds = f"{record.costs.seconds:.1f} s, {left} left"
        print(f"{record.cell.describe()}: {found}  ({seconds})", flush=True)

    run_study(plan, RecordFolder(output / RECORDS), PeerEngine(contexts, output / WORK), done)
    print(f"adapterhub report {output}")


if __name__ == "__main__":
    main()
