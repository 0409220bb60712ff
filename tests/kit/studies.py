"""Studies for tests: planned in a folder, and with a known truth."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri

from adapterhub.bench.cells import Cell
from adapterhub.bench.conduct import LocalEngine
from adapterhub.bench.plan import PlannedStudy, plan_study
from adapterhub.bench.records import CellRecord, Costs, PredictedRows, RecordFolder
from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.bench.study import RECORDS, Study
from adapterhub.pages.row_scores import row_score
from adapterhub.training.loading import SharedLoader

# Studies for tests: planned in a folder, and what of their records is equal anywhere.


def planned(study: Study, tmp_path: Path) -> tuple[PlannedStudy, RecordFolder, LocalEngine]:
    loader = SharedLoader()
    work = tmp_path / "study" / "work"
    plan = plan_study(study, loader, work)
    folder = RecordFolder(tmp_path / "study" / RECORDS)
    return plan, folder, LocalEngine(plan.contexts, loader, work)


def facts(record: CellRecord) -> object:
    """Return what does not depend on time and place."""
    known = (record.selected, record.tested, record.trained, record.rows)
    return record.key, record.cell, record.status, *known


def made_records(
    study: Study, accuracy: dict[str, float], test_rows: int = 200, rows: int = 100
) -> list[CellRecord]:
    """Make the records of a study without training: two classes, four trials, some seeds.

    Args:
        study: the study.
        accuracy: the accuracy of each method, about; NaN for one whose runs diverge.
        test_rows: the number of test rows.
        rows: the number of training rows.
    """
    found = []
    for task in study.tasks():
        for number, (method, value) in enumerate(accuracy.items()):
            group = (task, method, rows)
            trials = [Cell(*group, 20, rate, 0, "search") for rate in (1e-4, 1e-3, 1e-2)]
            trials += [Cell(*group, 80, rate, 0, "search") for rate in (1e-3, 1e-2)]
            finals = [Cell(*group, 80, 1e-3, seed, "final") for seed in (1, 2, 3)]
            dead = value != value  # NaN
            cells = trials if dead else [*trials, *finals]
            found += [made_record(cell, number, value, test_rows) for cell in cells]
    return found


def made_record(cell: Cell, number: int, accuracy: float, test_rows: int) -> CellRecord:
    """Make one record.

    Args:
        cell: its cell.
        number: of the method, which decides its costs.
        accuracy: its accuracy, about; NaN if it diverged.
        test_rows: the number of test rows.
    """
    key = hashlib.sha256(repr(cell).encode()).hexdigest()[:32]
    origin = {"data": {"train": "a" * 64, "test": "b" * 64}, "backbone": "c" * 64,
              "device": "cpu", "versions": {"torch": "2"}, "recipe": {"dtype": "fp32"}}  # fmt: skip
    if accuracy != accuracy:  # NaN
        return CellRecord(key, cell, "diverged", error="the loss is nan", metric="accuracy",
                          origin=origin)  # fmt: skip
    random = np.random.default_rng([cell.seed, number, int(1e6 * cell.rate)])
    label = ["pos" if row % 3 else "neg" for row in range(test_rows)]
    right = random.random(test_rows) < accuracy
    other = {"pos": "neg", "neg": "pos"}
    given = [one if r else other[one] for one, r in zip(label, right, strict=True)]
    columns = {"label": label, "prediction": given, "score": [0.9] * test_rows}
    scores = {"accuracy": float(right.mean())}
    costs = Costs(
        trained=1000 * 10**number, head=10, backbone=10**7, file_bytes=5000, seconds=9.0,
        train_seconds=4.0 + number, peak_memory=10**9 + 10**8 * number,
    )  # fmt: skip
    made = CellRecord(
        key, cell, "done", metric="accuracy", selected=scores, costs=costs, origin=origin
    )
    if cell.stage != "final":
        return made
    rows = PredictedRows("classes", columns)
    return replace(made, trained={"accuracy": 0.95}, tested=scores, rows=rows)


# Studies with a known truth: rows that are hard for every method, seed effects, and noise.
#
# The latent score of method m, seed s on row k is normal:
#
#     mean of m + seed effect (m, s) + difficulty (k) + taste (m, k) + noise (m, s, k)
#
# By default, difficulty, taste and noise have 60, 15 and 25 % of the variance within a seed.


PREDICTIONS = {"accuracy": "classes", "f1": "spans", "pearson": "numbers", "loss": "losses"}
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(40)


@dataclass(frozen=True)
class Truth:
    """A study: its size, and its methods.

    Attributes:
        kind: one of `PREDICTIONS`.
        levels: the level of each method: its share of right rows, its correlation or its loss.
        rows: the number of test rows.
        seeds: the seeds of each method.
        sd: the standard deviation of a level over seeds, in hundredths; repeated over the methods.
        shares: the shares of difficulty, taste and noise in the variance within a seed.
    """

    kind: str
    levels: tuple[float, ...]
    rows: int = 500
    seeds: int = 3
    sd: tuple[float, ...] = (1.0,)
    shares: tuple[float, float, float] = (0.60, 0.15, 0.25)

    @property
    def spread(self) -> np.ndarray:
        """The standard deviation of each method's level over seeds."""
        return np.resize(self.sd, len(self.levels)) / 100

    @property
    def latent(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the standard deviation over seeds that have these shares of right rows."""
        z = ndtri(self.levels)
        spread = self.spread * np.sqrt(2 * np.pi) * np.exp(z**2 / 2)
        return z * np.sqrt(1 + spread**2), spread

    def values(self) -> np.ndarray:
        """Return each method's mean score over all seeds, on all rows."""
        if self.kind != "f1":
            return np.array(self.levels)
        mean, spread = self.latent
        right = ndtr(mean[:, None] + spread[:, None] * _NODES)
        return (2 * right / (1 + right + (1 - right) / 2)) @ _WEIGHTS / _WEIGHTS.sum()

    def study(self, random: np.random.Generator) -> list[RepeatedRuns]:
        """Draw a study."""
        score, columns = row_score(PREDICTIONS[self.kind]), _DRAW[self.kind](self, random)
        return [RepeatedRuns(f"m{i}", score, tuple(each)) for i, each in enumerate(columns)]


def equal(kind: str, level: float, methods: int = 8, **size: object) -> Truth:
    """Make a study of equal methods."""
    return Truth(kind, (level,) * methods, **size)


def with_better(truth: Truth, by: float) -> Truth:
    """Raise the level of the last method."""
    return replace(truth, levels=(*truth.levels[:-1], truth.levels[-1] + by))


def _noise(truth: Truth, random: np.random.Generator) -> np.ndarray:
    """Draw difficulty, taste and noise, (methods, seeds, rows)."""
    methods, seeds, rows = len(truth.levels), truth.seeds, truth.rows
    sizes = (1, 1, rows), (methods, 1, rows), (methods, seeds, rows)
    parts = zip(truth.shares, sizes, strict=True)
    return sum(np.sqrt(share) * random.normal(size=size) for share, size in parts)


def _effects(truth: Truth, random: np.random.Generator, spread: np.ndarray) -> np.ndarray:
    """Draw the effect of each seed, (methods, seeds, 1)."""
    return random.normal(size=(len(truth.levels), truth.seeds, 1)) * spread[:, None, None]


def _right(truth: Truth, random: np.random.Generator) -> np.ndarray:
    mean, spread = truth.latent
    level = mean[:, None, None] + _effects(truth, random, spread)
    return (level + _noise(truth, random) > 0).astype(float)


def _accuracy(truth: Truth, random: np.random.Generator) -> np.ndarray:
    right = _right(truth, random)
    return np.stack([right, np.ones_like(right)], axis=-1)


def _f1(truth: Truth, random: np.random.Generator) -> np.ndarray:
    """Give each row one to three entities; of those not found, half are predicted wrongly."""
    right = _right(truth, random)
    support = np.broadcast_to(random.integers(1, 4, size=truth.rows), right.shape)
    wrong = (1 - right) * support * random.integers(2, size=right.shape)
    return np.stack([right * support, right * support + wrong, support], axis=-1)


def _pearson(truth: Truth, random: np.random.Generator) -> np.ndarray:
    level = np.array(truth.levels)[:, None, None] + _effects(truth, random, truth.spread)
    level = np.clip(level, -1, 1)
    noise = _noise(truth, random)
    x = np.broadcast_to(random.normal(size=truth.rows), noise.shape)
    y = level * x + np.sqrt(1 - level**2) * noise
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=-1)


def _loss(truth: Truth, random: np.random.Generator) -> np.ndarray:
    """Weight the skewed losses of the rows by their tokens."""
    level = np.array(truth.levels)[:, None, None] + _effects(truth, random, truth.spread)
    loss = level * np.exp(0.5 * _noise(truth, random) - 0.125)
    tokens = np.broadcast_to(random.integers(5, 60, size=truth.rows), loss.shape)
    return np.stack([loss * tokens, tokens], axis=-1)


_DRAW = {"accuracy": _accuracy, "f1": _f1, "pearson": _pearson, "loss": _loss}


def runs_of(right, **options):
    """Make the runs of a method from which rows each seed has right, (seeds, rows)."""
    right = np.asarray(right, dtype=float)
    columns = tuple(np.stack([r, np.ones_like(r)], axis=1) for r in right)
    return RepeatedRuns(options.pop("method", "m"), row_score("classes"), columns, **options)
