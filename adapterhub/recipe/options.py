"""The options of a training run, and those that follow from the data where they are left open.

Few rows need many passes, or the adapter is still near its start; many rows need few. What was
measured, and on what, is in docs/guides/defaults.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import Method
from adapterhub.recipe.schedules import DEFAULT

Init: TypeAlias = Literal["eva", "eva-ranks", "lora-ga", "corda", "loftq"]


@dataclass(frozen=True)
class TrainOptions:
    """How to train. What is none by default follows from the data and the method.

    Raises:
        ConfigError: some values are out of range; all of them are listed.
    """

    epochs: int | None = option(
        None,
        "passes over the training data (null: by the number of rows: docs/guides/defaults.md)",
        resumed="length",
    )
    max_steps: int | None = option(
        None, "exact number of optimizer steps, instead of epochs", resumed="length"
    )
    batch_size: int | None = option(
        None, "examples in a forward pass (null: 8 to 32, by the rows)", resumed="recorded"
    )
    eval_batch_size: int = option(
        64, "most examples in one forward pass when evaluating", resumed="same"
    )
    gradient_accumulation: int = option(1, "forward passes per optimizer step", resumed="same")
    optimizer: Literal["adamw", "adamw-8bit", "paged-adamw-8bit", "riemannian"] = option(
        "adamw",
        "adamw, a variant with 8-bit state (needs bitsandbytes), or riemannian, for the factors "
        "of a LoRA",
        resumed="fixed",
    )
    learning_rate: float | None = option(
        None, "peak learning rate (null: the method's default)", resumed="recorded"
    )
    head_learning_rate: float | None = option(
        None,
        "peak learning rate of the task head (null: 5e-3; alone, learning_rate)",
        resumed="recorded",
    )
    weight_decay: float = option(
        0.01, "AdamW weight decay; 1-D parameters are never decayed", resumed="recorded"
    )
    beta1: float = option(0.9, "AdamW decay rate of the first moment", resumed="recorded")
    beta2: float = option(0.999, "AdamW decay rate of the second moment", resumed="recorded")
    eps: float = option(1e-8, "AdamW term that avoids division by zero", resumed="recorded")
    max_grad_norm: float = option(
        1.0, "clip the gradient norm to this value (0: no clipping)", resumed="recorded"
    )
    schedule: Literal["linear", "cosine", "slanted", "constant"] | None = option(
        None,
        "learning-rate schedule after the warm-up (null: the method's default, else linear)",
        resumed="recorded",
    )
    init: Init | None = option(
        None,
        "start from the training data, see docs/guides/defaults.md: eva (any LoRA), eva-ranks "
        "(which divides the ranks anew), lora-ga or corda; loftq: from what quantization changed "
        "(null: the method's default)",
        resumed="fixed",
    )
    warmup: float | None = option(
        None,
        "warm-up: a fraction of all steps if below 1, else steps (null: 0.06, slanted 0.1)",
        resumed="length",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = option(
        "no", "precision of the computation; trained parameters stay in fp32", resumed="recorded"
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, more time", resumed="same"
    )
    offload_activations: bool = option(
        False,
        "keep the inputs of recomputed layers in the memory of the host, not of the GPU",
        resumed="same",
    )
    compile: bool = option(
        False,
        "compile the layers of the backbone with torch.compile: worth it in long runs",
        resumed="recorded",
    )
    liger: bool = option(
        False,
        "compute norms, gated layers and rotations by Liger's kernels, on a GPU",
        resumed="recorded",
    )
    eval_every: Literal["epoch"] | int | None = option(
        None,
        "evaluate every epoch or every N steps (null: five to ten times in the run)",
        resumed="recorded",
    )
    best_metric: str | None = option(
        None,
        "metric that selects the best checkpoint (null: the main metric of the task)",
        resumed="fixed",
    )
    patience: int | None = option(
        None,
        "stop after this many evaluations in a row without improvement (null: never)",
        resumed="recorded",
    )
    length_grouped: bool = option(
        True, "batch examples of similar length: less padding", resumed="recorded"
    )
    max_length: int | None = option(
        None,
        "longest input, in tokens; longer ones are truncated (null: that of the data and at least "
        "128, at most what the backbone reads and 512, 1024 for causal-lm)",
        resumed="recorded",
    )
    save_every: int | None = option(
        None, "save a checkpoint every N steps (null: at each evaluation)", resumed="same"
    )
    log_every: int = option(10, "report the loss every N steps", resumed="same")
    tensorboard: bool = option(
        True, "write TensorBoard events, if TensorBoard is installed", resumed="same"
    )
    report: bool = option(
        True, "write report.html and the predictions it shows, predictions.jsonl", resumed="same"
    )
    tracker: tuple[str, ...] = option(
        (),
        "experiment trackers that get loss and metrics: wandb, mlflow, trackio, ...",
        resumed="same",
    )
    dropout: bool = option(
        False, "train with the dropout of the frozen backbone", resumed="recorded"
    )
    frozen_cache: Literal["memory", "off"] | None = option(
        None,
        "where the outputs of frozen lower layers are kept, so that they are computed once (null: "
        "in memory if they fit)",
        resumed="same",
    )
    frozen_cache_gb: float | None = option(
        None,
        "the most that frozen_cache takes, in GB (null: a quarter of the memory)",
        resumed="same",
    )

    shard: bool | None = option(
        None,
        "divide the parameters over the processes, FSDP2: docs/guides/fsdp.md (null: as the "
        "launcher says)",
        resumed="same",
    )
    tensor_parallel: bool = option(
        False,
        "let all processes compute each example together: docs/guides/fsdp.md",
        resumed="same",
    )

    def __post_init__(self) -> None:
        offenders = [*self._bad_counts(), *self._bad_values()]
        if offenders:
            raise ConfigError(
                "these training options are out of range",
                offenders=offenders,
                hint="correct them in the recipe, or pass train.NAME=VALUE on the command line",
            )

    def _bad_counts(self) -> list[str]:
        names = (
            "epochs", "max_steps", "batch_size", "eval_batch_size", "gradient_accumulation",
            "patience", "max_length", "save_every", "log_every",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return [
            f"{name}: {value} (a whole number from 1)"
            for name, value in values.items()
            if value is not None and value < 1
        ]

    def _bad_values(self) -> list[str]:
        every, lr, head = self.eval_every, self.learning_rate, self.head_learning_rate
        checks = (
            ("learning_rate", lr is None or lr > 0, "more than 0"),
            ("head_learning_rate", head is None or head > 0, "more than 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("beta1", 0 <= self.beta1 < 1, "at least 0, below 1"),
            ("beta2", 0 <= self.beta2 < 1, "at least 0, below 1"),
            ("eps", self.eps > 0, "more than 0"),
            ("max_grad_norm", self.max_grad_norm >= 0, "at least 0"),
            ("frozen_cache_gb", self.frozen_cache_gb is None or self.frozen_cache_gb > 0,
             "more than 0"),
            ("offload_activations", self.gradient_checkpointing or not self.offload_activations,
             "only with gradient_checkpointing=true"),
            ("warmup", self.warmup is None or self.warmup >= 0, "at least 0"),
            ("eval_every", every in (None, "epoch") or (isinstance(every, int) and every >= 1),
             "'epoch' or a whole number of steps from 1"),
        )  # fmt: skip
        return [f"{name}: {getattr(self, name)!r} ({why})" for name, ok, why in checks if not ok]


@dataclass(frozen=True)
class RunOptions(TrainOptions):
    """The options of one run: what depends on the data is chosen."""

    epochs: int = 3
    batch_size: int = 16
    max_length: int = 128
    eval_every: Literal["epoch"] | int = "epoch"


_MOST_EVALUATIONS = 10
_EVALUATIONS_OF_LONG_RUNS = 5
_LONG = 1_000  # steps: of a longer run, one evaluation per epoch may be too few


@dataclass(frozen=True)
class RowsDefault:
    """What suits data with up to `rows` rows: at least as many steps, and epochs."""

    rows: float
    batch_size: int
    steps: int
    epochs: int


TABLE = (
    RowsDefault(rows=100, batch_size=16, steps=150, epochs=3),
    RowsDefault(rows=1_000, batch_size=16, steps=250, epochs=3),
    RowsDefault(rows=20_000, batch_size=32, steps=250, epochs=3),
    RowsDefault(rows=100_000, batch_size=32, steps=250, epochs=2),
    RowsDefault(rows=math.inf, batch_size=32, steps=250, epochs=1),
)


def run_options(
    options: TrainOptions, methods: Sequence[Method], rows: int, least_epochs: int = 1
) -> RunOptions:
    """Choose what the user left open, for so many rows an epoch.

    The schedule is that of the methods; their stages need `least_epochs`.
    """
    default = next(entry for entry in TABLE if rows <= entry.rows)
    batch_size = options.batch_size or default.batch_size
    steps = steps_per_epoch(rows, batch_size, options.gradient_accumulation)
    epochs = options.epochs or max(default.epochs, -(-default.steps // steps), least_epochs)
    total = options.max_steps or epochs * steps
    schedule = next((method.schedule for method in methods if method.schedule), DEFAULT)
    init = next((method.data_start for method in methods if method.data_start), None)
    chosen = {
        "batch_size": batch_size,
        "epochs": epochs,
        "eval_every": options.eval_every or _eval_every(total, steps),
        "schedule": options.schedule or schedule,
        "init": options.init or init,
    }
    return RunOptions(**{**vars(options), **chosen})


def steps_per_epoch(rows: int, batch_size: int, gradient_accumulation: int) -> int:
    """Return the number of optimizer steps of one epoch."""
    return -(-rows // (batch_size * gradient_accumulation))


def usual_steps(options: TrainOptions, methods: Sequence[Method], rows: int) -> int:
    """Return the optimizer steps that a run takes, unless the number of steps is given."""
    chosen = run_options(options, methods, rows)
    per_epoch = steps_per_epoch(rows, chosen.batch_size, chosen.gradient_accumulation)
    return chosen.epochs * per_epoch


def _eval_every(total: int, steps: int) -> Literal["epoch"] | int:
    """Return how often to evaluate: each epoch, unless that is too often or too rarely."""
    epochs = -(-total // steps)
    if epochs > _MOST_EVALUATIONS:
        return steps * -(-epochs // _MOST_EVALUATIONS)
    if epochs >= _EVALUATIONS_OF_LONG_RUNS or total <= _LONG:
        return "epoch"
    return -(-total // _EVALUATIONS_OF_LONG_RUNS)
