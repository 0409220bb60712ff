"""Runs of training: of a network that learns in milliseconds, and folders without a training."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from adapterhub.inference.open import AdapterSource
from adapterhub.inference.table_job import TableJob
from adapterhub.loop import checkpoint
from adapterhub.loop.engine import Engine, LazyBatches, batch_order
from adapterhub.loop.loop import TrainingResult, TrainingSession, train
from adapterhub.loop.report import Reporter, TrainingLine, reporter_for
from adapterhub.pages.row_scores import PREDICTIONS, PredictionFile
from adapterhub.recipe.recipe import Recipe, RunOptions, read
from adapterhub.tasks.common.batches import Division, dividing
from adapterhub.training.run import run
from tests.kit.data import sentences, write_tsv

# Runs of the training loop on a tiny network that learns in milliseconds, for several tests.


torch.set_num_threads(1)

EXAMPLES, BATCH = 30, 4
OPTIONS = RunOptions(
    epochs=2, batch_size=BATCH, gradient_accumulation=3, log_every=2, tensorboard=False
)
ACCURACIES = (0.5, 0.9, 0.7, 0.6, 0.8, 0.4)


class Net(nn.Module):
    """Two layers and dropout, so that the random state matters."""

    body: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.body(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Learner:
    """A trainee whose parameters all train."""

    def __init__(self, model: nn.Module | None = None, lr: float = 0.01) -> None:
        self.model = Net() if model is None else model
        self.lr = lr

    def param_groups(self, options: RunOptions) -> list[dict[str, Any]]:
        params = [p for p in self.model.parameters() if p.requires_grad]
        return [{"name": "all", "lr": options.learning_rate or self.lr, "params": params}]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    staged = False

    def enter(self, epoch: int, improved: Sequence[bool], done: float) -> bool:
        return False

    by_share = ""

    def penalty(self) -> torch.Tensor | None:
        return None

    def stepped(self, done: float) -> None:
        pass

    def ready(self, done: float) -> bool:
        return True

    def train_mode(self, dropout: bool) -> None:
        self.model.train()


class Data:
    """A separable task that counts collated batches and calls `event` before each one."""

    def __init__(self, event: Callable[[], None] = lambda: None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(EXAMPLES, 6, generator=generator)
        self.labels = (self.x[:, 0] + self.x[:, 1] > 0).long()
        self.event = event
        self.collated = 0
        self.epochs: list[int] = []

    def __call__(self, epoch: int) -> LazyBatches:
        self.epochs.append(epoch)
        return LazyBatches(batch_order([1] * EXAMPLES, BATCH, epoch, 5, True), self.collate)

    def collate(self, indices: list[int]) -> dict[str, torch.Tensor]:
        self.event()
        self.collated += 1
        return {"x": self.x[indices], "labels": self.labels[indices]}

    def score(self, model: nn.Module) -> dict[str, float]:
        self.event()
        assert not model.training
        assert not torch.is_grad_enabled()
        out = model(x=self.x, labels=self.labels)
        right = (out.logits.argmax(-1) == self.labels).float().mean()
        return {"accuracy": float(right), "loss": float(out.loss)}


def fit(
    output: Path,
    options: RunOptions = OPTIONS,
    *,
    trainee: Learner | None = None,
    data: Data | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    resume: bool = False,
    metric: str = "loss",
    reporter: Reporter | None = None,
    evaluation: bool = True,
) -> TrainingResult:
    """Train the tiny network, with or without evaluation."""
    trainee, data = trainee or Learner(), data or Data()
    session = TrainingSession(
        Engine(trainee, options),
        data,
        (evaluate or (lambda: data.score(trainee.model))) if evaluation else None,
        output=output,
        seed=3,
        main_metric=metric,
        resume=resume,
        run={"recipe": {"rank": 8}, "data": "abc"},
        reporter=reporter or reporter_for(output, options, quiet=True),
    )
    return train(session)


def scores(values: tuple[float, ...] = ACCURACIES) -> Callable[[], Mapping[str, float]]:
    """An evaluation that returns these accuracies, one per call."""
    left = iter(values)
    return lambda: {"accuracy": next(left)}


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The bytes of each tensor."""
    return {name: t.detach().numpy().tobytes() for name, t in tensors.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def final_bytes(output: Path) -> tuple[bytes, ...]:
    """The files that two equal runs share to the byte: tensors, and records without wall times.

    The adapter has the name of its folder, which two runs do not share.
    """
    last, best = (output / "checkpoints" / name for name in ("last", "best"))
    progress = json.loads((best / "progress.json").read_bytes())
    del progress["files"], progress["sha256"]  # digests of the card, the manifest and the record
    records = [progress]
    tensors = [folder / "tensors.safetensors" for folder in (last, best)]
    if (best / "adapter").exists():  # that of a sharded run is not in one place
        tensors += [folder / "adapter/adapter.safetensors" for folder in (last, best)]
        manifest = json.loads((best / "adapter/adapter.json").read_bytes())
        del manifest["name"], manifest["sha256"]
        records.append(manifest)
    return (
        *(path.read_bytes() for path in tensors),
        *(json.dumps(record).encode() for record in records),
        (output / "metrics.jsonl").read_bytes(),
    )


def adapter_bytes(output: Path | str) -> bytes:
    """Return the tensors of a finished run."""
    return (Path(output) / "adapter" / "adapter.safetensors").read_bytes()


# Processes that are killed.


def quiet(recipe: Recipe) -> Reporter:
    """Return the reporter that writes the records of a run and prints nothing."""
    return reporter_for(Path(recipe.output), recipe.train, quiet=True)


def killed(work: Callable[[], object]) -> None:
    """Do something in a fork, and check that this fork was killed meanwhile."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def forks(test: Callable[..., None]) -> Any:
    """Mark a test that forks this process."""
    test = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")(test)
    return pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")(test)


class Ticks:
    """Send this process a signal at the n-th event: a batch, an evaluation, a file operation."""

    def __init__(self, at: int, number: int = signal.SIGKILL) -> None:
        self.at, self.number, self.count = at, number, 0

    def __call__(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), self.number)
        self.count += 1

    def watch_files(self, patch: pytest.MonkeyPatch) -> None:
        watched = (os, "fsync"), (os, "replace"), (checkpoint, "put_in_place"), (shutil, "rmtree")
        for owner, name in watched:
            patch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self()
            return function(*args, **options)

        return called


# Run folders without a training: metrics, timings, predictions, and an adapter on request.


TEXT = "a good movie"
# One grey pixel.
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81yt"
    "gAAAABJRU5ErkJggg=="
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "classes": [
        {"label": "pos", "prediction": "pos", "score": 0.9},
        {"label": "pos", "prediction": "neg", "score": 0.8},
        {"label": "neg", "prediction": "neg", "score": 0.6},
        {"label": "neg", "prediction": "neg", "score": 1.0},
    ],
    "choices": [
        {"label": "one", "prediction": "one", "score": 0.9, "right": True},
        {"label": "two", "prediction": "one", "score": 0.7, "right": False},
    ],
    "numbers": [{"label": float(i), "prediction": i + 0.5 * (i % 2)} for i in range(5)],
    "spans": [
        {"label": [["per", 0, 1], ["loc", 2, 6]], "prediction": [["loc", 2, 6]]},
        {"label": [["per", 2, 6]], "prediction": [["loc", 2, 6]]},
        {"label": [], "prediction": []},
    ],
    "sets": [
        {"label": ["a", "b"], "prediction": ["a"], "scores": {"a": 0.9, "b": 0.4}},
        {"label": ["b"], "prediction": ["b"], "scores": {"a": 0.1, "b": 0.8}},
        {"label": [], "prediction": [], "scores": {"a": 0.2, "b": 0.3}},
    ],
    "texts": [
        {"label": "good", "prediction": "good", "score": 1.0},
        {"label": "good", "prediction": "", "score": 0.0},
    ],
    "images": [{"loss": 0.5 + i, "picture": PNG if i else ""} for i in range(3)],
    "losses": [{"loss": 0.5 + i, "tokens": i} for i in range(3)],
}


def predictions(
    kind: str, rows: list[dict[str, Any]] | None = None, data: str = "d"
) -> PredictionFile:
    """Make a predictions file of a kind."""
    full = [{"id": i, "texts": [TEXT], **row} for i, row in enumerate(rows or ROWS[kind])]
    metric = "accuracy" if kind in ("classes", "choices") else "loss"
    labels = ("neg", "pos") if kind == "classes" else ()
    return PredictionFile(kind, "classification", 4, data, metric, labels, full)


def run_folder(folder: Path, file: PredictionFile | None = None, **lines: str) -> Path:
    """Write the files of a run of four steps; `lines` replaces the metrics' and rates' names."""
    folder.mkdir(parents=True, exist_ok=True)
    metric, rate = lines.get("metric", "accuracy"), lines.get("rate", "lora")
    metrics: list[dict[str, Any]] = []
    timings = []
    for step in (2, 4):
        rates = {rate: 1e-3 / step, "head": 5e-3}
        base = {"step": step, "epoch": step / 2}
        scores = {metric: 0.1 * step, "loss": 1 / step}
        metrics.append({"event": "train", **base, "loss": 1 / step, "learning_rate": rates})
        metrics.append({"event": "eval", **base, "metrics": scores, "best": True})
        clock = {"seconds": 1.5 * step, "examples_per_second": 10.0, "peak_memory": 10**9}
        timings += [{"event": event, "step": step, **clock} for event in ("train", "eval")]
    for name, records in (("metrics", metrics), ("timings", timings)):
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    if file:
        (folder / PREDICTIONS).write_bytes(file.to_bytes())
    return folder


# Two adapters of one backbone with different labels, and Parquet files whose rows name them.


TABLE_ROWS = 46
LABELS: dict[str, Callable[[str, str], str]] = {
    "mood": lambda text, label: label,
    "thing": lambda text, label: text.split()[1],
}


def train_two(backbone: Path, folder: Path) -> dict[str, AdapterSource]:
    """Train an adapter for the class of a sentence and one for its second word; return both."""
    found = {}
    for name, label_of in LABELS.items():
        rows = [(text, label_of(text, label)) for text, label in sentences(48)]
        file = write_tsv(folder / f"{name}.tsv", rows)
        words = ["method=lora(rank=2)", "train.max_steps=12", "train.report=false"]
        words += ["train.learning_rate=5e-3", "train.tensorboard=false"]
        flags: dict[str, Any] = {"backbone": str(backbone), "output": str(folder / name)}
        flags["data"] = {"train": str(file), "eval": "none"}
        run(read(None, words, flags), Reporter())
        found[name] = AdapterSource(str(folder / name))
    return found


def write_table(folder: Path, group: int = 5) -> str:
    """Write two files of sentences with the adapter of each row; return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for text, _ in sentences(TABLE_ROWS)]
    names = [("mood", "thing", "thing")[number % 3] for number in range(TABLE_ROWS)]
    table = pa.table({"id": list(range(TABLE_ROWS)), "text": texts, "adapter": names})
    pq.write_table(table.slice(0, 20), folder / "a.parquet", row_group_size=group)
    pq.write_table(table.slice(20), folder / "b.parquet", row_group_size=group)
    return str(folder / "*.parquet")


def routed(sources: dict[str, AdapterSource], source: str) -> TableJob:
    """Return a job in which a column names the adapters."""
    return TableJob(source, sources, route="adapter")


# Threads in place of the processes that divide batches.


def in_processes(count, compute, *, in_step=False):
    """Return what `compute` returns in each of several threads, which divide batches."""
    given, all_here = [None] * count, threading.Barrier(count, timeout=60)

    def gather(index, value):
        given[index] = value
        all_here.wait()
        every = list(given)
        all_here.wait()  # nobody gives something new before all have read
        return every

    def of(index):
        division = Division(index, count, lambda value: gather(index, value), in_step)
        with dividing(division):
            return compute()

    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(of, range(count))]


class Notes(Reporter):
    """Keeps the notes and losses of a run; may interrupt it after a step, or send it a signal."""

    def __init__(self, stop_after: int | None = None, number: int | None = None) -> None:
        self.notes: list[str] = []
        self.losses: list[float] = []
        self.stop_after, self.number = stop_after, number

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trained(self, line: TrainingLine, timing: Any) -> None:
        self.losses.append(line.loss)

    def advance(self, step: int) -> None:
        if step - 1 == self.stop_after:
            if self.number is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), self.number)

    def about(self, *texts: str) -> list[str]:
        """Return the notes with any of the texts."""
        return [note for note in self.notes if any(text in note for text in texts)]


def changed(recipe: Recipe, output: str, method: str = "head", **train: Any) -> Recipe:
    """Return a recipe with another folder beside its own, method and training options."""
    folder = Path(recipe.output).with_name(output)
    options = replace(recipe.train, **train)
    return replace(recipe, output=str(folder), method=method, train=options)
