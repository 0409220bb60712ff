"""The recipe: everything that determines a training run, in one dataclass and one YAML file.

`adapterhub recipe` prints one with a comment above each option. The first line of a recipe names
the JSON schema of all methods and tasks. Editors use that file, next to the recipe, for completion
and checks.

Defaults of training follow from the data: few rows need many passes, or the adapter stays near its
start; many rows need few. docs/guides/defaults.md describes the measurements behind the defaults.

Learning-rate schedules are pure functions from the step to a multiplier of the peak rate. Step t
counts from 0 to T - 1; from T on, the multiplier keeps its final value. During the W warm-up steps
it rises as (t + 1) / (W + 1), so the first step already trains. (`transformers` starts at 0; its
linear, cosine and constant schedules at step t + 1 of T + 1, with W + 1 warm-up steps, are the same
as these.)

With several tasks in one run, each optimizer step trains on one task. The task is drawn at random,
in one of three proportions by Raffel et al. 2020 (https://arxiv.org/abs/1910.10683), section 3.5.2:

    size          examples-proportional mixing: task m has the share r_m = min(e_m, K) / sum of
                  min(e_n, K), where e are numbers of examples and K is `limit`
    temperature   the shares r_m to the power of 1/T, renormalized: `size` at T = 1, nearly `equal`
                  at a large T
    equal         the same share for each task

The draws depend on the seed and the number of the step alone, so a resumed run repeats them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from adapterhub.backbones.torch_free_checks import dtype_name
from adapterhub.config.options import (
    OptionNames,
    from_dict,
    json_schema,
    option,
    options_schema,
    to_dict,
)
from adapterhub.config.yaml import (
    dump_yaml,
    load_yaml,
    merge_options,
    parse_calls,
    parse_overrides,
    spec_error,
)
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, unknown
from adapterhub.methods.common.base import (
    METHODS,
    Method,
    described_methods,
)
from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.output_folder import SCHEMA
from adapterhub.tasks import TASKS
from adapterhub.tasks.common.distillation import TeacherOptions

MIXING_EXAMPLES = "size, size(limit=10000), equal or temperature(t=2)"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # part of the names of tensors
_DRAWS = 0x7A5C  # separates the draws of tasks from the order of examples with the same seed


@dataclass(frozen=True)
class TaskOptions:
    """One task of several: its data, its head and metric (by its task), and its weight."""

    task: object = option(None, "a task spec (null: the recipe's `task`)", resumed="fixed")
    weight: float = option(1.0, "the factor on the task's loss", resumed="recorded")
    data: DataOptions = field(default_factory=DataOptions)

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"weight is {self.weight}", expected="a number above 0")


@dataclass(frozen=True)
class BySize:
    """Shares proportional to the numbers of examples, up to `limit` each."""

    limit: int | None = option(None, "count at most this many examples of a task")

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the unnormalized shares of tasks with these numbers of examples."""
        most = self.limit or max(sizes)
        return [float(min(size, most)) for size in sizes]


@dataclass(frozen=True)
class ByTemperature:
    """Shares between proportional (t=1) and equal ones (a large t)."""

    t: float = option(2.0, "the temperature: 1 is `size`, a large one nearly `equal`")
    limit: int | None = option(None, "count at most this many examples of a task")

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        if not 1 <= self.t < float("inf"):
            raise ConfigError(f"t is {self.t}", expected="a number from 1")

    def rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the unnormalized shares of tasks with these numbers of examples."""
        return [rate ** (1 / self.t) for rate in BySize(self.limit).rates(sizes)]


@dataclass(frozen=True)
class Equally:
    """The same share for each task."""

    def rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the unnormalized shares of tasks with these numbers of examples."""
        return [1.0] * len(sizes)


Mixing = BySize | ByTemperature | Equally
MIXINGS: dict[str, type[Mixing]] = {
    "size": BySize,
    "temperature": ByTemperature,
    "equal": Equally,
}


def parse_mixing(spec: object) -> Mixing:
    """Build a mixing from its spec: `size`, `temperature(t=2)` or {temperature: {t: 2}}.

    None means `size`, since unused options are null in a recipe.

    Raises:
        ConfigError: the name or an option is unknown, or the spec names several mixings.
    """
    spec = "size" if spec is None else spec
    parsed = parse_calls(spec, "mixing", MIXING_EXAMPLES) if isinstance(spec, str) else spec
    pairs = list(parsed.items()) if isinstance(parsed, Mapping) else parsed
    if not isinstance(pairs, list) or len(pairs) != 1 or not isinstance(pairs[0], tuple):
        raise spec_error(spec, "mixing", MIXING_EXAMPLES)
    ((name, options),) = pairs
    if name not in MIXINGS:
        raise unknown("mixing", str(name), MIXINGS, expected=MIXING_EXAMPLES)
    if options is not None and not isinstance(options, Mapping):
        raise spec_error(spec, "mixing", MIXING_EXAMPLES)
    mixing: Mixing = from_dict(MIXINGS[name], options or {}, where=name)
    return mixing


def dump_mixing(mixing: Mixing) -> dict[str, Any]:
    """Return the normal form of a mixing: {name: all options}."""
    name = next(name for name, cls in MIXINGS.items() if isinstance(mixing, cls))
    return {name: to_dict(mixing)}


def mixture_shares(
    mixing: Mixing, sizes: Mapping[str, int], weights: Sequence[float] = ()
) -> dict[str, float]:
    """Return the share of the steps of each task, or of the rows of each source; the sum is 1.

    `weights` are factors of the shares.
    """
    rates = mixing.rates(list(sizes.values()))
    if weights:
        rates = [rate * weight for rate, weight in zip(rates, weights, strict=True)]
    total = sum(rates)
    return {name: rate / total for name, rate in zip(sizes, rates, strict=True)}


def draw_tasks(shares: Sequence[float], steps: int, seed: int, epoch: int) -> list[int]:
    """Return the index of the task for each step of an epoch, counted from 0.

    The result depends on the arguments alone.
    """
    import numpy as np

    random = np.random.default_rng([seed, epoch, _DRAWS])
    drawn: list[int] = random.choice(len(shares), size=steps, p=np.asarray(shares)).tolist()
    return drawn


def check_task_names(names: Sequence[str]) -> None:
    """Check that the names of tasks can be part of the names of tensors and metrics.

    Raises:
        ConfigError: some names cannot; all of them are listed.
    """
    if wrong := [repr(name)[:60] for name in names if not _NAME.fullmatch(name)]:
        raise ConfigError(
            "invalid names of tasks",
            offenders=wrong,
            expected="1 to 40 of A-Z a-z 0-9 _ -, beginning with a letter or digit",
        )


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}", expected="a whole number from 1")


Multiplier = Callable[[int], float]

DEFAULT = "linear"
DEFAULT_WARMUP = 0.06
CUT_FRACTION = 0.1
RATIO = 32.0


def schedule(name: str, total_steps: int, warmup: float | None = None) -> Multiplier:
    """Return the function from step to multiplier, for `torch.optim.lr_scheduler.LambdaLR`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SHAPES:
        raise unknown("schedule", name, SHAPES, hint="train.schedule=linear")
    shape, steps = SHAPES[name], warmup_steps(name, total_steps, warmup)
    return lambda step: shape(step, total_steps, steps)


def warmup_steps(name: str, total_steps: int, warmup: float | None) -> int:
    """Return the number of warm-up steps; an option below 1 is a fraction of all steps.

    None means 0.06, or 0.1 for "slanted", whose cut is rounded down as in its paper.
    """
    if warmup is None:
        warmup = CUT_FRACTION if name == "slanted" else DEFAULT_WARMUP
    if warmup >= 1:
        return min(int(warmup), total_steps)
    # 100 * 0.07 is 7.000000000000001: the small term keeps whole products whole.
    exact = total_steps * warmup
    return math.floor(exact + 1e-9) if name == "slanted" else math.ceil(exact - 1e-9)


def _linear(step: int, total: int, warmup: int) -> float:
    """Warm up, then decay linearly to 0: (T - t) / (T - W)."""
    return _rise(step, warmup) if step < warmup else 1.0 - _progress(step, total, warmup)


def _cosine(step: int, total: int, warmup: int) -> float:
    """Warm up, then decay to 0 by half a cosine: (1 + cos(pi (t - W) / (T - W))) / 2."""
    if step < warmup:
        return _rise(step, warmup)
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, total, warmup)))


def _constant(step: int, total: int, warmup: int) -> float:
    """Warm up, then stay at 1."""
    return _rise(step, warmup) if step < warmup else 1.0


def _slanted(step: int, total: int, cut: int) -> float:
    """Slanted triangular: a short linear rise from 1/ratio to 1, then a long linear decay back.

    Howard & Ruder 2018, section 3.2, equation 3 (https://arxiv.org/abs/1801.06146):

        cut = floor(T cut_frac)
        p   = t / cut                                   t < cut
              1 - (t - cut) / (cut (1 / cut_frac - 1))  otherwise
        eta = eta_max (1 + p (ratio - 1)) / ratio

    Here cut / T replaces cut_frac, so that the decay ends at T. The two are equal where T cut_frac
    is whole; elsewhere the printed equation falls below zero before T.
    """
    p = step / cut if step < cut else 1.0 - _progress(step, total, cut)
    return (1.0 + p * (RATIO - 1.0)) / RATIO


def _rise(step: int, warmup: int) -> float:
    return (step + 1) / (warmup + 1)


def _progress(step: int, total: int, start: int) -> float:
    """Return the completed fraction of the steps from `start` to `total`, from 0 to 1."""
    return min(1.0, (step - start) / max(1, total - start))


SHAPES: dict[str, Callable[[int, int, int], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "slanted": _slanted,
    "constant": _constant,
}


Init: TypeAlias = Literal["eva", "eva-ranks", "lora-ga", "corda", "loftq"]


@dataclass(frozen=True)
class TrainOptions:
    """The options of training. Options that are None follow from the data and the method.

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
        "(which redistributes the ranks), lora-ga or corda; loftq: from the quantization error "
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
        "longest input, in tokens; the rest is cut (null: by the data, 128 to 512, or 1024 for "
        "causal-lm)",
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
    neftune_alpha: float | None = option(
        None,
        "noise on the token embeddings while training, up to alpha / sqrt(tokens x width), such "
        "as 5 (null: none)",
        resumed="recorded",
    )
    dropout: bool = option(
        False, "train with the dropout of the frozen backbone", resumed="recorded"
    )
    frozen_cache: Literal["memory", "off"] | None = option(
        None,
        "cache for the outputs of frozen lower layers, which are then computed once (null: "
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
        noise = self.neftune_alpha
        checks = (
            ("learning_rate", lr is None or lr > 0, "more than 0"),
            ("head_learning_rate", head is None or head > 0, "more than 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("beta1", 0 <= self.beta1 < 1, "at least 0, below 1"),
            ("beta2", 0 <= self.beta2 < 1, "at least 0, below 1"),
            ("eps", self.eps > 0, "more than 0"),
            ("neftune_alpha", noise is None or (math.isfinite(noise) and noise > 0), "more than 0"),
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
    """The options of one run, with all choices that depend on the data."""

    epochs: int = 3
    batch_size: int = 16
    max_length: int = 128
    eval_every: Literal["epoch"] | int = "epoch"


_MOST_EVALUATIONS = 10
_EVALUATIONS_OF_LONG_RUNS = 5
_LONG = 1_000  # steps: in longer runs, one evaluation per epoch may be too few


@dataclass(frozen=True)
class RowsDefault:
    """The defaults for data with up to `rows` rows: at least as many steps, and epochs."""

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
    """Choose the options left open by the user, for this number of rows per epoch.

    The methods determine the schedule; their stages need `least_epochs`.
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
    """Return the usual number of optimizer steps of a run without a fixed number of steps."""
    chosen = run_options(options, methods, rows)
    per_epoch = steps_per_epoch(rows, chosen.batch_size, chosen.gradient_accumulation)
    return chosen.epochs * per_epoch


def _eval_every(total: int, steps: int) -> Literal["epoch"] | int:
    """Return the interval of evaluations: an epoch, unless that is too short or too long."""
    epochs = -(-total // steps)
    if epochs > _MOST_EVALUATIONS:
        return steps * -(-epochs // _MOST_EVALUATIONS)
    if epochs >= _EVALUATIONS_OF_LONG_RUNS or total <= _LONG:
        return "epoch"
    return -(-total // _EVALUATIONS_OF_LONG_RUNS)


SPECS = ("method", "task")


REQUIRED = ("data.train", "output")
_REPLACED = (*SPECS, "mixing")  # specs, which a later layer replaces entirely
# Local paths in `data`; a share of test rows is identified by their number.
DATA_SOURCES = ("train", "eval", "test", "train_target", "eval_target", "retain")


@dataclass(frozen=True)
class Recipe:
    """A training run. The same recipe, data and versions give the same adapter."""

    backbone: str = option("", "a Hub id or folder (empty: by the task)", resumed="fixed")
    revision: str | None = option(None, "branch, tag or commit of a Hub backbone", resumed="fixed")
    dtype: str | None = option(
        None,
        "precision of the frozen backbone: fp32, bf16, fp16 (null: bf16 if quantized, unless "
        "several times slower here; else the faster of fp32 and bf16, measured)",
        resumed="recorded",
    )
    attention: str | None = option(
        None,
        "attention implementation: eager, sdpa, ... (null: the fastest here, measured)",
        resumed="recorded",
    )
    quantize: str | None = option(
        None, "kind: nf4, fp4, int8, int8-weight, fp8-weight, dequantize", resumed="recorded"
    )
    family: dict[str, Any] | str | None = option(
        None, "the backbone's row of sites: a YAML file or its content", resumed="fixed"
    )
    new_tokens: tuple[str, ...] = option(
        (), "tokens to add to the backbone's tokenizer", resumed="fixed"
    )
    method: object = option(
        None,
        "a spec: lora(rank=16), or a list (null: by the task)",
        resumed="fixed",
    )
    from_: str | None = option(
        None, "trained adapter to start from: a name, folder or Hub id", resumed="fixed"
    )
    on: tuple[str, ...] = option(
        (), "trained adapters under the new one; they stay frozen", resumed="fixed"
    )
    partial: bool = option(
        False,
        "adapt only the layers that have the method's sites, if some lack them",
        resumed="fixed",
    )
    task: object = option(
        None, "a spec: seq2seq(metric=rouge) (null: by the data)", resumed="fixed"
    )
    tasks: dict[str, TaskOptions] = option(
        {},
        "several tasks with one adapter and a head each: {NAME: {task, weight, data}}",
        resumed="fixed",
    )
    mixing: object = option(
        None,
        "the share of each of `tasks`, or of the sources of data.train: size, equal, "
        "temperature(t=2) (null: size; of streamed sources equal)",
        resumed="recorded",
    )
    name: str | None = option(
        None, "the adapter's name (null: the output folder's name)", resumed="same"
    )
    output: str = option(
        "", "folder of the run: adapter, recipe, metrics, checkpoints", resumed="same"
    )
    seed: int = option(0, "seed of initialization, sampling and batch order", resumed="fixed")
    teacher: TeacherOptions = option(
        TeacherOptions(),
        "the teacher whose probabilities are learned",
        omitted=True,
        resumed="fixed",
    )
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        parse_mixing(self.mixing)
        if isinstance(self.family, str):  # the run's own recipe has the content
            object.__setattr__(self, "family", load_yaml(self.family))
        if self.tasks:
            self._check_tasks()

    def _check_tasks(self) -> None:
        check_task_names(list(self.tasks))
        if "test" in self.tasks and any(own.data.test for own in self.tasks.values()):
            raise ConfigError(
                "a task called test next to data.test, whose metrics are called test/NAME",
                expected="another name of the task",
            )
        if of_one_task := [
            name
            for name in DATA_SOURCES
            if getattr(self.data, name) is not None
            and not (name == "test" and self.data.test_share)
        ]:
            raise ConfigError(
                "data of one task next to `tasks`",
                offenders=[f"data.{name}={getattr(self.data, name)}" for name in of_one_task],
                expected="the data of each task: tasks.NAME.data.train; other options of `data` "
                "hold for all tasks",
            )

    @property
    def adapter_name(self) -> str:
        """The adapter's name, by default the name of the output folder, in portable characters.

        It must be valid for a registry, a server's URL and `vllm serve --lora-modules NAME=FOLDER`.
        """
        if self.name is not None:
            return self.name
        plain = re.sub(r"[^\w.-]+|\.{2,}", "-", Path(self.output).absolute().name)
        return plain.strip("-._")[:96] or "adapter"

    def of_task(self, name: str) -> Recipe:
        """Return the recipe of one of `tasks` alone, without options on the mean of all tasks."""
        own = self.tasks[name]
        task = self.task if own.task is None else own.task
        train = replace(self.train, best_metric=None, patience=None)
        return replace(self, task=task, data=own.data, train=train, tasks={}, mixing=None)

    def to_yaml(self) -> str:
        """Return the recipe as YAML, for `read`."""
        return dump_yaml(to_dict(self))


STAGES = "stages"  # the key of several runs in one file
NAMES = OptionNames(
    Recipe, ALIASES, MEANINGS, texts={"data": "data.train", "teacher": "teacher.model"}
)


def read(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe. Flags override the file, and words such as `train.epochs=1` override both.

    Raises:
        ConfigError: unknown options (with replacements), values of a wrong type, or a
            required option is missing.
    """
    return _complete(read_draft(path, overrides, flags))


def read_layers(layers: Iterable[Mapping[str, Any]]) -> Recipe:
    """Build a recipe from layers of options under their own names; later ones override.

    Raises:
        ConfigError: as in `read`.
    """
    return _complete(_draft(layered(layers)))


def _complete(recipe: Recipe) -> Recipe:
    """Check that a recipe has all required options."""
    if missing := _missing(recipe):
        raise ConfigError(
            "the recipe is incomplete",
            offenders=[f"{name} is missing" for name in missing],
            hint="adapterhub train FILE --output DIR",
        )
    return recipe


def _missing(recipe: Recipe) -> list[str]:
    """List the missing required options; each of several tasks has its own data."""
    names = [name for name in REQUIRED if not (recipe.tasks and name.startswith("data."))]
    missing = [name for name in names if not attrgetter(name)(recipe)]
    without = [name for name, own in recipe.tasks.items() if not own.data.train]
    return missing + [f"tasks.{name}.data.train" for name in without]


def read_draft(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe in which required options may be missing.

    Raises:
        ConfigError: unknown options, or values of a wrong type.
    """
    layers = (load_yaml(path) if path else {}, flags or {}, parse_overrides(overrides))
    return _draft(layered(map(NAMES.normal_form, layers)))


def layered(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers of options under their own names; later ones override."""
    data: dict[str, Any] = {}
    for options in layers:
        # A spec replaces the earlier one entirely: merging two mappings would give two methods.
        kept = {k: v for k, v in data.items() if k not in _REPLACED or k not in options}
        data = merge_options(kept, options)
    return data


def _draft(data: dict[str, Any]) -> Recipe:
    """Build a recipe from options under their own names."""
    _share_data(data)
    return from_dict(Recipe, data, suggest=NAMES.suggest)


def _share_data(data: dict[str, Any]) -> None:
    """Give each of several tasks the options of `data` that apply to all of them."""
    tasks, shared = data.get("tasks"), data.get("data")
    if not isinstance(tasks, Mapping) or not isinstance(shared, Mapping):
        return
    own = {name for name in DATA_SOURCES if name != "test"}  # a share of each, or an error
    usual = {name: value for name, value in shared.items() if name not in own}
    data["tasks"] = {
        name: {**task, "data": merge_options(usual, task.get("data") or {})}
        if isinstance(task, Mapping) and isinstance(task.get("data") or {}, Mapping)
        else task
        for name, task in tasks.items()
    }


SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"


def recipe_schema() -> dict[str, Any]:
    """Derive the schema of recipes from the classes of recipes, methods and tasks."""
    schema = json_schema(Recipe)
    several = {"type": "array", "items": {"$ref": "#/$defs/method"}, "minItems": 1}
    described = described_methods()
    method = _spec_schema({name: (m.summary, m.options) for name, m in described.items()})
    task = _spec_schema({name: (cls.summary, cls) for name, cls in TASKS.items()})
    task["anyOf"][-1]["maxProperties"] = 1
    method["anyOf"].append(several)
    schema["properties"]["method"]["anyOf"] = [{"$ref": "#/$defs/method"}, {"type": "null"}]
    schema["properties"]["task"]["anyOf"] = [{"$ref": "#/$defs/task"}, {"type": "null"}]
    stage = _stage_schema(schema["properties"])
    schema["properties"][STAGES] = {
        "type": "array",
        "items": {"$ref": "#/$defs/stage"},
        "minItems": 1,
        "description": "runs of which each may start from an earlier one, with options of their "
        "own",
    }
    of_task = schema["properties"]["tasks"]["additionalProperties"]["properties"]
    of_task["task"]["anyOf"] = [{"$ref": "#/$defs/task"}, {"type": "null"}]
    return schema | {"$defs": {"method": method, "task": task, "stage": stage}}


def _stage_schema(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a stage: a name, and the options of a recipe."""
    properties = {name: {"$ref": f"#/properties/{name}"} for name in options if name != "output"}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name"],
        "additionalProperties": False,
    }


def schema_bytes() -> bytes:
    """Return the content of the file of the schema, which lies next to a recipe."""
    return _schema_bytes((*METHODS.imported().values(), *TASKS.values()))


@functools.cache
def _schema_bytes(registered: tuple[type, ...]) -> bytes:
    """Serialize the schema as JSON, once for the registered classes."""
    text = json.dumps(recipe_schema(), ensure_ascii=False, separators=(",", ":"))
    return f"{text}\n".encode()


def _spec_schema(choices: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    """Return the schema of a spec: a name, a call as text, or {name: options}.

    `choices` has the summary and the options of each method or task.
    """
    names = [{"const": name, "description": text} for name, (text, _) in sorted(choices.items())]
    options = {
        name: {"description": text, **_or_null(options_schema(cls))}
        for name, (text, cls) in sorted(choices.items())
    }
    return {
        "anyOf": [
            *names,
            {"type": "string", "pattern": rf"^\s*({'|'.join(sorted(choices))})\s*[(,]"},
            {
                "type": "object",
                "properties": options,
                "additionalProperties": False,
                "minProperties": 1,
            },
        ]
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"type": ["object", "null"]}
