"""How far a run is: saved with every checkpoint, so that a resumed run continues exactly there."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunProgress:
    """How far a run is. `batch` is the next micro-batch of `epoch`.

    `losses` are those since the last report, `stale` counts the evaluations since the best one, and
    `history` has the metrics of each evaluation with "step" and "epoch". `peak_memory` is in bytes.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best_step: int | None = None
    stale: int = 0
    finished: bool = False
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    examples: int = 0
    train_seconds: float = 0.0
    other_seconds: float = 0.0
    peak_memory: int = 0
    tokens: int = 0

    def advance(self, next_batch: int, batches: int) -> bool:
        """Count one optimizer step.

        Args:
            next_batch: the micro-batch of the epoch that comes next.
            batches: the number of micro-batches per epoch.

        Returns:
            Whether the epoch has ended.
        """
        ended = next_batch == batches
        self.step += 1
        self.epoch += ended
        self.batch = 0 if ended else next_batch
        return ended

    def evaluation(self, step: int | None) -> dict[str, float]:
        """Return the record of the evaluation at `step`."""
        return next(record for record in self.history if record["step"] == step)

    def metrics(self, step: int | None) -> dict[str, float]:
        """Return the metrics of the evaluation at `step`, or {} if `step` is None."""
        record = {} if step is None else self.evaluation(step)
        return {name: value for name, value in record.items() if name not in ("step", "epoch")}

    @property
    def seconds(self) -> float:
        """The time of all work, over all sessions of the run."""
        return self.train_seconds + self.other_seconds
